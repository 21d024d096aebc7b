"""The rules of the fold, one by one, and its properties over any sequence of events."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskline.schemas.events import (
    LIFECYCLE_EVENTS,
    Cancelled,
    CancelRequested,
    Crashed,
    DeadLettered,
    Expired,
    Failed,
    LeaseExtended,
    LifecycleEvent,
    Priority,
    Progress,
    Released,
    RetryScheduled,
    Started,
    Succeeded,
    TaskSubmitted,
    TimedOut,
)
from taskline.schemas.ids import from_ms, new_task_id
from taskline.state.fold import _RULES, LaneEvent, Marks, Outcome, fold, history
from taskline.state.leases import lease_of
from taskline.state.status import END_STATES, STATUS_AFTER, TRANSITIONS, TaskStatus

NOW = 1_800_000_000_000
TASK = new_task_id(NOW)
SUBMITTED = TaskSubmitted(
    task_id=TASK,
    tenant="acme",
    task_type="geo.nearest",
    queue="default",
    priority=Priority.HIGH,
    payload=b"{}",
    retain_until=NOW + 86_400_000,
    max_retries=3,
    root_id=TASK,
)
A, B, C = (uuid.UUID(int=number) for number in (1, 2, 3))


def common(attempt: int = 1, at: int = 0, worker: str = "w1") -> dict[str, object]:
    return {
        "task_id": TASK,
        "tenant": "acme",
        "attempt": attempt,
        "worker": worker,
        "at": NOW + at,
        "retain_until": SUBMITTED.retain_until,
    }


def started(execution: uuid.UUID = A, *, source: int = 0, **values: object) -> Started:
    return Started(
        **common(**values),
        execution=execution,
        source_topic="tasks.high",
        source_partition=0,
        source_offset=source,
    )


def lent(execution: uuid.UUID = A, *, until: int = 1_000, source: int = 0, **values: object) -> Started:
    return replace(started(execution, source=source, **values), lease_until=NOW + until)


def extended(execution: uuid.UUID = A, *, until: int = 2_000, **values: object) -> LeaseExtended:
    return LeaseExtended(**common(**values), execution=execution, lease_until=NOW + until)


def timed_out(execution: uuid.UUID = A, *, until: int = 1_000, **values: object) -> TimedOut:
    return TimedOut(**common(**values), execution=execution, lease_until=NOW + until)


def released(execution: uuid.UUID = A, **values: object) -> Released:
    return Released(**common(**values), execution=execution, reason="shutdown")


def succeeded(execution: uuid.UUID = A, result: bytes | None = b"1", **values: object) -> Succeeded:
    return Succeeded(**common(**values), execution=execution, result=result)


def failed(execution: uuid.UUID = A, message: str = "no", **values: object) -> Failed:
    return Failed(
        **common(**values),
        execution=execution,
        error_class="builtins.ValueError",
        message=message,
        retryable=True,
    )


def dead(**values: object) -> DeadLettered:
    return DeadLettered(**common(**values), reason="failed")


def retry(due: int = 60_000, **values: object) -> RetryScheduled:
    return RetryScheduled(**common(**values), due=NOW + due)


def crashed(execution: uuid.UUID = A, *, alone: bool = True, **values: object) -> Crashed:
    return Crashed(**common(**values), execution=execution, cause="signal SIGSEGV", alone=alone)


def expired(*, source: int | None = None, **values: object) -> Expired:
    if source is None:
        return Expired(**common(**values))
    place = started(source=source)
    return Expired(
        **common(**values),
        source_topic=place.source_topic,
        source_partition=place.source_partition,
        source_offset=place.source_offset,
    )


def cancel(*, abort: bool = False, **values: object) -> CancelRequested:
    return CancelRequested(**common(**values), request_id=C, abort=abort)


def cancelled(execution: uuid.UUID = A, **values: object) -> Cancelled:
    return Cancelled(**common(**values), execution=execution)


def progress(execution: uuid.UUID = A, fraction: float | None = 0.5, **values: object) -> Progress:
    return Progress(**common(**values), execution=execution, fraction=fraction, message="half")


def statuses(*events: LifecycleEvent) -> list[str]:
    return [fold(SUBMITTED, events[:count]).status.value for count in range(len(events) + 1)]


def test_a_submission_alone_is_pending_and_says_what_was_submitted() -> None:
    state = fold(SUBMITTED, ())
    assert state.status is TaskStatus.PENDING
    assert (state.task_id, state.tenant, state.task_type, state.queue) == (
        TASK,
        "acme",
        "geo.nearest",
        "default",
    )
    assert state.created_at == from_ms(NOW)
    assert state.created_at.tzinfo is not None
    assert (state.attempt, state.retry_count, state.started_at, state.completed_at) == (0, 0, None, None)
    assert state.retain_until - state.created_at == timedelta(days=1)


def test_a_submission_that_must_wait_is_scheduled() -> None:
    assert fold(replace(SUBMITTED, not_before=NOW + 1), ()).status is TaskStatus.SCHEDULED
    assert fold(replace(SUBMITTED, not_before=NOW), ()).status is TaskStatus.PENDING


def test_the_usual_life() -> None:
    assert statuses(started(), succeeded()) == ["pending", "running", "completed"]
    state = fold(SUBMITTED, (started(at=5, worker="w7"), succeeded(at=9, result=b'{"a":1}')))
    assert (state.result, state.worker, state.attempt) == (b'{"a":1}', "w7", 1)
    assert (state.started_at, state.completed_at) == (from_ms(NOW + 5), from_ms(NOW + 9))


def test_a_failed_attempt_a_second_one_and_its_error() -> None:
    events = (
        started(),
        failed(message="boom", at=3),
        started(B, source=9, attempt=2),
        succeeded(B, attempt=2),
    )
    assert statuses(*events) == ["pending", "running", "failed", "running", "completed"]
    state = fold(SUBMITTED, events)
    assert (state.attempt, state.retry_count) == (2, 1)
    assert state.last_error is not None
    assert (state.last_error.message, state.last_error.attempt) == ("boom", 1)


def test_a_task_that_was_dispatched_waits_no_longer() -> None:
    later = replace(SUBMITTED, not_before=NOW + 1)
    assert fold(later, (), Marks(dispatched=True)).status is TaskStatus.PENDING
    assert fold(later, (started(),)).status is TaskStatus.RUNNING


def test_while_a_retry_waits_the_task_reads_failed_and_says_until_when() -> None:
    events = (started(at=1), failed(at=2), retry(at=2))
    state = fold(SUBMITTED, events)
    assert (state.status, state.next_attempt_at) == (TaskStatus.FAILED, from_ms(NOW + 60_000))
    state = fold(SUBMITTED, (*events, started(B, source=1, attempt=2)))
    assert (state.status, state.next_attempt_at, state.retry_count) == (TaskStatus.RUNNING, None, 1)
    # The second attempt fails, too, and what follows is not in the log yet: the first one's instant is over.
    late = (*events, started(B, source=1, attempt=2), failed(B, attempt=2))
    assert fold(SUBMITTED, late).next_attempt_at is None


def test_a_schedule_of_an_attempt_that_was_overtaken_says_nothing() -> None:
    events = (started(), failed(), started(B, source=1, attempt=2), retry(attempt=1))
    assert statuses(*events)[-1] == "running"
    assert fold(SUBMITTED, (*events, failed(B, attempt=2))).next_attempt_at is None


def test_a_death_of_its_own_is_a_failure() -> None:
    state = fold(SUBMITTED, (started(), crashed()))
    assert state.status is TaskStatus.FAILED
    assert (state.last_error.message, state.last_error.category) == ("signal SIGSEGV", "crash")
    (row,) = history(SUBMITTED, placed((started(), crashed()))).attempts
    assert (row.outcome, row.error) == (Outcome.CRASHED, state.last_error)


def test_a_bystander_of_a_death_has_not_failed() -> None:
    events = (started(), crashed(alone=False), started(B), succeeded(B))
    assert statuses(*events) == ["pending", "running", "pending", "running", "completed"]
    told = history(SUBMITTED, placed(events))
    assert [(row.attempt, row.outcome) for row in told.attempts] == [
        (1, Outcome.CRASHED),
        (1, Outcome.SUCCEEDED),
    ]
    assert told.state.last_error is None


def test_a_task_that_is_not_worth_starting_any_more() -> None:
    assert statuses(expired()) == ["pending", "expired"]
    assert statuses(started(), failed(), expired())[-1] == "expired"
    # A copy of the record was dropped while the task ran: its own end counts.
    assert statuses(started(), expired(source=9), succeeded())[1:] == ["running", "running", "completed"]
    # A worker that does not say which record it dropped.
    assert statuses(started(), expired(), succeeded())[1:] == ["running", "running", "completed"]


def test_a_task_whose_worker_died_expires_when_its_record_comes_again_too_late() -> None:
    events = (started(), expired(source=0))
    assert statuses(*events) == ["pending", "running", "expired"]
    (row,) = history(SUBMITTED, placed(events)).attempts
    assert row.outcome is Outcome.SUPERSEDED


@pytest.mark.parametrize(
    "before",
    [
        (),
        (started(), released()),
        (started(), failed()),
        (started(), failed(), retry()),
        (started(), crashed(alone=False)),
        (started(A), started(B), released(B)),
    ],
)
def test_what_waits_can_be_cancelled_and_stays_so(before: tuple[LifecycleEvent, ...]) -> None:
    assert statuses(*before, cancel())[-1] == "cancelled"
    state = fold(SUBMITTED, (*before, cancel(at=8), cancel(at=9), started(C, source=9, attempt=2)))
    assert (state.status, state.completed_at) == (TaskStatus.CANCELLED, from_ms(NOW + 8))


def test_what_is_scheduled_can_be_cancelled() -> None:
    later = replace(SUBMITTED, not_before=NOW + 1)
    assert fold(later, (cancel(),), Marks(dispatched=True)).status is TaskStatus.CANCELLED
    assert fold(later, (cancel(),)).status is TaskStatus.CANCELLED


@pytest.mark.parametrize(
    "before",
    [
        (started(),),
        (started(A), started(B)),
        (started(A, source=1), started(B, source=2, attempt=2), failed(A)),
    ],
)
def test_what_runs_or_may_run_is_not_cancelled(before: tuple[LifecycleEvent, ...]) -> None:
    assert statuses(*before, cancel())[-1] == "running"
    assert statuses(*before, cancel(abort=True))[-1] == "running"


def test_what_is_over_is_not_cancelled() -> None:
    assert statuses(started(), succeeded(), cancel())[-1] == "completed"
    assert statuses(started(), failed(), dead(), cancel())[-1] == "dead"


def test_an_abort_ends_the_task_once_nothing_of_it_runs() -> None:
    assert statuses(started(), cancel(abort=True), cancelled())[1:] == ["running", "running", "cancelled"]
    both = (started(A, source=1), started(B, source=2), cancelled(A))
    assert statuses(*both)[-1] == "running"
    assert statuses(*both, cancelled(B))[-1] == "cancelled"
    assert statuses(started(A), started(B), cancelled(A))[-1] == "running"
    assert statuses(started(), released(), cancelled())[-1] == "cancelled"
    rows = history(SUBMITTED, placed((*both, cancelled(B)))).attempts
    assert [row.outcome for row in rows] == [Outcome.CANCELLED, Outcome.CANCELLED]


def test_a_replay_is_shown_and_changes_no_status() -> None:
    state = fold(SUBMITTED, (started(), failed(), dead()), Marks(replayed_as=B))
    assert (state.status, state.replayed_as) == (TaskStatus.DEAD, B)


def test_a_task_that_is_given_up() -> None:
    events = (started(), failed(), dead(at=7))
    assert statuses(*events) == ["pending", "running", "failed", "dead"]
    state = fold(SUBMITTED, events)
    assert (state.reason, state.completed_at) == ("failed", from_ms(NOW + 7))


def test_a_task_may_be_given_up_before_it_starts() -> None:
    assert statuses(dead()) == ["pending", "dead"]


def test_a_release_gives_the_task_back() -> None:
    assert statuses(started(), released(), started(B)) == ["pending", "running", "pending", "running"]


def test_a_second_delivery_of_a_record_supersedes_the_first() -> None:
    events = (started(), started(B), failed(A), succeeded(B))
    assert statuses(*events) == ["pending", "running", "running", "running", "completed"]
    outcomes = [row.outcome for row in history(SUBMITTED, placed(events[:2])).attempts]
    assert outcomes == [Outcome.SUPERSEDED, Outcome.RUNNING]
    # What the superseded one reports later is kept, in its own row.
    rows = history(SUBMITTED, placed(events)).attempts
    assert [row.outcome for row in rows] == [Outcome.FAILED, Outcome.SUCCEEDED]
    assert rows[0].error is not None


def test_the_work_of_a_superseded_execution_counts_when_it_is_first() -> None:
    events = (started(A), started(B), succeeded(A, b"a"), succeeded(B, b"b"))
    state = fold(SUBMITTED, events)
    assert (state.status, state.result) == (TaskStatus.COMPLETED, b"a")
    assert [row.outcome for row in history(SUBMITTED, placed(events)).attempts] == [
        Outcome.SUCCEEDED,
        Outcome.SUCCEEDED,
    ]


def test_the_work_of_a_released_execution_counts_too() -> None:
    assert statuses(started(), released(), succeeded()) == ["pending", "running", "pending", "completed"]


def test_a_close_of_another_execution_moves_nothing() -> None:
    assert statuses(started(A), failed(C), released(C)) == ["pending", "running", "running", "running"]
    assert statuses(failed(C)) == ["pending", "pending"]


def test_executions_of_different_records_may_be_open_together() -> None:
    events = (started(A, source=1), started(B, source=2, attempt=2), failed(A), released(B))
    assert statuses(*events) == ["pending", "running", "running", "running", "pending"]


def test_a_repeated_start_opens_nothing() -> None:
    assert statuses(started(), failed(), started()) == ["pending", "running", "failed", "failed"]


def test_later_events_are_history_only() -> None:
    life = (started(), succeeded(at=4))
    later = (started(B, source=3, attempt=2, worker="w9"), failed(B, attempt=2), dead())
    assert fold(SUBMITTED, life + later) == fold(SUBMITTED, life)
    told = history(SUBMITTED, placed(life + later))
    assert [row.outcome for row in told.attempts] == [Outcome.SUCCEEDED, Outcome.FAILED]
    assert [event.event for event in told.events] == [*life, *later]


def test_the_newest_progress_of_what_runs_is_shown() -> None:
    events = (started(), progress(fraction=0.2, at=3), progress(fraction=0.7, at=4))
    assert statuses(*events)[1:] == ["running"] * 3
    told = fold(SUBMITTED, events).progress
    assert told is not None
    assert (told.fraction, told.message, told.at) == (0.7, "half", from_ms(NOW + 4))


@pytest.mark.parametrize(
    "end", [succeeded(), failed(), released(), crashed(), crashed(alone=False), cancelled()]
)
def test_an_execution_that_ends_takes_its_progress_into_the_history(end: LifecycleEvent) -> None:
    events = (started(), progress(fraction=0.7), end)
    assert fold(SUBMITTED, events).progress is None
    (row,) = history(SUBMITTED, placed((*events, progress(fraction=0.9)))).attempts
    assert row.progress is not None
    assert row.progress.fraction == 0.7


def test_a_new_attempt_begins_without_the_progress_of_the_last() -> None:
    events = (started(A), progress(A, 0.7), failed(A), started(B, source=1, attempt=2))
    assert fold(SUBMITTED, events).progress is None
    told = fold(SUBMITTED, (*events, progress(A, 0.8), progress(B, 0.1))).progress
    assert told is not None
    assert told.fraction == 0.1


def test_a_superseded_or_unknown_execution_says_nothing() -> None:
    events = (started(A), started(B), progress(B, 0.1))
    assert fold(SUBMITTED, (*events, progress(A, 0.9), progress(C, 0.9))) == fold(SUBMITTED, events)


def test_of_two_that_run_the_later_one_speaks() -> None:
    both = (started(A, source=1), started(B, source=2, attempt=2), progress(B, 0.1), progress(A, 0.9))
    told = fold(SUBMITTED, both).progress
    assert told is not None
    assert told.fraction == 0.1
    told = fold(SUBMITTED, (*both, released(B))).progress
    assert told is not None
    assert told.fraction == 0.9


def test_history_places_events_in_the_lane() -> None:
    event = LaneEvent.at_sequence(4096 * 17 + 3, started())
    assert (event.offset, event.index) == (17, 3)


def test_every_kind_of_event_has_a_rule_and_a_hint() -> None:
    assert set(_RULES) == set(LIFECYCLE_EVENTS) == set(STATUS_AFTER)
    ends = {kind for kind in LIFECYCLE_EVENTS if kind.ends}
    # A request is granted or not, by what stands before it.
    assert ends == {kind for kind, status in STATUS_AFTER.items() if status.ended} - {CancelRequested}


def test_the_transition_table_names_every_status() -> None:
    assert set(TRANSITIONS) == set(TaskStatus)
    assert {TaskStatus.COMPLETED, TaskStatus.DEAD, TaskStatus.CANCELLED, TaskStatus.EXPIRED} == END_STATES


def placed(events: tuple[LifecycleEvent, ...]) -> list[LaneEvent]:
    return [LaneEvent.at_sequence(4096 * number, event) for number, event in enumerate(events)]


executions = st.sampled_from((A, B, C))
lives = st.lists(
    st.one_of(
        st.builds(
            lambda execution, source, attempt, at: started(execution, source=source, attempt=attempt, at=at),
            executions,
            st.integers(0, 1),
            st.integers(1, 3),
            st.integers(0, 99),
        ),
        st.builds(
            lambda execution, until, source, attempt, at: lent(
                execution, until=until, source=source, attempt=attempt, at=at
            ),
            executions,
            st.integers(1, 3),
            st.integers(0, 1),
            st.integers(1, 3),
            st.integers(0, 99),
        ),
        st.builds(
            lambda execution, until, at: extended(execution, until=until, at=at),
            executions,
            st.integers(1, 3),
            st.integers(0, 99),
        ),
        st.builds(
            lambda execution, until, at: timed_out(execution, until=until, at=at),
            executions,
            st.integers(1, 3),
            st.integers(0, 99),
        ),
        st.builds(lambda execution, at: released(execution, at=at), executions, st.integers(0, 99)),
        st.builds(lambda execution, at: failed(execution, at=at), executions, st.integers(0, 99)),
        st.builds(lambda execution, at: succeeded(execution, at=at), executions, st.integers(0, 99)),
        st.builds(
            lambda execution, alone, at: crashed(execution, alone=alone, at=at),
            executions,
            st.booleans(),
            st.integers(0, 99),
        ),
        st.builds(lambda attempt, at: retry(attempt=attempt, at=at), st.integers(1, 3), st.integers(0, 99)),
        st.builds(
            lambda source, at: expired(source=source, at=at),
            st.sampled_from((None, 0, 1, 9)),
            st.integers(0, 99),
        ),
        st.builds(lambda abort, at: cancel(abort=abort, at=at), st.booleans(), st.integers(0, 99)),
        st.builds(lambda execution, at: cancelled(execution, at=at), executions, st.integers(0, 99)),
        st.builds(lambda at: dead(at=at), st.integers(0, 99)),
        st.builds(
            lambda execution, fraction, at: progress(execution, fraction, at=at),
            executions,
            st.none() | st.floats(0, 1),
            st.integers(0, 99),
        ),
    ),
    max_size=12,
)
submissions = st.sampled_from((SUBMITTED, replace(SUBMITTED, not_before=NOW + 60_000)))


@given(submissions, lives)
def test_only_legal_moves_come_out(submission: TaskSubmitted, events: list[LifecycleEvent]) -> None:
    before = fold(submission, ()).status
    for count in range(1, len(events) + 1):
        after = fold(submission, events[:count]).status
        assert after is before or after in TRANSITIONS[before]
        before = after


@given(submissions, lives, lives)
def test_an_end_is_for_ever(
    submission: TaskSubmitted, events: list[LifecycleEvent], later: list[LifecycleEvent]
) -> None:
    state = fold(submission, events)
    if state.status.ended:
        assert fold(submission, events + later) == state
        assert state.completed_at is not None
    else:
        assert (state.completed_at, state.result, state.reason) == (None, None, None)


@given(submissions, lives)
def test_a_cancel_is_granted_exactly_where_nothing_runs(
    submission: TaskSubmitted, events: list[LifecycleEvent]
) -> None:
    before = fold(submission, events)
    after = fold(submission, [*events, cancel(at=50)])
    if before.status in END_STATES | {TaskStatus.RUNNING}:
        assert after == before
    else:
        assert after.status is TaskStatus.CANCELLED


@given(submissions, lives, executions, st.floats(0, 1))
def test_progress_changes_nothing_but_itself(
    submission: TaskSubmitted, events: list[LifecycleEvent], execution: uuid.UUID, fraction: float
) -> None:
    before, after = fold(submission, events), fold(submission, [*events, progress(execution, fraction, at=7)])
    assert replace(after, progress=before.progress) == before
    assert after.progress is None or after.status is TaskStatus.RUNNING


@given(lives)
def test_history_and_state_agree(events: list[LifecycleEvent]) -> None:
    told = history(SUBMITTED, placed(tuple(events)))
    assert told.state == fold(SUBMITTED, events)
    opened = [event.execution for event in events if isinstance(event, Started)]
    assert [row.execution for row in told.attempts] == list(dict.fromkeys(opened))
    running = any(row.outcome is Outcome.RUNNING for row in told.attempts)
    if not told.state.status.ended:
        assert running == (told.state.status is TaskStatus.RUNNING)


@given(lives, lives, st.sampled_from((succeeded, failed, cancelled, timed_out, released, extended)))
def test_a_lease_that_was_closed_reports_nothing_any_more(
    events: list[LifecycleEvent], between: list[LifecycleEvent], report: Callable[..., LifecycleEvent]
) -> None:
    closing = [lent(C, until=9, source=7), timed_out(C, until=9)]
    before = [event for event in events if getattr(event, "execution", None) != C]
    after = [event for event in between if getattr(event, "execution", None) != C]
    prefix = [*before, *closing, *after]
    assert fold(SUBMITTED, [*prefix, report(C)]) == fold(SUBMITTED, prefix)
    (row,) = [row for row in history(SUBMITTED, placed((*prefix, report(C)))).attempts if row.execution == C]
    assert row.outcome is Outcome.TIMED_OUT


@given(lives)
def test_an_open_lease_takes_its_outcome(events: list[LifecycleEvent]) -> None:
    before = [event for event in events if getattr(event, "execution", None) != C]
    state = fold(SUBMITTED, before)
    after = fold(SUBMITTED, [*before, lent(C, source=7), succeeded(C)])
    assert after == state if state.status.ended else after.status is TaskStatus.COMPLETED


@given(lives)
def test_what_is_known_of_a_lease_is_the_fold_s(events: list[LifecycleEvent]) -> None:
    told = history(SUBMITTED, placed(tuple(events)))
    for row in told.attempts:
        lease = lease_of(SUBMITTED, events, row.execution)
        if row.lease_until is None:
            assert lease is None
            continue
        assert lease is not None
        assert lease.outcome is row.outcome
        assert lease.over is told.state.status.ended
        assert lease.open is (row.outcome is Outcome.RUNNING and not lease.over)
        assert not (lease.open and lease.counted)
        if row.outcome is Outcome.SUCCEEDED and lease.counted:
            assert told.state.status is TaskStatus.COMPLETED


def test_a_lease_that_ends_is_a_failed_attempt() -> None:
    events = (lent(), timed_out(at=1_000), succeeded(), lent(B, source=9, attempt=2), succeeded(B, attempt=2))
    assert statuses(*events) == ["pending", "running", "failed", "failed", "running", "completed"]
    error = fold(SUBMITTED, events[:2]).last_error
    assert error is not None
    assert (error.error_class, error.category.value, error.retryable) == ("LeaseExpired", "timeout", True)


def test_a_time_out_of_an_earlier_end_does_not_close_an_extended_lease() -> None:
    events = (lent(), extended(), timed_out())
    assert statuses(*events)[-1] == "running"
    assert statuses(*events, timed_out(until=2_000))[-1] == "failed"
    # An extension never makes it shorter.
    assert statuses(lent(until=3_000), extended(), timed_out(until=2_000))[-1] == "running"


def test_a_time_out_closes_nothing_that_has_no_lease() -> None:
    assert statuses(started(), timed_out(until=9_000))[-1] == "running"


def test_what_follows_a_closed_lease_is_seen() -> None:
    events: list[LifecycleEvent] = [lent(), failed()]
    # The same record started again is no next attempt.
    for more in ([], [started(B, attempt=1)]):
        lease = lease_of(SUBMITTED, [*events, *more], A)
        assert lease is not None
        assert (lease.followed, lease.counted) == (False, True)
    for following in (retry(), dead(), expired(), started(B, source=9, attempt=2)):
        lease = lease_of(SUBMITTED, [*events, following], A)
        assert lease is not None
        assert (lease.followed, lease.following) == (True, following)


def test_an_outcome_after_the_task_s_end_did_not_count() -> None:
    lease = lease_of(SUBMITTED, [lent(), started(B, source=9), succeeded(B), succeeded(A)], A)
    assert lease is not None
    assert (lease.outcome, lease.over, lease.counted, lease.open) == (Outcome.SUCCEEDED, True, False, False)


@pytest.mark.parametrize("status", [status for status in TaskStatus if status not in END_STATES])
def test_what_waits_or_runs_can_end(status: TaskStatus) -> None:
    assert TRANSITIONS[status] & END_STATES
