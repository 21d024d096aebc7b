"""CPU time that the projector process spends on a task: a submission, Started and Succeeded, from Kafka to Cassandra.

    TASKLINE_KAFKA__BOOTSTRAP_SERVERS=… TASKLINE_CASSANDRA__PORT=… python -m bench.projector

Faust included; the servers' own time is not. Lifecycle events come in batches, as from workers under load; Faust's cost is per
record, so the size of the batches is what the figure hangs on.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import psutil
from confluent_kafka import Consumer, Producer, TopicPartition

from taskline.infra.kafka.admin import create_topics
from taskline.infra.local.roles import Role
from taskline.infra.log import HEADER_TASK_ID
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import (
    LifecycleBatch,
    LifecycleEntry,
    LifecycleEvent,
    Priority,
    Started,
    Succeeded,
    TaskSubmitted,
)
from taskline.schemas.ids import lane_of, new_task_id
from taskline.settings import Settings, load_settings
from taskline.state.migrations import migrate

PAYLOAD_BYTES = 250
WARM_UP_TASKS = 1_000
WAIT_SECONDS = 300.0


@click.command()
@click.option("--tasks", default=20_000, show_default=True, help="Measured tasks.")
@click.option("--batch", default=20, show_default=True, help="Lifecycle events in a record.")
def main(tasks: int, batch: int) -> None:
    """Measure."""
    name = f"bench{secrets.token_hex(4)}"
    base = load_settings()
    settings = base.model_copy(
        update={
            "kafka": base.kafka.model_copy(update={"namespace": f"{name}."}),
            "cassandra": base.cassandra.model_copy(update={"keyspace": name}),
        }
    )
    create_topics(settings)
    migrate(settings)
    producer = Producer(
        {
            "bootstrap.servers": settings.kafka.bootstrap_servers,
            "linger.ms": 5,
            "queue.buffering.max.messages": 2_000_000,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        role = Role(("projector",), settings, log=Path(folder) / "projector.log")
        role.start()
        try:
            process = psutil.Process(role.pid)
            produce(settings, producer, WARM_UP_TASKS, batch)
            wait_until_projected(settings, role)
            before, began = process.cpu_times(), time.perf_counter()
            records = produce(settings, producer, tasks, batch)
            wait_until_projected(settings, role)
            after, seconds = process.cpu_times(), time.perf_counter() - began
            user, system = after.user - before.user, after.system - before.system
            print(
                f"projector: {(user + system) / tasks * 1e6:.0f} µs of CPU a task ({user / tasks * 1e6:.0f} user), "
                f"{records / tasks:.2f} records a task, {tasks / seconds:.0f} tasks/s, "
                f"{process.memory_info().rss / 2**20:.0f} MiB"
            )
        finally:
            role.stop()


def produce(settings: Settings, producer: Producer, tasks: int, batch: int) -> int:
    """Append tasks that are submitted, started and succeeded; how many records that took."""
    topics = Topics(namespace=settings.kafka.namespace)
    codec = Codec()
    now_ms = time.time_ns() // 1_000_000
    lanes: dict[int, list[LifecycleEntry]] = {}
    records = 0
    dispatch = topics.dispatch(settings.topics.queues[0], Priority.NORMAL)
    for submission, events in lives(tasks, now_ms):
        task_id = submission.task_id
        producer.produce(
            dispatch,
            codec.encode(submission),
            key=task_id.bytes,
            headers={HEADER_TASK_ID: task_id.bytes},
        )
        records += 1
        number = lane_of(task_id, settings.topics.lanes)
        lane = lanes.setdefault(number, [])
        lane.extend(
            LifecycleEntry(task_id=task_id, retain_until=event.retain_until, event=codec.encode(event))
            for event in events
        )
        if len(lane) >= batch:
            producer.produce(
                topics.lifecycle, codec.encode(LifecycleBatch(events=tuple(lane))), partition=number
            )
            records += 1
            lane.clear()
        producer.poll(0)
    for number, lane in lanes.items():
        if lane:
            producer.produce(
                topics.lifecycle, codec.encode(LifecycleBatch(events=tuple(lane))), partition=number
            )
            records += 1
    producer.flush()
    return records


def lives(tasks: int, now_ms: int) -> Iterator[tuple[TaskSubmitted, tuple[LifecycleEvent, ...]]]:
    """Submissions, and what happens to them."""
    retain_until = now_ms + 3_600_000
    for _ in range(tasks):
        task_id, execution = new_task_id(now_ms), new_task_id(now_ms)
        submission = TaskSubmitted(
            task_id=task_id,
            tenant="default",
            task_type="geo.nearest",
            queue="default",
            priority=Priority.NORMAL,
            payload=secrets.token_bytes(PAYLOAD_BYTES),
            retain_until=retain_until,
            max_retries=3,
            root_id=task_id,
        )
        started = Started(
            task_id=task_id,
            tenant="default",
            attempt=1,
            worker="host-1234-abcdef",
            at=now_ms,
            retain_until=retain_until,
            execution=execution,
            source_topic="tasks.normal",
            source_partition=1,
            source_offset=12_345,
        )
        succeeded = Succeeded(
            task_id=task_id,
            tenant="default",
            attempt=1,
            worker="host-1234-abcdef",
            at=now_ms,
            retain_until=retain_until,
            execution=execution,
            result=b'{"iata":"LAX","km":12.3}',
        )
        yield submission, (started, succeeded)


def wait_until_projected(settings: Settings, role: Role) -> None:
    """Return when the group has committed the end of every partition."""
    topics = Topics(namespace=settings.kafka.namespace)
    names = [
        *(topics.dispatch(queue, priority) for queue in settings.topics.queues for priority in Priority),
        topics.lifecycle,
    ]
    consumer = Consumer(
        {"bootstrap.servers": settings.kafka.bootstrap_servers, "group.id": topics.projector_group}
    )
    try:
        places = [
            TopicPartition(name, number)
            for name in names
            for number in consumer.list_topics(name, timeout=10).topics[name].partitions
        ]
        ends = {(each.topic, each.partition): consumer.get_watermark_offsets(each)[1] for each in places}

        def projected() -> bool:
            time.sleep(0.2)
            return all(
                max(each.offset, 0) >= ends[each.topic, each.partition]
                for each in consumer.committed(places, timeout=10)
            )

        role.wait_until(projected, seconds=WAIT_SECONDS, what="at the end of the log")
    finally:
        consumer.close()


if __name__ == "__main__":
    main()
