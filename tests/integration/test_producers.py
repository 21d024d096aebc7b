"""Producers on a real broker: positions, order, loss, refusals, and a broker that is not there."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer, TopicPartition

from taskline.errors import (
    DeliveryFailed,
    DeliveryUnknown,
    InvalidOption,
    InvalidSettings,
    PayloadTooLarge,
    ProducerClosed,
    QueueFull,
    Undelivered,
    UnknownTaskType,
)
from taskline.infra.kafka.admin import create_topics
from taskline.infra.kafka.asynclog import KafkaLog
from taskline.infra.kafka.lifecycle import LifecycleLog
from taskline.infra.kafka.publisher import Publisher
from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.log import HEADER_TASK_ID, OutRecord, Position
from taskline.infra.topics import Topics
from taskline.producers import AsyncTaskProducer, Submission, TaskFailure, TaskHandle, TaskProducer
from taskline.producers.cli import submit
from taskline.schemas.codec import Codec
from taskline.schemas.events import LifecycleBatch, LifecycleEvent, Priority, Started, TaskSubmitted
from taskline.schemas.ids import TaskId, lane_of, new_task_id
from taskline.schemas.types import TaskType
from taskline.settings import Settings

pytestmark = pytest.mark.servers

SECONDS = 60.0
NOBODY = "127.0.0.1:1"


class Types:
    def get(self, name: str) -> TaskType:
        return TaskType(name=name, queue="nowhere" if name == "lost" else "default")


TYPES = Types()


def changed(settings: Settings, section: str, **values: object) -> Settings:
    part = getattr(settings, section)
    return settings.model_copy(update={section: part.model_copy(update=values)})


def read(settings: Settings, topic: str, partitions: int = 3) -> list[Any]:
    """Everything on a topic, by partition and offset."""
    consumer = Consumer(
        {
            "bootstrap.servers": settings.kafka.bootstrap_servers,
            "group.id": f"{settings.kafka.namespace}reader",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        ends = {
            number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=SECONDS)[1]
            for number in range(partitions)
        }
        consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
        found: list[Any] = []
        deadline = time.monotonic() + SECONDS
        while len(found) < sum(ends.values()):
            assert time.monotonic() < deadline, f"{len(found)} of {sum(ends.values())} records came"
            found += consumer.consume(1_000, timeout=0.5)
    finally:
        consumer.close()
    return sorted(found, key=lambda message: (message.partition(), message.offset()))


def dispatch(settings: Settings, priority: Priority = Priority.NORMAL) -> str:
    return Topics(namespace=settings.kafka.namespace).dispatch("default", priority)


def test_a_handle_names_the_place_of_the_record(topics_created: Settings) -> None:
    with TaskProducer(topics_created, TYPES) as tasks:
        handle = tasks.submit("any", {"n": 1}, priority="high", tenant="acme", affinity_key="k")
        again = tasks.submit("any", {"n": 2}, priority="high", affinity_key="k")
    first, second = read(topics_created, dispatch(topics_created, Priority.HIGH))
    assert handle.position == Position(
        topic=first.topic(), partition=first.partition(), offset=first.offset()
    )
    assert (again.position.partition, again.position.offset) == (first.partition(), 1)
    assert first.key() == second.key() == b"k"
    assert first.headers() == [(HEADER_TASK_ID, handle.task_id.bytes)]
    submission = Codec().decode(first.value(), TaskSubmitted)
    assert submission.task_id == handle.task_id
    assert submission.tenant == "acme"
    assert submission.payload == b'{"n":1}'


def test_twenty_thousand_in_order_and_none_lost(topics_created: Settings) -> None:
    count = 20_000
    with TaskProducer(topics_created, TYPES) as tasks:
        results = list(
            tasks.submit_many(
                Submission(task_type="any", payload=number, affinity_key=f"k{number % 50}")
                for number in range(count)
            )
        )
    assert all(isinstance(result, TaskHandle) for result in results)
    handles = {result.task_id: result.position for result in results if isinstance(result, TaskHandle)}
    assert len(handles) == count

    messages = read(topics_created, dispatch(topics_created))
    codec = Codec()
    submissions = [codec.decode(message.value(), TaskSubmitted) for message in messages]
    assert Counter(int(submission.payload) for submission in submissions) == Counter(range(count))
    for message, submission in zip(messages, submissions, strict=True):
        assert handles[submission.task_id].offset == message.offset()
        assert handles[submission.task_id].partition == message.partition()
    # Within a key, and so within a partition, the order is the caller's.
    by_key: dict[str, list[int]] = {}
    for submission in submissions:
        by_key.setdefault(submission.affinity_key or "", []).append(int(submission.payload))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


def test_async_under_a_thousand_submits_at_once(topics_created: Settings) -> None:
    async def main() -> list[TaskHandle]:
        async with AsyncTaskProducer.on_kafka(topics_created, TYPES) as tasks:
            return await asyncio.gather(*(tasks.submit("any", number) for number in range(1_000)))

    handles = asyncio.run(main())
    places = {(handle.position.partition, handle.position.offset) for handle in handles}
    assert len(places) == 1_000
    assert len(read(topics_created, dispatch(topics_created))) == 1_000


def test_async_submit_many_through_a_small_buffer(topics_created: Settings) -> None:
    settings = changed(topics_created, "producer", max_buffered_records=50)

    async def main() -> list[TaskHandle | TaskFailure]:
        async with AsyncTaskProducer.on_kafka(settings, TYPES) as tasks:
            many = [Submission(task_type="any", payload=number) for number in range(2_000)]
            return [result async for result in tasks.submit_many(many)]

    results = asyncio.run(main())
    assert all(isinstance(result, TaskHandle) for result in results)
    assert len(read(topics_created, dispatch(topics_created))) == 2_000


def test_a_full_buffer_makes_appends_wait_their_turn(topics_created: Settings) -> None:
    settings = changed(topics_created, "producer", max_buffered_records=10)
    topic = dispatch(settings)

    async def main() -> list[Position]:
        log = KafkaLog(settings, client_id="test")
        records = [OutRecord(topic=topic, value=str(n).encode(), partition=0) for n in range(500)]
        positions = await asyncio.gather(*map(log.append, records))
        assert await log.close() == 0
        return positions

    assert [position.offset for position in asyncio.run(main())] == list(range(500))
    assert [int(message.value()) for message in read(settings, topic)] == list(range(500))


def test_a_missing_topic_is_a_certain_failure(topics_created: Settings) -> None:
    with TaskProducer(topics_created, TYPES) as tasks:
        with pytest.raises(DeliveryFailed, match="nowhere") as caught:
            tasks.submit("lost", 1)
        assert caught.value.task_id
        # The producer is as good as before.
        assert tasks.submit("any", 1)


def test_bad_items_do_not_stop_the_others(topics_created: Settings) -> None:
    def mixed() -> Iterator[Submission]:
        for number in range(300):
            if number % 100 == 7:
                yield Submission(task_type="any", payload="x" * 300_000)
            else:
                yield Submission(task_type="lost" if number % 100 == 8 else "any", payload=number)

    with TaskProducer(topics_created, TYPES) as tasks:
        results = list(tasks.submit_many(mixed()))
    failures = {result.index: result.error for result in results if isinstance(result, TaskFailure)}
    assert sorted(failures) == [7, 8, 107, 108, 207, 208]
    assert all(isinstance(failures[index], PayloadTooLarge) for index in (7, 107, 207))
    assert all(isinstance(failures[index], DeliveryFailed) for index in (8, 108, 208))
    assert len(read(topics_created, dispatch(topics_created))) == 294


def test_what_the_broker_finds_too_large_fails_alone(topics_created: Settings) -> None:
    """The client's own limit is that of the dead-letter topic, so that the broker has the last word."""
    topic = dispatch(topics_created)

    async def main() -> tuple[Any, ...]:
        log = KafkaLog(topics_created, client_id="test")
        # Random bytes: what counts for the broker is the compressed size.
        large = random.Random(1).randbytes(1_500_000)
        results = await asyncio.gather(
            log.append(OutRecord(topic=topic, value=b"a", partition=0)),
            log.append(OutRecord(topic=topic, value=large, partition=0)),
            log.append(OutRecord(topic=topic, value=b"b", partition=0)),
            log.append(OutRecord(topic=topic, value=bytes(3_000_000), partition=0)),
            return_exceptions=True,
        )
        await log.close()
        return tuple(results)

    first, refused_by_broker, second, refused_by_client = asyncio.run(main())
    assert isinstance(first, Position)
    assert isinstance(second, Position)
    assert isinstance(refused_by_broker, DeliveryFailed)
    assert isinstance(refused_by_client, DeliveryFailed)
    assert [message.value() for message in read(topics_created, topic)] == [b"a", b"b"]


def test_batches_fit_a_small_record_limit(settings: Settings) -> None:
    """A request's batch must not outgrow what the topic takes, however many records share it."""
    small = changed(settings, "topics", max_record_bytes=16_384)
    create_topics(small)
    with TaskProducer(changed(small, "producer", linger_ms=50, compression="none"), TYPES) as tasks:
        many = (Submission(task_type="any", payload="x" * 3_000) for _ in range(200))
        assert all(isinstance(result, TaskHandle) for result in tasks.submit_many(many))


def test_nobody_answers_submit(settings: Settings) -> None:
    away = changed(
        changed(settings, "kafka", bootstrap_servers=NOBODY), "producer", delivery_timeout_seconds=1.0
    )
    with TaskProducer(away, TYPES) as tasks:
        with pytest.raises(DeliveryUnknown) as caught:
            tasks.submit("any", 1)
        assert caught.value.task_id
        (failure,) = tasks.submit_many([Submission(task_type="any", payload=1)])
        assert isinstance(failure, TaskFailure)
        assert isinstance(failure.error, DeliveryUnknown)
        assert failure.task_id is not None


def test_nobody_answers_a_full_buffer(settings: Settings) -> None:
    away = changed(
        changed(settings, "kafka", bootstrap_servers=NOBODY),
        "producer",
        max_buffered_records=3,
        max_block_seconds=0.05,
        delivery_timeout_seconds=1.0,
    )

    async def main() -> list[Any]:
        log = KafkaLog(away, client_id="test")
        records = [OutRecord(topic="t", value=b"") for _ in range(6)]
        results = await asyncio.gather(*map(log.append, records), return_exceptions=True)
        await log.close(0)
        return results

    assert [type(result) for result in asyncio.run(main())] == [DeliveryUnknown] * 3 + [QueueFull] * 3


def test_close_names_what_an_unreachable_broker_did_not_take(settings: Settings) -> None:
    away = changed(settings, "kafka", bootstrap_servers=NOBODY)

    async def main() -> tuple[Undelivered, list[Any]]:
        tasks = AsyncTaskProducer.on_kafka(away, TYPES)
        submitting = [asyncio.create_task(tasks.submit("any", number)) for number in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(Undelivered) as caught:
            await tasks.close(0.2)
        results = await asyncio.gather(*submitting, return_exceptions=True)
        with pytest.raises(ProducerClosed):
            await tasks.submit("any", 1)
        return caught.value, results

    undelivered, results = asyncio.run(main())
    assert all(isinstance(result, DeliveryUnknown) for result in results)
    assert sorted(undelivered.task_ids) == sorted(result.task_id for result in results)


def test_sync_close_names_what_an_unreachable_broker_did_not_take(settings: Settings) -> None:
    away = changed(settings, "kafka", bootstrap_servers=NOBODY)
    tasks = TaskProducer(away, TYPES)

    def endless() -> Iterator[Submission]:
        for number in range(4):
            yield Submission(task_type="any", payload=number)
        with pytest.raises(Undelivered) as caught:
            tasks.close(0.2)
        named.extend(caught.value.task_ids)

    named: list[str] = []
    results = list(tasks.submit_many(endless()))
    assert sorted(str(result.task_id) for result in results) == sorted(named)
    assert all(isinstance(result, TaskFailure) for result in results)


def test_settings_that_the_client_refuses(settings: Settings) -> None:
    odd = changed(settings, "kafka", security_protocol="SSL", ssl_ca_location="/nowhere/ca.pem")
    with pytest.raises(InvalidSettings, match="ssl"):
        TaskProducer(odd, TYPES)


def test_the_publishers_callbacks_come_once_each(topics_created: Settings) -> None:
    publisher = Publisher(topics_created.kafka, topics_created.producer, client_id="test")
    seen: Counter[int] = Counter()
    for number in range(5_000):
        publisher.send(
            OutRecord(topic=dispatch(topics_created), value=b"x"),
            lambda outcome, number=number: seen.update([number]) if isinstance(outcome, Position) else None,
        )
    assert publisher.close(SECONDS) == 0
    assert seen == Counter(range(5_000))


def test_lifecycle_events_keep_their_order_in_their_lanes(topics_created: Settings) -> None:
    codec, topics = Codec(), Topics(namespace=topics_created.kafka.namespace)
    lanes = topics_created.topics.lanes
    task_ids = [new_task_id(1_750_000_000_000) for _ in range(200)]

    def event(task_id: TaskId, attempt: int) -> Started:
        return Started(
            task_id=task_id,
            tenant="t",
            attempt=attempt,
            worker="w",
            at=1,
            retain_until=1,
            execution=task_id,
            source_topic="t",
            source_partition=0,
            source_offset=0,
        )

    async def main() -> None:
        log = KafkaLog(topics_created, client_id="test")
        lifecycle = LifecycleLog(log, codec, topics, lanes, 1.0)

        async def live(task_id: TaskId) -> None:
            for attempt in range(1, 6):
                position = await lifecycle.append(event(task_id, attempt))
                assert position.partition == lane_of(task_id, lanes)

        await asyncio.gather(*map(live, task_ids))
        await lifecycle.flush()
        assert await log.close() == 0

    asyncio.run(main())
    found: dict[TaskId, list[int]] = {}
    messages = read(topics_created, topics.lifecycle)
    for message in messages:
        for entry in codec.decode(message.value(), LifecycleBatch).events:
            assert lane_of(entry.task_id, lanes) == message.partition()
            decoded = codec.decode(entry.event, LifecycleEvent)
            found.setdefault(entry.task_id, []).append(decoded.attempt)
    assert found == {task_id: [1, 2, 3, 4, 5] for task_id in task_ids}
    assert len(messages) < 1_000, "events share batches"


def test_without_types_at_hand_they_come_from_the_log(topics_created: Settings) -> None:
    with TypeDirectory(topics_created) as directory:
        directory.register([TaskType(name="any.registered")])
    with TaskProducer(topics_created) as tasks:
        assert tasks.submit("any.registered", 1)
        with pytest.raises(UnknownTaskType, match="did you mean"):
            tasks.submit("any.registred", 1)

    async def main() -> TaskHandle:
        async with AsyncTaskProducer.on_kafka(topics_created) as tasks:
            return await tasks.submit("any.registered", 2)

    assert asyncio.run(main()).position.topic == dispatch(topics_created)


def test_the_command(topics_created: Settings) -> None:
    with TypeDirectory(topics_created) as directory:
        directory.register([TaskType(name="any.registered")])

    def run(*arguments: str, stdin: str | None = None) -> Any:
        return CliRunner().invoke(submit, arguments, obj=topics_created, input=stdin)

    def answer(result: Any) -> str:
        # Without `taskline` around it, structlog's lines go to standard output too.
        return result.stdout.splitlines()[-1]

    plain = run("any.registered", '{"n": 1}', "--priority", "high", "--tenant", "acme")
    assert plain.exit_code == 0
    described = json.loads(answer(run("any.registered", "-", "--json", stdin="[1]")))
    assert described["status"] == "pending"
    assert described["topic"] == dispatch(topics_created)
    (message,) = read(topics_created, dispatch(topics_created, Priority.HIGH))
    submission = Codec().decode(message.value(), TaskSubmitted)
    assert str(submission.task_id) == answer(plain)
    assert (submission.tenant, submission.payload) == ("acme", b'{"n":1}')

    not_json = run("any.registered", "{")
    assert not_json.exit_code == 2
    assert "not JSON" in not_json.stderr
    unknown = run("nobody")
    assert isinstance(unknown.exception, UnknownTaskType)
    odd = run("any.registered", "--max-retries", "101")
    assert isinstance(odd.exception, InvalidOption)
