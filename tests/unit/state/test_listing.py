"""Listings: pages of folded states, on the view in memory and its pure parts."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from view_kit import CODEC, event, submission, task_id_of

from taskline.errors import InvalidCursor, Unavailable
from taskline.schemas.events import (
    DeadLettered,
    Failed,
    LifecycleEvent,
    Priority,
    Released,
    Started,
    Succeeded,
    TaskSubmitted,
    sequence_of,
)
from taskline.schemas.ids import MAX_CLOCK_AHEAD_MS, TaskId, created_at_ms
from taskline.state import listing_walk
from taskline.state.fold import fold
from taskline.state.listing import Filter, first_id, merged, read_cursor, write_cursor
from taskline.state.lists import Listing, TaskLists
from taskline.state.status import STATUS_AFTER, TaskState, TaskStatus
from taskline.state.store import EventsWrite, SubmissionWrite, Write
from taskline.testing.view import MemoryView

NOW = 1_800_000_000_000
BUCKET_MS = 1_000
ACME = Filter(tenant="acme")


class Clock:
    def now_ms(self) -> int:
        return NOW


class View:
    """Tasks, and listings of them."""

    def __init__(self) -> None:
        self.store = MemoryView(Clock(), bucket_ms=BUCKET_MS)
        self.lists = TaskLists(self.store, CODEC, Clock())
        self.tasks: list[tuple[TaskSubmitted, list[LifecycleEvent]]] = []

    async def put(self, task: TaskSubmitted, *events: LifecycleEvent) -> None:
        await self.store.apply(writes(task, events))
        self.tasks.append((task, list(events)))

    def states(self) -> list[TaskState]:
        """Every task's fold, newest first."""
        folds = (fold(task, events) for task, events in self.tasks)
        return sorted(folds, key=lambda state: state.task_id, reverse=True)

    async def pages(self, wanted: Filter, limit: int) -> list[Listing]:
        found, cursor = [], None
        while True:
            page = await self.lists.page(wanted, cursor=cursor, limit=limit)
            found.append(page)
            assert len(page.tasks) <= limit
            cursor = page.next_cursor
            if cursor is None:
                return found


def writes(task: TaskSubmitted, events: Sequence[LifecycleEvent]) -> list[Write]:
    found: list[Write] = [
        SubmissionWrite(
            task_id=task.task_id,
            lane=0,
            bucket=created_at_ms(task.task_id) // BUCKET_MS,
            ttl_seconds=1_000,
            submission=CODEC.encode(task),
            tenant=task.tenant,
            task_type=task.task_type,
            queue=task.queue,
            priority=task.priority,
            status=TaskStatus.SCHEDULED if task.delayed else TaskStatus.PENDING,
        )
    ]
    found += [
        EventsWrite(
            task_id=task.task_id,
            lane=0,
            bucket=created_at_ms(task.task_id) // BUCKET_MS,
            ttl_seconds=1_000,
            events={sequence_of(offset, 0): CODEC.encode(each)},
            tenant=task.tenant,
            status=STATUS_AFTER[type(each)],
        )
        for offset, each in enumerate(events)
    ]
    return found


def shown(pages: Sequence[Listing]) -> list[TaskId]:
    return [state.task_id for page in pages for state in page.tasks]


LIVES: tuple[tuple[type[LifecycleEvent], ...], ...] = (
    (),
    (Started,),
    (Started, Released),
    (Started, Failed),
    (Started, Succeeded),
    (Started, Failed, DeadLettered),
)


@st.composite
def tasks(draw: st.DrawFn, lives: st.SearchStrategy[tuple[type[LifecycleEvent], ...]]) -> Any:
    """Up to 40 tasks of a few tenants and types over a few dense and many empty buckets."""
    ages = draw(st.lists(st.integers(0, 4_000) | st.integers(0, 10**7), max_size=40))
    made = []
    for number, age in enumerate(ages):
        task = submission(
            NOW,
            task_id=task_id_of(NOW - age, draw(st.integers(0, 3)) + 4 * number),
            tenant=draw(st.sampled_from(["acme", "acme", "other"])),
            task_type=draw(st.sampled_from(["a", "b"])),
            queue=draw(st.sampled_from(["q", "r"])),
            priority=draw(st.sampled_from(Priority)),
            not_before=draw(st.sampled_from([None, NOW + 1])),
        )
        made.append((task, [event(kind, task, NOW) for kind in draw(lives)]))
    return made


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


FILTERS = st.builds(
    Filter,
    tenant=st.just("acme"),
    status=optional(st.sampled_from(TaskStatus)),
    task_type=optional(st.sampled_from(["a", "b"])),
    priority=optional(st.sampled_from(Priority)),
    queue=optional(st.sampled_from(["q", "r"])),
    created_after_ms=optional(st.integers(NOW - 5_000, NOW)),
    created_before_ms=optional(st.integers(NOW - 4_000, NOW + 10)),
)


@settings(deadline=None)
@given(tasks(st.sampled_from(LIVES)), tasks(st.sampled_from(LIVES)), FILTERS, st.integers(1, 7), st.data())
def test_a_listing_is_the_filter_over_all_folds_whatever_comes_in_meanwhile(
    old: Any, new: Any, wanted: Filter, limit: int, data: st.DataObject
) -> None:
    async def scenario() -> None:
        view = View()
        for task, events in old:
            await view.put(task, *events)
        expected = [state for state in view.states() if wanted.fits(state)]
        arrivals = [(replace(task, task_id=upwards(task.task_id)), events) for task, events in new]
        found: list[TaskState] = []
        cursor = None
        while True:
            page = await view.lists.page(wanted, cursor=cursor, limit=limit)
            found += page.tasks
            if arrivals and data.draw(st.booleans()):
                task, _ = arrivals.pop()
                await view.put(task)
            cursor = page.next_cursor
            if cursor is None:
                break
        assert found == expected

    def upwards(task_id: TaskId) -> TaskId:
        """Later than any of the old ones."""
        return task_id_of(NOW + 10 + created_at_ms(task_id) % 1_000, task_id.int & 0xFFFF)

    asyncio.run(scenario())


@settings(deadline=None)
@given(
    tasks(st.lists(st.sampled_from([Started, Released, Failed, Succeeded, DeadLettered]), max_size=6)),
    FILTERS,
    st.integers(1, 7),
)
def test_whatever_the_hints_say_only_folds_that_fit_are_shown_and_only_stale_hints_hide(
    made: Any, wanted: Filter, limit: int
) -> None:
    async def scenario() -> None:
        view = View()
        hints: dict[TaskId, TaskStatus] = {}
        for task, events in made:
            await view.put(task, *events)
            waits = TaskStatus.SCHEDULED if task.delayed else TaskStatus.PENDING
            hints[task.task_id] = STATUS_AFTER[type(events[-1])] if events else waits
        fitting = [state for state in view.states() if wanted.fits(state)]
        visible = [state for state in fitting if wanted.status in (None, hints[state.task_id])]
        pages = await view.pages(wanted, limit)
        assert [state for page in pages for state in page.tasks] == visible

    asyncio.run(scenario())


@given(st.lists(st.lists(st.integers(0, 60), unique=True, max_size=20), max_size=5), st.integers(1, 8))
def test_lanes_merge_to_what_is_certain(numbers: list[list[int]], asked: int) -> None:
    # Lane l has the ids n * 5 + l.
    lanes = [
        sorted((uuid.UUID(int=number * 5 + lane) for number in each), reverse=True)
        for lane, each in enumerate(numbers)
    ]
    ids, searched_to = merged([lane[:asked] for lane in lanes], asked)
    everything = sorted((task_id for lane in lanes for task_id in lane), reverse=True)
    assert ids == everything[: len(ids)]
    if searched_to is None:
        assert ids == everything
    else:
        assert ids == [task_id for task_id in everything if task_id >= searched_to]
        assert ids


async def filled(count: int, *, step_ms: int, **changes: Any) -> View:
    view = View()
    for number in range(count):
        task_id = task_id_of(NOW - number * step_ms, number)
        await view.put(submission(NOW, task_id=task_id, **changes))
    return view


def test_a_search_of_many_buckets_stops_and_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing_walk, "MAX_PARTITION_READS", 10)

    async def scenario() -> list[Listing]:
        # The tasks' hints fit, and their folds do not: each was released by an execution while another one runs.
        view = View()
        for number in range(40):
            task = submission(NOW, task_id=task_id_of(NOW - number * BUCKET_MS, number))
            other = uuid.UUID(int=2)
            await view.put(
                task,
                event(Started, task, NOW),
                event(Started, task, NOW, execution=other, source_offset=1, attempt=2),
                event(Released, task, NOW, execution=other),
            )
        return await view.pages(replace(ACME, status=TaskStatus.PENDING), 5)

    pages = asyncio.run(scenario())
    assert shown(pages) == []
    assert len(pages) > 2
    searched = [page.searched_to_ms for page in pages]
    assert searched[-1] is None
    known = [ms for ms in searched if ms is not None]
    assert known == sorted(set(known), reverse=True)
    assert all(page.cost.partition_reads <= 10 + 8 for page in pages)


def test_misses_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing_walk, "MAX_MISSES", 20)

    async def scenario() -> list[Listing]:
        view = View()
        for number in range(100):
            task = submission(NOW, task_id=task_id_of(NOW, number))
            await view.put(task, event(Succeeded, task, NOW), event(DeadLettered, task, NOW))
        return await view.pages(replace(ACME, status=TaskStatus.DEAD), 5)

    pages = asyncio.run(scenario())
    assert shown(pages) == []
    assert len(pages) >= 4
    assert all(page.cost.tasks <= 28 for page in pages)


def test_empty_time_costs_nothing() -> None:
    async def scenario() -> Listing:
        view = await filled(2, step_ms=300 * 86_400_000)
        return await view.lists.page(ACME, cursor=None, limit=5)

    page = asyncio.run(scenario())
    assert (len(page.tasks), page.next_cursor, page.searched_to_ms) == (2, None, None)
    assert (page.cost.index_reads, page.cost.partition_reads) == (1, 2)


def test_more_buckets_than_one_look_at_the_index_names() -> None:
    async def scenario() -> list[Listing]:
        return await (await filled(150, step_ms=BUCKET_MS)).pages(ACME, 200)

    assert len(shown(asyncio.run(scenario()))) == 150


def test_a_task_from_a_clock_that_is_ahead_is_listed() -> None:
    async def scenario() -> list[TaskId]:
        view = View()
        await view.put(submission(NOW, task_id=task_id_of(NOW + MAX_CLOCK_AHEAD_MS, 1)))
        return shown(await view.pages(ACME, 5))

    assert len(asyncio.run(scenario())) == 1


def test_an_unreadable_task_is_named_and_hides_nothing() -> None:
    async def scenario() -> Listing:
        view = await filled(3, step_ms=1)
        middle = view.states()[1].task_id
        broken = EventsWrite(
            task_id=middle,
            lane=0,
            bucket=0,
            ttl_seconds=9,
            events={0: b"\xc3\x01\x00\x01\x02\x03\x04\x05\x06\x07body"},
            tenant="acme",
            status=TaskStatus.RUNNING,
        )
        await view.store.apply([broken])
        page = await view.lists.page(ACME, cursor=None, limit=5)
        assert page.unreadable == (middle,)
        return page

    assert len(asyncio.run(scenario()).tasks) == 2


def test_an_absent_view_is_unavailable() -> None:
    async def scenario() -> None:
        view = await filled(1, step_ms=1)
        view.store.stop()
        with pytest.raises(Unavailable):
            await view.lists.page(ACME, cursor=None, limit=5)

    asyncio.run(scenario())


def test_many_tasks_by_id_without_those_of_others() -> None:
    async def scenario() -> None:
        view = await filled(3, step_ms=1)
        foreign = submission(NOW, tenant="other")
        await view.put(foreign)
        own = [state.task_id for state in view.states() if state.tenant == "acme"]
        found = await view.lists.many([*own, foreign.task_id, uuid.UUID(int=9), own[0]], tenant="acme")
        assert found.tasks == {state.task_id: state for state in view.states() if state.tenant == "acme"}
        assert found.unreadable == frozenset()

    asyncio.run(scenario())


@given(FILTERS, st.integers(0, NOW), st.integers(0, 1000))
def test_a_cursor_reads_back_under_its_filter(wanted: Filter, ms: int, tail: int) -> None:
    before = task_id_of(ms, tail)
    assert read_cursor(wanted, write_cursor(wanted, before)) == before


@pytest.mark.parametrize(
    "other",
    [
        Filter(tenant="other"),
        replace(ACME, status=TaskStatus.DEAD),
        replace(ACME, task_type="dead"),
        replace(ACME, queue="dead"),
        replace(ACME, priority=Priority.LOW),
        replace(ACME, created_after_ms=0),
        replace(ACME, created_before_ms=0),
    ],
)
def test_a_cursor_is_refused_under_another_filter(other: Filter) -> None:
    with pytest.raises(InvalidCursor, match="other filters"):
        read_cursor(other, write_cursor(ACME, first_id(NOW)))


@given(
    st.text(max_size=60) | st.binary(max_size=40).map(lambda data: base64.urlsafe_b64encode(data).decode())
)
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(InvalidCursor):
        read_cursor(ACME, text)


def test_the_first_id_of_an_instant_is_below_every_task_of_it() -> None:
    assert first_id(NOW) <= task_id_of(NOW, 0) < first_id(NOW + 1)
    assert first_id(NOW).version == 7
