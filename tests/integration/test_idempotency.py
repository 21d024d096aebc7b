"""Idempotency keys on real servers: claims in Cassandra, and two API processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from api_process import ApiProcess, eventually, running_api
from confluent_kafka import Consumer, TopicPartition

from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import Priority, TaskSubmitted
from taskline.schemas.ids import new_task_id
from taskline.schemas.types import TaskType
from taskline.settings import Settings
from taskline.state.cassandra import CassandraStore
from taskline.state.claims import Claim, ClaimKey, ClaimKind

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

KEYED = {"task_type": "any.json", "payload": {"n": 1}, "idempotency_key": "order-17"}


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def a_claim(name: str, *, seconds: float = 60) -> Claim:
    return Claim(
        key=ClaimKey(tenant="acme", kind=ClaimKind.IDEMPOTENCY, name=name),
        task_id=new_task_id(now_ms()),
        owner=uuid4(),
        request_hash=b"h",
        deadline=now_ms() + 5_000,
        expires_at=now_ms() + round(seconds * 1000),
    )


def test_of_many_who_want_a_claim_one_gets_it(settings: Settings, view_ready: None) -> None:
    async def main() -> None:
        store = await CassandraStore.connect(settings)
        try:
            claims = await store.claims()
            wanted = [a_claim(str(settings.kafka.namespace)) for _ in range(8)]
            held = await asyncio.gather(*(claims.take(each, now_ms()) for each in wanted))
            assert len({each.owner for each in held}) == 1
            first = held[0]
            assert await claims.find(first.key) == first
            heirs = [replace(first, owner=uuid4(), deadline=now_ms() + 9_000) for _ in range(8)]
            renewed = await asyncio.gather(*(claims.renew(first, each, now_ms()) for each in heirs))
            assert sum(renewed) == 1
            heir = heirs[renewed.index(True)]
            assert await claims.find(first.key) == heir
            await claims.settle(heir, heir.task_id, now_ms())
            assert await claims.take(a_claim(first.key.name), now_ms()) == replace(heir, outcome=heir.task_id)
            short = a_claim(f"{settings.kafka.namespace}short", seconds=1)
            await claims.take(short, now_ms())
            await asyncio.sleep(2.5)
            assert await claims.find(short.key) is None
        finally:
            await store.close()

    asyncio.run(main())


@pytest.fixture
def replicas(topics_created: Settings, view_ready: None, tmp_path: Path) -> Iterator[list[ApiProcess]]:
    with TypeDirectory(topics_created) as directory:
        directory.register([TaskType(name="any.json")])
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with running_api(topics_created, folders[0]) as one, running_api(topics_created, folders[1]) as two:
        for each in (one, two):
            eventually(each.ready, "the API is ready")
        yield [one, two]


def in_log(settings: Settings) -> list[TaskSubmitted]:
    topic = Topics(namespace=settings.kafka.namespace).dispatch("default", Priority.NORMAL)
    consumer = Consumer({"bootstrap.servers": settings.kafka.bootstrap_servers, "group.id": "unused"})
    found = []
    try:
        for partition in range(settings.topics.dispatch_partitions):
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
            consumer.assign([TopicPartition(topic, partition, low)])
            for _ in range(low, high):
                message = consumer.poll(10)
                assert message is not None
                assert message.error() is None
                found.append(Codec().decode(message.value(), TaskSubmitted))
    finally:
        consumer.close()
    return found


def test_parallel_requests_on_two_replicas_are_one_task(
    topics_created: Settings, replicas: list[ApiProcess]
) -> None:
    """No projector runs: what one process has submitted the other knows from the claim alone."""

    def post(number: int) -> httpx.Response:
        return replicas[number % 2].client.post("/tasks", json=KEYED)

    with ThreadPoolExecutor(40) as pool:
        responses = list(pool.map(post, range(200)))
    assert {each.status_code for each in responses} == {201}
    assert sum("idempotency-replayed" not in each.headers for each in responses) == 1
    (task,) = in_log(topics_created)
    assert {each.json()["task_id"] for each in responses} == {str(task.task_id)}
