"""Listings and reads by the handful on a real Cassandra, and waits on a real API process."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_process import eventually, running_api
from view_kit import CODEC, event, submission, task_id_of

from taskline.infra.kafka.admin import create_topics
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
from taskline.schemas.ids import bucket_of, created_at_ms, lane_of, new_task_id
from taskline.settings import Settings
from taskline.state import listing_tables
from taskline.state.cassandra import CassandraStore
from taskline.state.fold import fold
from taskline.state.listing import Filter
from taskline.state.lists import Listing, TaskLists
from taskline.state.migrations import migrate
from taskline.state.session import connect, open_cluster
from taskline.state.status import STATUS_AFTER, TaskState, TaskStatus
from taskline.state.store import EventsWrite, SubmissionWrite, Write

pytestmark = pytest.mark.servers

HOUR = 3_600
LIVES: tuple[tuple[type[LifecycleEvent], ...], ...] = (
    (),
    (Started,),
    (Started, Succeeded),
    (Started, Succeeded),
    (Started, Failed),
    (Started, Failed, DeadLettered),
)
Made = list[tuple[TaskSubmitted, list[LifecycleEvent]]]


@pytest.fixture
def fresh(settings: Settings) -> Iterator[Settings]:
    """A keyspace of the test's own with buckets of a second."""
    cassandra = settings.cassandra.model_copy(
        update={"keyspace": f"test_{secrets.token_hex(4)}", "bucket_seconds": 1}
    )
    made = settings.model_copy(update={"cassandra": cassandra})
    migrate(made)
    yield made
    cluster = open_cluster(cassandra)
    connect(cluster).execute(f"DROP KEYSPACE IF EXISTS {cassandra.keyspace}", timeout=60)
    cluster.shutdown()


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[CassandraStore]:
    store = await CassandraStore.connect(settings)
    try:
        yield store
    finally:
        await store.close()


def writes(
    settings: Settings, task: TaskSubmitted, events: Sequence[LifecycleEvent], ttl: int = HOUR
) -> list[Write]:
    place: dict[str, Any] = {
        "task_id": task.task_id,
        "lane": lane_of(task.task_id, settings.topics.lanes),
        "bucket": bucket_of(task.task_id, settings.cassandra.bucket_seconds * 1000),
        "ttl_seconds": ttl,
        "tenant": task.tenant,
    }
    found: list[Write] = [
        SubmissionWrite(
            **place,
            submission=CODEC.encode(task),
            task_type=task.task_type,
            queue=task.queue,
            priority=task.priority,
            status=TaskStatus.PENDING,
        )
    ]
    found += [
        EventsWrite(**place, events={sequence_of(n, 0): CODEC.encode(each)}, status=STATUS_AFTER[type(each)])
        for n, each in enumerate(events)
    ]
    return found


def history(now_ms: int) -> Made:
    """300 tasks over half an hour, more of them lately, of all kinds."""
    made: Made = []
    for n in range(300):
        age_ms = n * 11 if n < 200 else 2_200 + (n - 200) * 18_000
        task = submission(
            now_ms,
            task_id=task_id_of(now_ms - age_ms, secrets.randbits(60)),
            tenant="acme" if n % 5 else "other",
            task_type="ab"[n % 2],
            queue="qrs"[n % 3],
            priority=list(Priority)[n % 3],
        )
        made.append((task, [event(kind, task, now_ms) for kind in LIVES[n % 7 % len(LIVES)]]))
    return made


async def pages(lists: TaskLists, wanted: Filter, limit: int) -> list[Listing]:
    found: list[Listing] = []
    cursor = None
    while not found or cursor is not None:
        found.append(await lists.page(wanted, cursor=cursor, limit=limit))
        cursor = found[-1].next_cursor
    return found


def shown(found: Sequence[Listing]) -> list[TaskState]:
    return [state for page in found for state in page.tasks]


def test_a_listing_is_the_filter_over_all_folds(fresh: Settings) -> None:
    async def scenario() -> None:
        now_ms = time.time_ns() // 1_000_000
        made = history(now_ms)
        states = sorted(
            (fold(task, events) for task, events in made), key=lambda state: state.task_id, reverse=True
        )
        async with open_store(fresh) as store:
            await store.apply([each for task, events in made for each in writes(fresh, task, events)])
            lists = TaskLists(store, CODEC)
            acme = Filter(tenant="acme")
            middle = created_at_ms(states[150].task_id)
            for wanted in (
                acme,
                Filter(tenant="other"),
                Filter(tenant="nobody"),
                *(replace(acme, status=status) for status in TaskStatus),
                replace(acme, task_type="a"),
                replace(acme, priority=Priority.HIGH),
                replace(acme, queue="r", status=TaskStatus.COMPLETED),
                replace(acme, task_type="b", priority=Priority.LOW, queue="s", status=TaskStatus.DEAD),
                replace(acme, created_before_ms=middle),
                replace(acme, created_after_ms=middle),
                replace(acme, created_after_ms=middle - 60_000, created_before_ms=middle, task_type="a"),
            ):
                expected = [state for state in states if wanted.fits(state)]
                for limit in (7, 200):
                    found = await pages(lists, wanted, limit)
                    assert shown(found) == expected, wanted
                    assert all(len(page.tasks) <= limit for page in found)

    asyncio.run(scenario())


def test_pages_are_stable_while_tasks_come_in_and_move_on(fresh: Settings) -> None:
    async def scenario() -> None:
        now_ms = time.time_ns() // 1_000_000
        tasks = [submission(now_ms, task_id=new_task_id(now_ms - n * 50)) for n in range(100)]
        async with open_store(fresh) as store:
            await store.apply([each for task in tasks for each in writes(fresh, task, [])])
            lists, found, cursor = TaskLists(store, CODEC), [], None
            while True:
                page = await lists.page(Filter(tenant="acme"), cursor=cursor, limit=9)
                found += page.tasks
                newcomer = submission(now_ms, task_id=new_task_id(now_ms + 1 + len(found)))
                moved = event(Started, tasks[-1], now_ms)
                await store.apply([*writes(fresh, newcomer, []), *writes(fresh, tasks[-1], [moved])])
                cursor = page.next_cursor
                if cursor is None:
                    break
            assert [state.task_id for state in found] == [task.task_id for task in tasks]
            assert found[-1].status is TaskStatus.RUNNING

    asyncio.run(scenario())


def test_a_rare_state_is_found_without_searching_where_it_never_was(fresh: Settings) -> None:
    async def scenario() -> None:
        now_ms = time.time_ns() // 1_000_000
        made: Made = []
        for n in range(600):
            task = submission(now_ms, task_id=new_task_id(now_ms - n * 1_000))
            kinds = (Started, Failed, DeadLettered) if n in (200, 500) else (Started, Succeeded)
            made.append((task, [event(kind, task, now_ms) for kind in kinds]))
        async with open_store(fresh) as store:
            # All events of a task at once, as a projector that is behind writes them.
            for task, events in made:
                first, *rest = writes(fresh, task, events)
                merged = replace(rest[-1], events={k: v for each in rest for k, v in each.events.items()})
                await store.apply([first, merged])
            page = await TaskLists(store, CODEC).page(
                Filter(tenant="acme", status=TaskStatus.DEAD), cursor=None, limit=50
            )
        assert [state.task_id for state in page.tasks] == [made[200][0].task_id, made[500][0].task_id]
        assert page.next_cursor is None
        assert (page.cost.index_reads, page.cost.partition_reads) == (1, 2 * fresh.topics.lanes)

    asyncio.run(scenario())


def test_a_task_is_listed_as_long_as_it_lives_whoever_indexed_its_bucket_last(
    fresh: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing_tables, "SLACK_SECONDS", 1)

    async def scenario() -> None:
        now_ms = time.time_ns() // 1_000_000
        long, short = (submission(now_ms, task_id=task_id_of(now_ms, tail)) for tail in (1, 2))
        async with open_store(fresh) as store:
            await store.apply(writes(fresh, short, [], ttl=2))
            await store.apply(writes(fresh, long, [], ttl=600))
        # Another process knows nothing of what the first has written.
        async with open_store(fresh) as store:
            await store.apply(writes(fresh, short, [], ttl=2))
            await asyncio.sleep(5)
            page = await TaskLists(store, CODEC).page(Filter(tenant="acme"), cursor=None, limit=5)
        assert [state.task_id for state in page.tasks] == [long.task_id]

    asyncio.run(scenario())


def test_many_tasks_by_id(fresh: Settings) -> None:
    async def scenario() -> None:
        now_ms = time.time_ns() // 1_000_000
        made = history(now_ms)[:100]
        async with open_store(fresh) as store:
            await store.apply([each for task, events in made for each in writes(fresh, task, events)])
            ids = [task.task_id for task, _ in made]
            found = await TaskLists(store, CODEC).many([*ids, new_task_id(now_ms)], tenant="acme")
        expected = {task.task_id: fold(task, events) for task, events in made if task.tenant == "acme"}
        assert found.tasks == expected
        assert found.unreadable == frozenset()

    asyncio.run(scenario())


def test_an_api_process_lists_waits_and_stops(fresh: Settings, tmp_path: Path) -> None:
    create_topics(fresh)
    api_settings = fresh.model_copy(
        update={"api": fresh.api.model_copy(update={"auth": "off", "anonymous_tenant": "acme"})}
    )
    now_ms = time.time_ns() // 1_000_000
    ending, staying = (submission(now_ms, task_id=new_task_id(now_ms - n)) for n in (2_000, 1_000))

    async def put(*written: Write) -> None:
        async with open_store(fresh) as store:
            await store.apply(written)

    asyncio.run(put(*writes(fresh, ending, []), *writes(fresh, staying, [])))
    with running_api(api_settings, tmp_path) as api, ThreadPoolExecutor(20) as pool:
        eventually(lambda: api.ready("read"), "the view is connected", 60)
        listed = api.client.get("/tasks", params={"status": "pending"}).json()
        assert [task["task_id"] for task in listed["tasks"]] == [str(staying.task_id), str(ending.task_id)]

        def wait_for(task: TaskSubmitted) -> httpx.Response:
            return api.client.get(f"/tasks/{task.task_id}", params={"wait": 60})

        def waiting(count: int) -> bool:
            return f"taskline_api_requests_waiting {count}.0" in api.client.get("/metrics").text

        ends, stays = ([pool.submit(wait_for, task) for _ in range(5)] for task in (ending, staying))
        eventually(lambda: waiting(10), "all wait")
        asyncio.run(put(*writes(fresh, ending, [event(Succeeded, ending, now_ms)])))
        assert {each.result(30).json()["status"] for each in ends} == {"completed"}
        assert waiting(5)
        # A client that leaves is not waited for any longer.
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{api.url}/tasks/{staying.task_id}?wait=60", timeout=1.0)
        eventually(lambda: waiting(5), "the one who left is forgotten")
        began = time.monotonic()
        api.ask_to_stop()
        assert {each.result(30).json()["status"] for each in stays} == {"pending"}
        assert api.wait() == 0
        assert time.monotonic() - began < 30
