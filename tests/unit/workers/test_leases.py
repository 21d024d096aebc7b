"""The worker protocol behind HTTP, in memory: leases, their guards, fencing, and what a death leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from gateway_kit import MemoryGateway, failure, taskline

from taskline.errors import OutcomeUnknown, StaleLease
from taskline.schemas.events import LeaseExtended, Progress, Started
from taskline.schemas.ids import TaskId
from taskline.state.fold import Outcome
from taskline.state.status import TaskStatus
from taskline.testing import InMemoryTaskline
from taskline.workers.lease_tokens import execution_of, new_token

LEASE = 10.0


@pytest.fixture
def tl() -> Iterator[InMemoryTaskline]:
    with taskline("a", "b") as made:
        yield made


def outcomes(tl: InMemoryTaskline, task_id: TaskId) -> list[tuple[int, Outcome]]:
    return [(row.attempt, row.outcome) for row in tl.history(task_id).attempts]


def test_a_task_is_lent_with_its_payload_and_completed(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    handle = tl.submit("a", {"x": [1]}, timeout_seconds=7)
    lent = gateway.one("a")
    assert (lent.task_id, lent.payload, lent.attempt, lent.timeout_seconds) == (
        handle.task_id,
        b'{"x":[1]}',
        1,
        7.0,
    )
    assert tl.status(handle.task_id).status is TaskStatus.RUNNING
    assert gateway.complete(lent, b'{"y":2}').outcome == "completed"
    assert tl.result(handle.task_id) == {"y": 2}
    # The lease, and not the offset, has kept it.
    assert outcomes(tl, handle.task_id) == [(1, Outcome.SUCCEEDED)]


def test_a_fetch_waits_for_a_task_and_no_longer_than_asked(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    before = tl.elapsed_seconds
    assert gateway.fetch("a", wait=3.0) == []
    assert 3.0 <= tl.elapsed_seconds - before < 3.2
    fetching = tl._loop.create_task(
        gateway._within(gateway.gateway.desk.fetch("w", ["a"], limit=5, wait_seconds=20))
    )
    tl.advance(5)
    handle = tl.submit("a", 1)
    tl.advance(0.5)
    assert [lent.task_id for lent in fetching.result()] == [handle.task_id]


def test_a_lease_that_ends_is_lent_again_and_its_first_worker_is_fenced(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    handle = tl.submit("a", 1)
    late = gateway.one("a")
    again = gateway.fetch("a", wait=LEASE + 10)
    assert [(each.task_id, each.attempt) for each in again] == [(handle.task_id, 2)]
    for report in (gateway.complete, gateway.fail, gateway.extend):
        with pytest.raises(StaleLease):
            report(late)
    assert tl.status(handle.task_id).status is TaskStatus.RUNNING
    gateway.complete(again[0], b'"second"')
    assert tl.result(handle.task_id) == "second"
    with pytest.raises(StaleLease):
        gateway.complete(late, b'"first"')
    assert tl.result(handle.task_id) == "second"
    assert outcomes(tl, handle.task_id) == [(1, Outcome.TIMED_OUT), (2, Outcome.SUCCEEDED)]


def test_a_lease_that_is_extended_for_long_is_not_run_again(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    handle = tl.submit("a", 1, timeout_seconds=3_600)
    lent = gateway.one("a")
    for _ in range(100):
        # Nobody gets it meanwhile.
        assert gateway.fetch("a", wait=LEASE / 3) == []
        assert gateway.extend(lent).remaining_seconds > LEASE / 2
    gateway.complete(lent)
    assert outcomes(tl, handle.task_id) == [(1, Outcome.SUCCEEDED)]


def test_a_lease_is_kept_although_the_view_lags_for_longer_than_it_lasts(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    handle = tl.submit("a", 1, timeout_seconds=600)
    lent = gateway.one("a")
    tl.advance(4)
    for _ in range(3):
        # The view stands still for longer than the lease lasts, and then has all of it at once.
        tl.pause_projector()
        silent_until = tl.elapsed_seconds + 1.5 * LEASE
        while tl.elapsed_seconds < silent_until:
            with contextlib.suppress(OutcomeUnknown):
                gateway.extend(lent)
            tl.advance(LEASE / 6)
        tl.resume_projector()
        tl.advance(1)
    assert gateway.extend(lent).remaining_seconds > LEASE / 2
    gateway.complete(lent)
    tl.advance(60)
    assert outcomes(tl, handle.task_id) == [(1, Outcome.SUCCEEDED)]


def test_heartbeats_that_come_often_write_few_events(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    handle = tl.submit("a", 1)
    lent = gateway.one("a")
    for _ in range(100):
        tl.advance(0.2)
        gateway.extend(lent)
    events = [placed.event for placed in tl.history(handle.task_id).events]
    assert sum(isinstance(event, LeaseExtended) for event in events) <= 7


def test_a_worker_s_progress_is_shown_and_kept_in_bounds(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    handle = tl.submit("a", 1)
    lent = gateway.one("a")
    for step in range(100):
        gateway.extend(lent, said=(step / 100, f"page {step}"))
        tl.advance(0.2)
    told = tl.status(handle.task_id).progress
    assert told is not None
    assert told.fraction is not None
    assert 0.9 <= told.fraction <= 0.99
    assert told.message == f"page {round(told.fraction * 100)}"
    gateway.complete(lent)
    history = tl.history(handle.task_id)
    assert 15 <= sum(isinstance(placed.event, Progress) for placed in history.events) <= 25
    assert history.state.progress is None
    assert history.attempts[0].progress is not None


def test_progress_of_a_lease_that_ended_is_not_written(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    handle = tl.submit("a", 1, max_retries=0)
    lent = gateway.one("a")
    tl.advance(LEASE + 5)
    with pytest.raises(StaleLease):
        gateway.extend(lent, said=(0.5, None))
    tl.advance(1)
    assert not any(isinstance(placed.event, Progress) for placed in tl.history(handle.task_id).events)


def test_no_extension_outlasts_the_time_limit(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    handle = tl.submit("a", 1, timeout_seconds=20, max_retries=0)
    lent = gateway.one("a")
    for _ in range(7):
        tl.advance(3)
        gateway.extend(lent, 3_600)
    tl.advance(LEASE)
    with pytest.raises(StaleLease):
        gateway.extend(lent)
    assert tl.status(handle.task_id).status is TaskStatus.DEAD


def test_the_same_report_again_is_answered_the_same_and_another_is_stale(tl: InMemoryTaskline) -> None:
    gateway, other = MemoryGateway(tl).begin(), MemoryGateway(tl).begin()
    tl.submit("a", 1)
    lent = gateway.one("a")
    assert other.complete(lent) == gateway.complete(lent) == other.complete(lent)
    with pytest.raises(StaleLease):
        gateway.fail(lent)
    tl.submit("a", 2)
    lent = gateway.one("a")
    first = gateway.fail(lent, after=60.0)
    assert (first.outcome, first) == ("retry_scheduled", other.fail(lent))
    with pytest.raises(StaleLease):
        other.complete(lent)


def test_failures_follow_the_retry_policy(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    handle = tl.submit("a", 1, max_retries=1)
    assert gateway.fail(gateway.one("a")).outcome == "retry_scheduled"
    second = gateway.one("a")
    assert second.attempt == 2
    assert gateway.fail(second).outcome == "dead"
    (letter,) = tl.dead_letters()
    assert (letter.task_id, letter.reason) == (handle.task_id, "exhausted")
    assert [(each.attempt, each.error_class) for each in letter.errors] == [
        (1, "HttpError"),
        (2, "HttpError"),
    ]
    tl.submit("a", 2, max_retries=5)
    assert gateway.fail(gateway.one("a"), permanent=True).outcome == "dead"
    assert tl.dead_letters()[-1].reason == "permanent"


def test_a_worker_says_when_to_try_again(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    tl.submit("a", 1)
    gateway.fail(gateway.one("a"), after=45.0)
    before = tl.elapsed_seconds
    (again,) = gateway.fetch("a", wait=60.0)
    assert again.attempt == 2
    assert 44.9 <= tl.elapsed_seconds - before < 46.5


def test_a_lease_without_retries_left_ends_as_a_dead_letter(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    handle = tl.submit("a", 1, max_retries=0)
    gateway.one("a")
    tl.advance(LEASE + 5)
    assert tl.status(handle.task_id).status is TaskStatus.DEAD
    (letter,) = tl.dead_letters()
    assert (letter.reason, letter.error_class) == ("exhausted", "LeaseExpired")


def test_types_that_nobody_fetches_do_not_block_others() -> None:
    # One partition, room for four records: forty of `b` stand before the one of `a`.
    with taskline("a", "b", topics={"dispatch_partitions": 1}) as tl:
        for number in range(40):
            tl.submit("b", number)
        wanted = tl.submit("a", 1)
        gateway = MemoryGateway(tl).begin()
        (lent,) = gateway.fetch("a", wait=120.0)
        assert lent.task_id == wanted.task_id
        gateway.complete(lent)
        # And they are all there when somebody fetches them.
        seen = set()
        while found := gateway.fetch("b", limit=10, wait=120.0):
            for each in found:
                assert each.attempt == 1
                gateway.complete(each)
                seen.add(each.payload)
        assert len(seen) == 40


def test_what_a_dead_replica_had_lent_is_kept_by_the_others(tl: InMemoryTaskline) -> None:
    first, second = MemoryGateway(tl).begin(), MemoryGateway(tl).begin()
    done, left = tl.submit("a", 1), tl.submit("a", 2)
    lent = {each.task_id: each for each in first.fetch("a", limit=1) + first.fetch("a", limit=1)}
    assert set(lent) == {done.task_id, left.task_id} or pytest.skip("a partition is the other replica's")
    first.die()
    assert second.complete(lent[done.task_id]).outcome == "completed"
    tl.advance(60)
    (again,) = second.fetch("a", wait=120.0)
    assert (again.task_id, again.attempt) == (left.task_id, 2)
    second.complete(again)
    assert outcomes(tl, done.task_id) == [(1, Outcome.SUCCEEDED)]
    assert outcomes(tl, left.task_id) == [(1, Outcome.TIMED_OUT), (2, Outcome.SUCCEEDED)]


def test_a_replica_that_dies_over_a_failure_loses_nothing(tl: InMemoryTaskline) -> None:
    first = MemoryGateway(tl).begin()
    handle = tl.submit("a", 1)
    lent = first.one("a")
    # The failure gets into the log, and the replica dies before it sees that it counted.
    tl.pause_projector()
    failing = tl._loop.create_task(
        first._within(first.gateway.outcomes.fail(lent.task_id, lent.token, failure()))
    )
    tl.advance(1)
    first.die()
    tl.resume_projector()
    tl.advance(1)
    failing.cancel()
    assert tl.status(handle.task_id).status is TaskStatus.FAILED
    second = MemoryGateway(tl).begin()
    (again,) = second.fetch("a", wait=200.0)
    assert (again.task_id, again.attempt) == (handle.task_id, 2)


def test_what_a_view_that_lags_can_not_say_is_unknown_and_the_report_may_be_repeated(
    tl: InMemoryTaskline,
) -> None:
    gateway = MemoryGateway(tl).begin()
    handle = tl.submit("a", 1)
    lent = gateway.one("a")
    tl.advance(0.5)
    tl.pause_projector()
    with pytest.raises(OutcomeUnknown):
        gateway.complete(lent)
    # Its guard comes due meanwhile; the outcome stands before whatever that writes.
    tl.advance(LEASE)
    tl.resume_projector()
    assert gateway.complete(lent).outcome == "completed"
    tl.advance(60)
    assert tl.status(handle.task_id).status is TaskStatus.COMPLETED
    assert outcomes(tl, handle.task_id) == [(1, Outcome.SUCCEEDED)]


def test_a_cancelled_task_is_not_lent(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    gone, stays = tl.submit("a", 1), tl.submit("a", 2)
    tl.cancel(gone.task_id)
    assert [lent.task_id for lent in gateway.fetch("a", limit=5)] == [stays.task_id]
    assert outcomes(tl, gone.task_id) in ([], [(1, Outcome.RUNNING)])
    assert tl.status(gone.task_id).status is TaskStatus.CANCELLED


def test_an_abort_reaches_the_worker_and_its_failure_cancels(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    handle = tl.submit("a", 1)
    lent = gateway.one("a")
    # The cancel waits for a while to see what comes of it.
    assert not gateway.extend(lent, 120).cancel_requested
    tl.cancel(handle.task_id, running=True)
    assert gateway.extend(lent).cancel_requested
    assert gateway.fail(lent).outcome == "cancelled"
    assert tl.status(handle.task_id).status is TaskStatus.CANCELLED
    assert gateway.fail(lent).outcome == "cancelled"


def test_what_reached_nobody_is_lent_again_and_spends_no_attempt(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    handle = tl.submit("a", 1)
    lent = gateway.one("a")
    gateway.call(gateway.gateway.desk.release([lent], "left"))
    (again,) = gateway.fetch("a")
    assert (again.task_id, again.attempt) == (handle.task_id, 1)
    with pytest.raises(StaleLease):
        gateway.complete(lent)
    gateway.complete(again)
    tl.advance(60)
    assert outcomes(tl, handle.task_id) == [(1, Outcome.RELEASED), (1, Outcome.SUCCEEDED)]


def test_an_idle_replica_leaves_and_what_it_had_is_others(tl: InMemoryTaskline) -> None:
    idle = MemoryGateway(tl).begin()
    assert idle.fetch("b", wait=0.5) == []
    handles = [tl.submit("a", number) for number in range(8)]
    tl.advance(40)
    busy = MemoryGateway(tl).begin()
    found = []
    while len(found) < 8:
        found += busy.fetch("a", limit=8, wait=30.0) or pytest.fail(f"only {len(found)}")
    assert {each.task_id for each in found} == {handle.task_id for handle in handles}
    assert {each.attempt for each in found} == {1}


def test_a_replica_that_stops_hands_over_what_it_only_had_in_memory(tl: InMemoryTaskline) -> None:
    first = MemoryGateway(tl).begin()
    assert first.fetch("b", wait=0.5) == []
    handle = tl.submit("a", 1)
    tl.advance(1)
    first.end()
    lent = MemoryGateway(tl).begin().one("a")
    assert (lent.task_id, lent.attempt) == (handle.task_id, 1)
    starts = [
        placed.event for placed in tl.history(handle.task_id).events if isinstance(placed.event, Started)
    ]
    assert len(starts) == 1


def test_a_token_is_of_its_task_and_leads_to_its_execution_alone() -> None:
    one, two = TaskId(int=1), TaskId(int=2)
    token = new_token(one)
    assert execution_of(token.text, one) == token.execution
    assert execution_of(token.text, two) is None
    for wrong in (
        "",
        "x",
        token.text[:-1],
        token.text + "A",
        token.text[::-1],
        "é" * 32,
        str(token.execution),
    ):
        assert execution_of(wrong, one) is None
    assert new_token(one).execution != token.execution


def test_a_wrong_token_is_refused_at_once(tl: InMemoryTaskline) -> None:
    gateway = MemoryGateway(tl).begin()
    handle = tl.submit("a", 1)
    before = tl.elapsed_seconds
    with pytest.raises(StaleLease):
        gateway.call(gateway.gateway.outcomes.complete(handle.task_id, "q" * 32, None))
    assert tl.elapsed_seconds - before < 0.1


def test_concurrent_reports_of_one_lease_agree(tl: InMemoryTaskline) -> None:
    gateway, other = MemoryGateway(tl).begin(), MemoryGateway(tl).begin()
    for _ in range(10):
        handle = tl.submit("a", 1)
        lent = gateway.fetch("a", wait=1.0) or (other.one("a") and [])
        if not lent:
            continue

        async def both(lent=lent[0]) -> list[object]:
            done = gateway._within(gateway.gateway.outcomes.complete(lent.task_id, lent.token, None))
            failed = other._within(other.gateway.outcomes.fail(lent.task_id, lent.token, failure()))
            return await asyncio.gather(done, failed, return_exceptions=True)

        answers = tl._call(both())
        assert sum(isinstance(answer, StaleLease) for answer in answers) == 1
        assert len(outcomes(tl, handle.task_id)) == 1
