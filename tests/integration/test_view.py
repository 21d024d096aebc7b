"""The view in a real Cassandra: tables, writes, reads, expiry, and what a reader gets."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from view_kit import CODEC, event, submission

from taskline.errors import TaskNotFound, Unavailable, WrongTopology
from taskline.infra.role import SystemClock
from taskline.schemas.events import Failed, LifecycleEvent, Started, Succeeded, TaskSubmitted
from taskline.schemas.ids import bucket_of, lane_of, new_task_id
from taskline.settings import Settings
from taskline.state.cassandra import CassandraStore
from taskline.state.migrations import check_view, migrate, migrations
from taskline.state.reader import StatusReader
from taskline.state.session import connect, open_cluster
from taskline.state.status import STATUS_AFTER, TaskStatus
from taskline.state.store import EventsWrite, StoredTask, SubmissionWrite

pytestmark = pytest.mark.servers

HOUR = 3_600
READ_SECONDS = 20.0


@pytest.fixture
def fresh(settings: Settings) -> Iterator[Settings]:
    """Settings with a keyspace of the test's own, dropped afterwards."""
    keyspace = f"test_{secrets.token_hex(4)}"
    cassandra = settings.cassandra.model_copy(update={"keyspace": keyspace})
    yield settings.model_copy(update={"cassandra": cassandra})
    cluster = open_cluster(cassandra)
    connect(cluster).execute(f"DROP KEYSPACE IF EXISTS {keyspace}", timeout=60)
    cluster.shutdown()


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[CassandraStore]:
    store = await CassandraStore.connect(settings)
    try:
        yield store
    finally:
        await store.close()


def now_ms() -> int:
    return SystemClock().now_ms()


def submitted(settings: Settings, task: TaskSubmitted, *, ttl: int = HOUR) -> SubmissionWrite:
    return SubmissionWrite(
        task_id=task.task_id,
        lane=lane_of(task.task_id, settings.topics.lanes),
        bucket=bucket_of(task.task_id, settings.cassandra.bucket_seconds * 1000),
        ttl_seconds=ttl,
        submission=CODEC.encode(task),
        tenant=task.tenant,
        task_type=task.task_type,
        queue=task.queue,
        priority=task.priority,
        status=TaskStatus.PENDING,
    )


def happened(
    settings: Settings, task: TaskSubmitted, events: dict[int, LifecycleEvent], *, ttl: int = HOUR
) -> EventsWrite:
    return EventsWrite(
        task_id=task.task_id,
        lane=lane_of(task.task_id, settings.topics.lanes),
        bucket=bucket_of(task.task_id, settings.cassandra.bucket_seconds * 1000),
        ttl_seconds=ttl,
        events={sequence: CODEC.encode(each) for sequence, each in events.items()},
        tenant=task.tenant,
        status=STATUS_AFTER[type(events[max(events)])],
    )


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + READ_SECONDS
    while not await look():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


# ---- tables --------------------------------------------------------------------------------------------------


def test_migrate_makes_the_view_once(fresh: Settings) -> None:
    with pytest.raises(WrongTopology) as refused:
        check_view(fresh)
    assert refused.value.command == "taskline view migrate"
    made = migrate(fresh)
    assert made.newly_applied == tuple(migration.name for migration in migrations())
    assert (made.lanes, made.bucket_seconds) == (fresh.topics.lanes, fresh.cassandra.bucket_seconds)
    again = migrate(fresh)
    assert (again.newly_applied, again.applied) == ((), made.applied)
    assert check_view(fresh).applied == made.applied


def test_several_may_migrate_at_once(fresh: Settings) -> None:
    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(migrate, [fresh] * 3))
    assert {report.applied for report in reports} == {tuple(migration.name for migration in migrations())}
    assert check_view(fresh).lanes == fresh.topics.lanes


def test_a_view_of_another_layout_is_refused(fresh: Settings) -> None:
    migrate(fresh)
    other = fresh.model_copy(
        update={
            "topics": fresh.topics.model_copy(update={"lanes": 9}),
            "cassandra": fresh.cassandra.model_copy(update={"bucket_seconds": 60}),
        }
    )
    for attempt in (check_view, migrate):
        with pytest.raises(WrongTopology) as refused:
            attempt(other)
        assert any("topics.lanes = 3" in problem for problem in refused.value.problems)
        assert any("cassandra.bucket_seconds = 600" in problem for problem in refused.value.problems)


def test_a_store_without_tables_is_refused(fresh: Settings) -> None:
    with pytest.raises(WrongTopology) as refused:
        asyncio.run(CassandraStore.connect(fresh))
    assert refused.value.command == "taskline view migrate"


def test_a_server_that_is_not_there_is_unavailable(settings: Settings) -> None:
    gone = settings.model_copy(update={"cassandra": settings.cassandra.model_copy(update={"port": 1})})
    with pytest.raises(Unavailable):
        asyncio.run(CassandraStore.connect(gone))
    with pytest.raises(Unavailable):
        check_view(gone)


# ---- rows ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("view_ready")
def test_what_is_written_is_read(settings: Settings) -> None:
    async def check() -> None:
        async with open_store(settings) as store:
            task = submission(now_ms())
            assert await store.read(task.task_id) is None
            start, end = event(Started, task, 1), event(Succeeded, task, 2)
            await store.apply([happened(settings, task, {4096: start})])
            stored = await store.read(task.task_id)
            assert stored == StoredTask(submission=None, events={4096: CODEC.encode(start)})
            writes = [submitted(settings, task), happened(settings, task, {8192: end})]
            # Again and again, in any order: the same row.
            for again in (writes, writes[::-1], writes):
                await store.apply(again)
            assert await store.read(task.task_id) == StoredTask(
                submission=CODEC.encode(task), events={4096: CODEC.encode(start), 8192: CODEC.encode(end)}
            )

    asyncio.run(check())


@pytest.mark.usefixtures("view_ready")
def test_many_tasks_of_many_partitions_and_sizes(settings: Settings) -> None:
    async def check() -> None:
        async with open_store(settings) as store:
            small = [submission(now_ms() - age * 700_000) for age in range(4) for _ in range(300)]
            large = [submission(now_ms(), payload=secrets.token_bytes(262_144)) for _ in range(3)]
            tasks = small + large
            await store.apply([submitted(settings, task) for task in tasks])
            await store.apply([happened(settings, task, {0: event(Started, task, 1)}) for task in tasks])
            for task in large + small[::50]:
                stored = await store.read(task.task_id)
                assert stored is not None
                assert stored.submission == CODEC.encode(task)
                assert list(stored.events) == [0]

    asyncio.run(check())


@pytest.mark.usefixtures("view_ready")
def test_hints_follow_the_lane_whatever_comes_first(settings: Settings) -> None:
    async def check() -> list[Any]:
        async with open_store(settings) as store:
            task = submission(now_ms())
            await store.apply([happened(settings, task, {4096 * 5: event(Succeeded, task, 2)})])
            await store.apply([happened(settings, task, {4096 * 3: event(Started, task, 1)})])
            await store.apply([submitted(settings, task)])
            query = (
                f"SELECT status, task_type, priority, tenant FROM {settings.cassandra.keyspace}.tasks "
                f"WHERE bucket = {bucket_of(task.task_id, 600_000)} AND lane = {lane_of(task.task_id, 3)}"
            )
            return list(store._session.execute(f"{query} AND task_id = {task.task_id}"))

    assert asyncio.run(check()) == [("completed", "geo.nearest", "normal", "acme")]


@pytest.mark.usefixtures("view_ready")
def test_rows_go_when_their_time_is_over(settings: Settings) -> None:
    async def check() -> None:
        async with open_store(settings) as store:
            task, kept = submission(now_ms()), submission(now_ms())
            await store.apply(
                [
                    submitted(settings, task, ttl=1),
                    happened(settings, task, {0: event(Started, task, 1)}, ttl=1),
                    submitted(settings, kept),
                ]
            )

            async def gone() -> bool:
                return await store.read(task.task_id) is None

            await until(gone)
            assert await store.read(kept.task_id) is not None

    asyncio.run(check())


# ---- readers -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("view_ready")
def test_a_reader_folds_what_is_stored(settings: Settings) -> None:
    async def check() -> None:
        async with open_store(settings) as store:
            reader = StatusReader(store, CODEC, settings.api)
            task = submission(now_ms())
            await store.apply([submitted(settings, task)])
            assert (await reader.get(task.task_id, tenant="acme")).status is TaskStatus.PENDING
            events = {0: event(Started, task, 1), 1: event(Failed, task, 2)}
            await store.apply([happened(settings, task, events)])
            assert (await reader.get(task.task_id, tenant="acme")).status is TaskStatus.FAILED
            told = await reader.history(task.task_id, tenant="acme")
            assert [(placed.offset, placed.index) for placed in told.events] == [(0, 0), (0, 1)]
            with pytest.raises(TaskNotFound):
                await reader.get(task.task_id, tenant="another")

    asyncio.run(check())


@pytest.mark.usefixtures("view_ready")
def test_a_young_task_is_waited_for_and_an_old_one_is_not(settings: Settings) -> None:
    async def check() -> None:
        async with open_store(settings) as store:
            reader = StatusReader(store, CODEC, settings.api)
            task = submission(now_ms())
            asking = asyncio.create_task(reader.get(task.task_id, tenant="acme"))
            await asyncio.sleep(0.05)
            assert not asking.done()
            await store.apply([submitted(settings, task)])
            assert (await asking).status is TaskStatus.PENDING
            with pytest.raises(TaskNotFound):
                await reader.get(new_task_id(now_ms() - 60_000), tenant="acme")

    asyncio.run(check())
