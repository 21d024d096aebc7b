"""CPU time that a process spends on a status read: `StatusReader` from Cassandra to the folded state.

TASKLINE_CASSANDRA__PORT=… python -m bench.view_read
"""

from __future__ import annotations

import asyncio
import secrets
import time

import click

from bench.projector import lives
from taskline.schemas.codec import Codec
from taskline.schemas.events import sequence_of
from taskline.schemas.ids import TaskId, bucket_of, lane_of
from taskline.settings import Settings, load_settings
from taskline.state.cassandra import CassandraStore
from taskline.state.migrations import migrate
from taskline.state.reader import StatusReader
from taskline.state.status import TaskStatus
from taskline.state.store import EventsWrite, SubmissionWrite, Write


@click.command()
@click.option("--reads", default=10_000, show_default=True, help="Measured reads.")
@click.option("--tasks", default=1_000, show_default=True, help="Different tasks that are read.")
@click.option("--concurrency", default=32, show_default=True, help="Reads in flight.")
def main(reads: int, tasks: int, concurrency: int) -> None:
    """Measure."""
    base = load_settings()
    cassandra = base.cassandra.model_copy(update={"keyspace": f"bench{secrets.token_hex(4)}"})
    settings = base.model_copy(update={"cassandra": cassandra})
    migrate(settings)
    asyncio.run(measure(settings, reads, tasks, concurrency))


async def measure(settings: Settings, reads: int, tasks: int, concurrency: int) -> None:
    codec = Codec()
    store = await CassandraStore.connect(settings)
    try:
        reader = StatusReader(store, codec, settings.api)
        ids = await fill(settings, store, codec, tasks)
        await drive(reader, ids, reads // 10, concurrency)
        cpu, began = time.process_time(), time.perf_counter()
        await drive(reader, ids, reads, concurrency)
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
        print(f"status read: {cpu / reads * 1e6:.0f} µs of CPU, {reads / seconds:.0f}/s")
    finally:
        await store.close()


async def fill(settings: Settings, store: CassandraStore, codec: Codec, tasks: int) -> list[TaskId]:
    """Completed tasks, as a projector would have put them there."""
    now_ms = time.time_ns() // 1_000_000
    writes: list[Write] = []
    ids: list[TaskId] = []
    for number, (submission, events) in enumerate(lives(tasks, now_ms)):
        task_id = submission.task_id
        ids.append(task_id)
        lane = lane_of(task_id, settings.topics.lanes)
        bucket = bucket_of(task_id, settings.cassandra.bucket_seconds * 1000)
        writes.append(
            SubmissionWrite(
                task_id=task_id,
                lane=lane,
                bucket=bucket,
                ttl_seconds=3_600,
                submission=codec.encode(submission),
                tenant=submission.tenant,
                task_type=submission.task_type,
                queue=submission.queue,
                priority=submission.priority,
                status=TaskStatus.PENDING,
            )
        )
        writes.append(
            EventsWrite(
                task_id=task_id,
                lane=lane,
                bucket=bucket,
                ttl_seconds=3_600,
                events={
                    sequence_of(number, index): codec.encode(event) for index, event in enumerate(events)
                },
                tenant=submission.tenant,
                status=TaskStatus.COMPLETED,
            )
        )
    await store.apply(writes)
    return ids


async def drive(reader: StatusReader, ids: list[TaskId], reads: int, concurrency: int) -> None:
    """Read tasks in turn, several at a time; each must be completed."""

    async def one(first: int) -> None:
        for number in range(first, reads, concurrency):
            state = await reader.get(ids[number % len(ids)], tenant="default")
            assert state.status is TaskStatus.COMPLETED

    await asyncio.gather(*map(one, range(concurrency)))


if __name__ == "__main__":
    main()
