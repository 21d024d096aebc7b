"""What a page of a listing costs on a large view: partitions read, ids and tasks that came back, milliseconds.

    TASKLINE_CASSANDRA__PORT=… python -m bench.listing --tasks 1000000

The tasks are written straight into the view, spread evenly over `--hours`. A page "from the middle" begins at half of that time.
`--keyspace NAME` keeps the tasks, or takes those that an earlier run has kept.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import click

from taskline.schemas.codec import Codec
from taskline.schemas.events import (
    DeadLettered,
    Failed,
    LifecycleEvent,
    Priority,
    Started,
    Succeeded,
    TaskSubmitted,
    sequence_of,
)
from taskline.schemas.ids import TaskId, bucket_of, lane_of, new_task_id
from taskline.settings import Settings, load_settings
from taskline.state.cassandra import CassandraStore
from taskline.state.listing import Filter, first_id, write_cursor
from taskline.state.lists import Listing, TaskLists
from taskline.state.migrations import migrate
from taskline.state.session import connect, open_cluster
from taskline.state.status import STATUS_AFTER, TaskStatus
from taskline.state.store import EventsWrite, SubmissionWrite, Write

DEAD = 10
LIMIT = 50
ROUNDS = 7
# Tasks in one call of the store: large enough that a partition's writes share batches.
CHUNK = 4_000
HOUR_MS = 3_600_000
TENANT = "default"
TYPES = ("geo.nearest", "mail.send", "image.resize", "report.build", "index.update")


@click.command()
@click.option("--tasks", default=1_000_000, show_default=True)
@click.option("--hours", default=24.0, show_default=True, help="The time over which they were created.")
@click.option("--keyspace", default=None, help="Kept between runs; default: one that is dropped at the end.")
def main(tasks: int, hours: float, keyspace: str | None) -> None:
    """Measure."""
    base = load_settings()
    name = keyspace or f"bench{secrets.token_hex(4)}"
    settings = base.model_copy(update={"cassandra": base.cassandra.model_copy(update={"keyspace": name})})
    migrate(settings)
    try:
        asyncio.run(measure(settings, tasks, hours))
    finally:
        if keyspace is None:
            cluster = open_cluster(settings.cassandra)
            connect(cluster).execute(f"DROP KEYSPACE {name}", timeout=60)
            cluster.shutdown()


async def measure(settings: Settings, tasks: int, hours: float) -> None:
    store = await CassandraStore.connect(settings)
    try:
        lists, now_ms = TaskLists(store, Codec()), time.time_ns() // 1_000_000
        first = await lists.page(Filter(tenant=TENANT), cursor=None, limit=1)
        if first.tasks:
            now_ms = round(first.tasks[0].created_at.timestamp() * 1000)
        else:
            await fill(settings, store, tasks, now_ms, hours)
        middle = first_id(round(now_ms - hours * HOUR_MS / 2))
        print(f"pages of {LIMIT}; median of {ROUNDS}")
        everything = Filter(tenant=TENANT)
        for title, wanted in (
            ("all", everything),
            ("completed", replace(everything, status=TaskStatus.COMPLETED)),
            ("pending (1 in 100)", replace(everything, status=TaskStatus.PENDING)),
            ("running (1 in 1,000)", replace(everything, status=TaskStatus.RUNNING)),
            (f"dead ({DEAD} in all)", replace(everything, status=TaskStatus.DEAD)),
            ("pending and one type", replace(everything, status=TaskStatus.PENDING, task_type=TYPES[2])),
            ("a type that no task has", replace(everything, task_type="no.such")),
            ("of a tenant without tasks", Filter(tenant="nobody")),
        ):
            await page(lists, f"{title}, first", wanted, None)
            await page(lists, f"{title}, middle", wanted, write_cursor(wanted, middle))
    finally:
        await store.close()


async def page(lists: TaskLists, title: str, wanted: Filter, cursor: str | None) -> None:
    """One page, several times; when it is not full, also how many calls it takes to the page's end."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        found = await lists.page(wanted, cursor=cursor, limit=LIMIT)
        seconds.append(time.perf_counter() - began)
    cpu = time.process_time()
    await lists.page(wanted, cursor=cursor, limit=LIMIT)
    cpu = time.process_time() - cpu
    cost = found.cost
    line = (
        f"{title:34} {len(found.tasks):3} tasks; reads: {cost.index_reads} index, {cost.partition_reads:3} partitions, "
        f"{cost.ids:4} ids, {cost.tasks:3} tasks whole; {statistics.median(seconds) * 1000:6.1f} ms, {cpu * 1000:5.1f} ms of CPU here"
    )
    print(line + await rest(lists, wanted, found), flush=True)


async def rest(lists: TaskLists, wanted: Filter, found: Listing) -> str:
    """Go on until the page is full or the listing at its end."""
    calls, tasks, began = 1, len(found.tasks), time.perf_counter()
    while tasks < LIMIT and found.next_cursor is not None:
        found = await lists.page(wanted, cursor=found.next_cursor, limit=LIMIT - tasks)
        calls, tasks = calls + 1, tasks + len(found.tasks)
    return "" if calls == 1 else f"; {calls} calls to {tasks} tasks, {time.perf_counter() - began:.1f} s more"


async def fill(settings: Settings, store: CassandraStore, tasks: int, now_ms: int, hours: float) -> None:
    began, step_ms = time.perf_counter(), hours * HOUR_MS / tasks
    template = Template(now_ms)
    for start in range(0, tasks, CHUNK):
        ids = [new_task_id(round(now_ms - n * step_ms)) for n in range(start, min(start + CHUNK, tasks))]
        numbers = range(start, start + len(ids))
        writes = [
            write
            for n, task_id in zip(numbers, ids, strict=True)
            for write in template.writes(settings, task_id, n, tasks)
        ]
        await store.apply(writes)
        if start % (25 * CHUNK) == 0:
            print(f"{start + len(ids)} tasks after {time.perf_counter() - began:.0f} s", flush=True)
    print(f"{tasks} tasks over {hours:g} hours, written in {time.perf_counter() - began:.0f} s", flush=True)


class Template:
    """Encoded records whose ids are replaced: encoding a million anew would take most of the time."""

    def __init__(self, now_ms: int) -> None:
        self._id = new_task_id(now_ms)
        codec = Codec()
        retain_until = now_ms + 30 * 86_400_000
        self._submissions = {
            task_type: codec.encode(
                TaskSubmitted(
                    task_id=self._id,
                    tenant=TENANT,
                    task_type=task_type,
                    queue="default",
                    priority=Priority.NORMAL,
                    payload=secrets.token_bytes(200),
                    retain_until=retain_until,
                    max_retries=3,
                    root_id=self._id,
                )
            )
            for task_type in TYPES
        }
        common: dict[str, Any] = {
            "task_id": self._id,
            "tenant": TENANT,
            "attempt": 1,
            "worker": "bench-worker-1",
            "at": now_ms,
            "retain_until": retain_until,
        }
        execution = new_task_id(now_ms)
        started = Started(
            execution=execution, source_topic="tasks.normal", source_partition=0, source_offset=0, **common
        )
        failed = Failed(
            execution=execution, error_class="ValueError", message="no", retryable=False, **common
        )
        lives: dict[TaskStatus, list[LifecycleEvent]] = {
            TaskStatus.PENDING: [],
            TaskStatus.RUNNING: [started],
            TaskStatus.COMPLETED: [started, Succeeded(execution=execution, result=b'{"km": 6.1}', **common)],
            TaskStatus.DEAD: [started, failed, DeadLettered(reason="permanent", **common)],
        }
        self._lives = {
            status: [(STATUS_AFTER[type(each)], codec.encode(each)) for each in life]
            for status, life in lives.items()
        }

    def writes(self, settings: Settings, task_id: TaskId, number: int, tasks: int) -> Iterator[Write]:
        """A task's submission and what became of it."""
        lane = lane_of(task_id, settings.topics.lanes)
        bucket = bucket_of(task_id, settings.cassandra.bucket_seconds * 1000)
        task_type = TYPES[number % len(TYPES)]
        yield SubmissionWrite(
            task_id=task_id,
            lane=lane,
            bucket=bucket,
            ttl_seconds=30 * 86_400,
            submission=self._own(self._submissions[task_type], task_id),
            tenant=TENANT,
            task_type=task_type,
            queue="default",
            priority=Priority.NORMAL,
            status=TaskStatus.PENDING,
        )
        life = self._lives[_status(number, tasks)]
        if life:
            yield EventsWrite(
                task_id=task_id,
                lane=lane,
                bucket=bucket,
                ttl_seconds=30 * 86_400,
                events={
                    sequence_of(number, index): self._own(data, task_id)
                    for index, (_, data) in enumerate(life)
                },
                tenant=TENANT,
                status=life[-1][0],
            )

    def _own(self, data: bytes, task_id: TaskId) -> bytes:
        return data.replace(self._id.bytes, task_id.bytes)


def _status(number: int, tasks: int) -> TaskStatus:
    if number % max(tasks // DEAD, 1) == tasks // DEAD // 2:
        return TaskStatus.DEAD
    if number % 100 == 7:
        return TaskStatus.PENDING
    if number % 1_000 == 13:
        return TaskStatus.RUNNING
    return TaskStatus.COMPLETED


if __name__ == "__main__":
    main()
