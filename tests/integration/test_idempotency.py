"""Idempotency keys on real servers: claims in Cassandra, and two API processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from acceptance_tasks import registry
from api_process import ApiProcess, eventually, running_api
from confluent_kafka import Consumer, TopicPartition

from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.local.roles import Role
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import Priority, TaskSubmitted
from taskline.schemas.ids import new_task_id
from taskline.schemas.types import TaskType
from taskline.settings import Settings
from taskline.state.cassandra import CassandraStore
from taskline.state.claims import Claim, ClaimKey, ClaimKind

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

SUPPORT = Path(__file__).parents[1] / "support"
# Replicas that are killed, one after another.
KILLS = int(os.environ.get("TASKLINE_TEST_KILLS", "2"))
# Every other one keeps its records so long before it sends them, so that it certainly dies between the key and the log.
LATE_MS = 2_000.0
ANSWER_SECONDS = 60.0
QUIET_SECONDS = 1.0
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


# ---- one of two replicas is killed --------------------------------------------------------------------------------


@dataclass
class Watched:
    """Many callers with the same request; half of them at a replica that is killed, who go on at the other, where the others come a moment later."""

    doomed: ApiProcess
    other: ApiProcess
    body: dict[str, Any]
    # Connections that the kill broke, and answers that asked to come again.
    broken: int = 0
    waited: Counter[str] = field(default_factory=Counter)
    # Set when the first replica has the claim.
    claimed: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def post(self, number: int) -> httpx.Response:
        if number % 2:
            assert self.claimed.wait(ANSWER_SECONDS)
            api = self.other
        else:
            api = self.doomed
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            assert time.monotonic() < deadline
            try:
                answer = api.client.post("/tasks", json=self.body)
            except httpx.TransportError:
                # (The other one may have closed a connection that was idle for long.)
                if api is self.doomed:
                    with self._lock:
                        self.broken += 1
                api = self.other
                continue
            if answer.status_code != 503:
                return answer
            with self._lock:
                self.waited[answer.json()["type"]] += 1
            time.sleep(int(answer.headers["retry-after"]))


def kill_once_claimed(settings: Settings, name: str, callers: Watched) -> None:
    """SIGKILL as soon as the key is claimed."""

    async def watch() -> None:
        store = await CassandraStore.connect(settings)
        try:
            claims = await store.claims()
            key = ClaimKey(tenant="default", kind=ClaimKind.IDEMPOTENCY, name=name)
            watching.set()
            while await claims.find(key) is None:
                pass
            callers.doomed.process.kill()
            callers.claimed.set()
        finally:
            await store.close()

    watching = threading.Event()
    watcher = threading.Thread(target=lambda: asyncio.run(watch()))
    watcher.start()
    assert watching.wait(30)


def test_parallel_requests_are_one_task_that_runs_once_though_a_replica_is_killed(
    topics_created: Settings, view_ready: None, tmp_path: Path
) -> None:
    """A claim whose owner died is taken over after its deadline; repeats in the log would have the same id, and one effect."""
    settings = topics_created.model_copy(
        update={
            # So that a dead owner is waited for some ten seconds.
            "api": topics_created.api.model_copy(
                update={"request_timeout_seconds": 3.0, "shutdown_delay_seconds": 0.0}
            ),
            "worker": topics_created.worker.model_copy(update={"coroutines": "inline"}),
        }
    )
    late = settings.model_copy(
        update={"producer": settings.producer.model_copy(update={"linger_ms": LATE_MS})}
    )
    with TypeDirectory(settings) as directory:
        directory.register(registry.types)
    ledger = tmp_path / "ledger"
    ledger.touch()
    roles = [
        Role(arguments, settings, log=tmp_path / f"{arguments[0]}.log", cwd=SUPPORT, environ={"TEST_LEDGER": str(ledger)})
        for arguments in (("worker", "acceptance_tasks:registry"), ("projector",))
    ]  # fmt: skip
    ids: list[str] = []
    with ExitStack() as stack:
        for role in roles:
            stack.enter_context(role)
        folders = [tmp_path / f"api-{number}" for number in range(KILLS + 1)]
        for folder in folders:
            folder.mkdir()
        other = stack.enter_context(running_api(settings, folders[0]))
        for number in range(KILLS):
            early = number % 2 == 0
            doomed = stack.enter_context(running_api(late if early else settings, folders[number + 1]))
            for each in (doomed, other):
                eventually(each.ready, "the API is ready")
            name = f"order-{number}"
            callers = Watched(
                doomed,
                other,
                {"task_type": "test.count", "payload": {"ms": 0, "n": number}, "idempotency_key": name},
            )
            kill_once_claimed(settings, name, callers)
            with ThreadPoolExecutor(40) as pool:
                answers = list(pool.map(callers.post, range(200)))
            assert doomed.process.wait(10) == -signal.SIGKILL
            print(
                f"round {number}: {callers.broken} broken connections, told to wait: {dict(callers.waited)}"
            )
            assert callers.broken
            assert not early or callers.waited["urn:taskline:problem:submission-in-progress"]
            assert {each.status_code for each in answers} == {201}
            assert len({each.json()["task_id"] for each in answers}) == 1
            ids.append(answers[0].json()["task_id"])
        for task_id in ids:
            ended = other.client.get(f"/tasks/{task_id}", params={"wait": 60}, timeout=90).json()
            assert ended["status"] == "completed"
        records = Counter(str(each.task_id) for each in in_log(settings))
        # Whatever stands twice in the log has been read by now.
        assert set(records) == set(ids)
        time.sleep(QUIET_SECONDS)
        print(f"records by task: {list(records.values())}")
        for role in roles:
            role.check()
    assert sorted(ledger.read_text().split("\n")[:-1]) == sorted(f"{task_id} 1" for task_id in ids)
