"""Cancelled tasks in the whole of Taskline in memory: what waits does not run, what runs is said to, and an abort stops it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from taskline.errors import TaskNotFound, Unavailable
from taskline.infra.cancels import NoticeBook, notice_record
from taskline.infra.topics import CANCEL_NOTICES_MS
from taskline.producers.cancelling import Fate
from taskline.schemas.codec import Codec
from taskline.schemas.events import Cancelled, CancelNotice, CancelRequested, Started
from taskline.schemas.ids import TaskId, new_task_id
from taskline.settings import Settings
from taskline.testing import InMemoryTaskline
from taskline.workers.registry import Registry

HOUR = 3_600.0


class Journal:
    def __init__(self) -> None:
        self.registry = Registry()
        self.begun: list[tuple[TaskId, int]] = []
        self.ended: list[TaskId] = []
        self.failures = 0

        @self.registry.task("note")
        async def note(payload: Any, ctx: Any) -> None:
            self.begun.append((ctx.task_id, ctx.attempt))

        @self.registry.task("hour")
        async def hour(payload: Any, ctx: Any) -> None:
            self.begun.append((ctx.task_id, ctx.attempt))
            await asyncio.sleep(HOUR / 20)
            self.ended.append(ctx.task_id)

        @self.registry.task("stubborn")
        async def stubborn(payload: Any, ctx: Any) -> str:
            self.begun.append((ctx.task_id, ctx.attempt))
            try:
                await asyncio.sleep(HOUR / 20)
            except asyncio.CancelledError:
                self.ended.append(ctx.task_id)
            return "done all the same"

        @self.registry.task("fails")
        async def fails(payload: Any, ctx: Any) -> None:
            self.begun.append((ctx.task_id, ctx.attempt))
            raise ConnectionError("away")


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.fixture
def tl(journal: Journal) -> Iterator[InMemoryTaskline]:
    with InMemoryTaskline(journal.registry) as kit:
        yield kit


def test_what_waits_for_a_worker_is_cancelled_and_never_runs(tl: InMemoryTaskline, journal: Journal) -> None:
    tl.stop_worker()
    task_id = tl.submit("note", {}).task_id
    other = tl.submit("note", {}).task_id
    answer = tl.cancel(task_id)
    assert answer.fate is Fate.CANCELLED
    assert answer.state.completed_at is not None
    tl.start_worker()
    tl.run_until_idle()
    assert journal.begun == [(other, 1)]
    assert tl.status(task_id) == answer.state
    # The record was taken, and is done.
    assert not tl.workers[0].outstanding()


def test_a_second_cancel_finds_it_cancelled(tl: InMemoryTaskline) -> None:
    tl.stop_worker()
    task_id = tl.submit("note", {}).task_id
    first, second = tl.cancel(task_id), tl.cancel(task_id)
    assert first == second
    assert len([each for each in tl.history(task_id).events if isinstance(each.event, CancelRequested)]) == 1


def test_a_scheduled_task_is_cancelled_and_dropped_when_it_is_due(
    tl: InMemoryTaskline, journal: Journal
) -> None:
    task_id = tl.submit("note", {}, delay=60).task_id
    tl.advance(1)
    assert tl.cancel(task_id).fate is Fate.CANCELLED
    tl.run_until_idle()
    assert tl.elapsed_seconds >= 60
    assert journal.begun == []
    assert tl.status(task_id).status == "cancelled"


def test_a_task_that_waits_for_its_retry_is_cancelled(tl: InMemoryTaskline, journal: Journal) -> None:
    task_id = tl.submit("fails", {}).task_id
    tl.advance(1)
    assert tl.status(task_id).next_attempt_at is not None
    assert tl.cancel(task_id).fate is Fate.CANCELLED
    tl.run_until_idle()
    assert journal.begun == [(task_id, 1)]
    assert tl.status(task_id).status == "cancelled"
    assert tl.dead_letters() == ()


def test_a_running_task_is_not_cancelled_and_runs_to_its_end(tl: InMemoryTaskline, journal: Journal) -> None:
    task_id = tl.submit("hour", {}).task_id
    tl.advance(1)
    answer = tl.cancel(task_id)
    assert (answer.fate, answer.state.status) == (Fate.REFUSED, "running")
    tl.run_until_idle()
    assert tl.status(task_id).status == "completed"
    assert tl.cancel(task_id).fate is Fate.REFUSED


def test_a_task_whose_worker_died_is_not_cancelled_until_it_was_handed_back(
    tl: InMemoryTaskline, journal: Journal
) -> None:
    task_id = tl.submit("hour", {}).task_id
    tl.advance(1)
    tl.crash_worker()
    assert tl.cancel(task_id).fate is Fate.REFUSED
    tl.start_worker()
    tl.run_until_idle()
    # It was named, looked up, and ran.
    assert [run for run, _ in journal.begun] == [task_id, task_id]
    assert tl.status(task_id).status == "completed"


def test_a_task_that_was_handed_back_is_cancelled(tl: InMemoryTaskline, journal: Journal) -> None:
    task_id = tl.submit("hour", {}).task_id
    tl.advance(1)
    tl.stop_worker()
    assert tl.cancel(task_id).fate is Fate.CANCELLED
    tl.start_worker()
    tl.run_until_idle()
    assert len(journal.begun) == 1
    # Nothing reads as running for ever.
    told = [(row.outcome, row.reason) for row in tl.history(task_id).attempts]
    assert told == [("released", "shutdown"), ("released", "over")]


def test_an_abort_stops_the_handler(tl: InMemoryTaskline, journal: Journal) -> None:
    task_id = tl.submit("hour", {}).task_id
    tl.advance(1)
    answer = tl.cancel(task_id, running=True)
    assert answer.fate is Fate.CANCELLED
    tl.run_until_idle()
    assert tl.elapsed_seconds < 60
    assert journal.ended == []
    told = tl.history(task_id)
    assert [row.outcome for row in told.attempts] == ["cancelled"]
    # The notice stops it; the request follows when the notice has had its time.
    assert [type(each.event) for each in told.events] == [Started, Cancelled, CancelRequested]


def test_a_handler_that_ends_although_it_is_stopped_has_ended_so(
    tl: InMemoryTaskline, journal: Journal
) -> None:
    task_id = tl.submit("stubborn", {}).task_id
    tl.advance(1)
    answer = tl.cancel(task_id, running=True)
    assert (answer.fate, answer.state.status) == (Fate.REFUSED, "completed")


def test_an_abort_of_what_waits_is_a_cancel(tl: InMemoryTaskline, journal: Journal) -> None:
    tl.stop_worker()
    task_id = tl.submit("hour", {}).task_id
    assert tl.cancel(task_id, running=True).fate is Fate.CANCELLED
    tl.start_worker()
    tl.run_until_idle()
    assert journal.begun == []


def test_an_abort_of_what_a_dead_worker_ran_takes_effect_at_its_next_start(
    tl: InMemoryTaskline, journal: Journal
) -> None:
    task_id = tl.submit("hour", {}).task_id
    tl.advance(1)
    tl.crash_worker()
    assert tl.cancel(task_id, running=True).fate is Fate.REQUESTED
    tl.start_worker()
    tl.run_until_idle()
    assert len(journal.begun) == 1
    assert tl.status(task_id).status == "cancelled"


def test_another_tenant_s_task_is_unknown(tl: InMemoryTaskline) -> None:
    tl.stop_worker()
    task_id = tl.submit("note", {}).task_id
    with pytest.raises(TaskNotFound):
        tl.cancel(task_id, tenant="mallory")
    assert tl.records(tl.topics.cancels("default")) == ()


def test_without_the_view_nothing_is_asked_and_what_was_asked_is_not_known_to_be_done(
    tl: InMemoryTaskline, journal: Journal
) -> None:
    tl.stop_worker()
    task_id = tl.submit("note", {}).task_id
    tl.run_until_idle()
    tl.view.stop()
    with pytest.raises(Unavailable):
        tl.cancel(task_id)
    assert tl.records(tl.topics.cancels("default")) == ()
    tl.view.start()
    tl.pause_projector()
    assert tl.cancel(task_id).fate is Fate.REQUESTED
    tl.resume_projector()
    tl.start_worker()
    tl.run_until_idle()
    assert journal.begun == []
    assert tl.status(task_id).status == "cancelled"


def test_a_named_task_waits_off_its_slot_until_the_view_can_say(journal: Journal) -> None:
    settings = Settings.model_validate({"worker": {"concurrency": 1}})
    with InMemoryTaskline(journal.registry, settings=settings) as tl:
        tl.stop_worker()
        cancelled = tl.submit("note", {}).task_id
        assert tl.cancel(cancelled).fate is Fate.CANCELLED
        tl.pause_projector()
        tl.start_worker()
        others = [tl.submit("note", {}).task_id for _ in range(3)]
        tl.advance(60)
        assert sorted(journal.begun) == sorted((each, 1) for each in others)
        assert tl.workers[0].outstanding()
        tl.resume_projector()
        tl.run_until_idle()
        assert (cancelled, 1) not in journal.begun


def test_a_task_that_was_named_and_may_run_gets_its_slot_back(journal: Journal) -> None:
    settings = Settings.model_validate({"worker": {"concurrency": 1}})
    with InMemoryTaskline(journal.registry, settings=settings) as tl:
        running = tl.submit("hour", {}).task_id
        tl.advance(1)
        assert tl.cancel(running).fate is Fate.REFUSED
        tl.crash_worker()
        tl.start_worker()
        later = [tl.submit("hour", {}).task_id for _ in range(4)]
        tl.run_until_idle()
        assert sorted(journal.ended) == sorted([running, *later])


def test_while_the_view_is_away_a_named_task_is_neither_run_nor_dropped(
    tl: InMemoryTaskline, journal: Journal
) -> None:
    tl.stop_worker()
    task_id = tl.submit("note", {}).task_id
    tl.run_until_idle()
    # Somebody began to cancel it, and did not come to ask.
    notice = CancelNotice(task_id=task_id, abort=False)
    record = notice_record(notice, queue="default", topics=tl.topics, codec=Codec())
    tl.inject(record.topic, record.value, key=record.key)
    tl.view.stop()
    tl.start_worker()
    tl.advance(HOUR)
    assert journal.begun == []
    tl.view.start()
    tl.run_until_idle()
    assert journal.begun == [(task_id, 1)]


def test_a_task_that_is_older_than_half_the_notices_retention_is_looked_up(
    tl: InMemoryTaskline, journal: Journal
) -> None:
    task_id = tl.submit("note", {}, delay=13 * HOUR).task_id
    tl.advance(1)
    tl.view.stop()
    tl.advance(14 * HOUR)
    assert journal.begun == []
    tl.view.start()
    tl.run_until_idle()
    assert journal.begun == [(task_id, 1)]


def test_without_the_look_up_a_cancelled_task_runs(journal: Journal) -> None:
    settings = Settings.model_validate({"worker": {"cancels": False}})
    with InMemoryTaskline(journal.registry, settings=settings) as tl:
        tl.stop_worker()
        task_id = tl.submit("note", {}).task_id
        assert tl.cancel(task_id).fate is Fate.CANCELLED
        tl.start_worker()
        tl.run_until_idle()
        assert journal.begun == [(task_id, 1)]
        assert tl.status(task_id).status == "cancelled"


def test_a_broker_that_is_away_delays_the_start(tl: InMemoryTaskline, journal: Journal) -> None:
    task_id = tl.submit("note", {}).task_id
    tl.broker.stop()
    tl.advance(5)
    assert journal.begun == []
    tl.broker.start()
    tl.run_until_idle()
    assert journal.begun == [(task_id, 1)]


# ---- what is remembered ------------------------------------------------------------------------------------

NOW = 1_800_000_000_000


def noted(book: NoticeBook, task_id: TaskId, at: int = NOW, *, abort: bool = False) -> None:
    book.take(CancelNotice(task_id=task_id, abort=abort), at)


def test_a_book_names_what_it_has_read_and_no_other() -> None:
    book, named = NoticeBook(), new_task_id(NOW)
    noted(book, named)
    assert book.names(named, NOW)
    assert not book.names(new_task_id(NOW), NOW)
    assert not book.aborts(named)
    noted(book, named, abort=True)
    noted(book, named)
    assert book.aborts(named)
    assert len(book) == 1


def test_what_was_forgotten_for_want_of_room_counts_as_named() -> None:
    book = NoticeBook(max_notices=2)
    ids = [new_task_id(NOW + age) for age in (5, 0, 9)]
    for task_id in ids:
        noted(book, task_id)
    assert len(book) == 2
    assert all(book.names(task_id, NOW) for task_id in ids)
    assert book.names(new_task_id(NOW + 5), NOW)
    assert not book.names(new_task_id(NOW + 6), NOW)


def test_notices_are_forgotten_after_their_retention() -> None:
    book, first = NoticeBook(), new_task_id(NOW)
    noted(book, first)
    noted(book, new_task_id(NOW), NOW + CANCEL_NOTICES_MS)
    assert len(book) == 1
    assert book.names(first, NOW + CANCEL_NOTICES_MS)


def test_an_old_task_counts_as_named_and_an_id_that_nobody_can_have_minted_does_not() -> None:
    book = NoticeBook()
    half = CANCEL_NOTICES_MS // 2
    assert book.names(new_task_id(NOW), NOW + half)
    assert not book.names(new_task_id(NOW), NOW + half - 1)
    assert not book.names(TaskId(int=1), NOW)


def test_after_a_restart_of_the_log_every_task_that_exists_counts_as_named() -> None:
    book = NoticeBook()
    book.restart(NOW)
    assert book.names(new_task_id(NOW), NOW)
    assert not book.names(new_task_id(NOW + 1), NOW)
