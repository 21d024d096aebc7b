"""Delays and retries: never early, each attempt once, and the status tells what is waited for."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

import pytest
from systems import System

from taskline import TaskHandle
from taskline.schemas.events import DeadLettered, Failed, RetryScheduled, Started, Succeeded
from taskline.state.status import TRANSITIONS, TaskState, TaskStatus

# As behaviour_tasks.RETRY.
BASE_SECONDS, MULTIPLIER = 0.4, 2


def ended(system: System, task: TaskHandle) -> TaskState:
    return system.wait_ended([task.task_id])[task.task_id]


def statuses_until_ended(system: System, task: TaskHandle) -> list[TaskStatus]:
    seen: list[TaskStatus] = []

    def over() -> bool:
        state = system.find(task.task_id)
        if state is not None and (not seen or seen[-1] is not state.status):
            seen.append(state.status)
        return state is not None and state.status.ended

    system.wait_until(over, "ended")
    return seen


@pytest.mark.parametrize("delay", [0.1, 0.7, timedelta(seconds=1.5)], ids=str)
def test_a_delayed_task_waits_as_scheduled_and_never_starts_early(
    system: System, delay: float | timedelta
) -> None:
    task = system.submit("behave.count", 1, delay=delay, priority="high")
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    assert task.status == "scheduled"
    seen = statuses_until_ended(system, task)
    assert seen[-1] is TaskStatus.COMPLETED
    for before, after in itertools.pairwise(seen):
        # A status that passed between two looks leaves a gap, never a step back.
        assert after in TRANSITIONS[before] or before is TaskStatus.SCHEDULED
    state = system.status(task.task_id)
    due = task.created_at + timedelta(seconds=seconds)
    assert state.not_before == due
    assert due <= state.started_at
    assert system.effects("begin")[str(task.task_id)] == 1
    assert [type(placed.event) for placed in system.history(task.task_id).events] == [Started, Succeeded]


def test_what_waits_is_read_as_scheduled_with_its_instant(system: System) -> None:
    task = system.submit("behave.echo", 1, delay=3)
    system.wait_until(lambda: system.find(task.task_id) is not None, "visible")
    state = system.status(task.task_id)
    assert (state.status, state.not_before) == (
        TaskStatus.SCHEDULED,
        task.created_at + timedelta(seconds=3),
    )
    assert ended(system, task).status is TaskStatus.COMPLETED


def test_an_instant_in_the_past_means_at_once(system: System) -> None:
    task = system.submit("behave.echo", 1, not_before=datetime(2020, 1, 1, tzinfo=UTC))
    assert task.status == "pending"
    assert ended(system, task).status is TaskStatus.COMPLETED


def test_a_task_that_is_not_worth_starting_any_more_expires_and_does_not_run(system: System) -> None:
    system.stop_worker()
    try:
        # By this system's clock, which may be virtual: a task says what it is.
        now = system.submit("behave.echo", 1).created_at
        task = system.submit("behave.count", 1, start_by=now + timedelta(seconds=1))
        in_time = system.submit("behave.count", 2, start_by=now + timedelta(minutes=10))
        later = now + timedelta(seconds=1.5)
        system.wait_until(lambda: system.submit("behave.echo", 1).created_at > later, "it is too late")
    finally:
        system.start_worker()
    assert ended(system, task).status is TaskStatus.EXPIRED
    assert ended(system, in_time).status is TaskStatus.COMPLETED
    begun = system.effects("begin")
    assert (begun[str(task.task_id)], begun[str(in_time.task_id)]) == (0, 1)


def test_a_task_that_always_fails_runs_once_and_as_often_as_it_may_be_retried(system: System) -> None:
    task = system.submit("behave.always", "no", max_retries=2)
    state = ended(system, task)
    assert (state.status, state.reason, state.attempt, state.retry_count) == (
        TaskStatus.DEAD,
        "exhausted",
        3,
        2,
    )
    assert system.effects("begin")[str(task.task_id)] == 3
    told = system.history(task.task_id)
    kinds = [type(placed.event) for placed in told.events]
    assert kinds == [Started, Failed, RetryScheduled] * 2 + [Started, Failed, DeadLettered]
    assert [(row.attempt, row.outcome, row.error.message) for row in told.attempts] == [
        (number, "failed", f"no, attempt {number}") for number in (1, 2, 3)
    ]
    for number, (row, after) in enumerate(zip(told.attempts, told.attempts[1:], strict=False)):
        pause = (after.started_at - row.ended_at).total_seconds()
        nominal = BASE_SECONDS * MULTIPLIER**number
        # Instants are whole milliseconds. Late is what the machine makes of it; early is a fault.
        assert 0.5 * nominal - 0.001 <= pause <= 1.5 * nominal + 5
    (letter,) = (each for each in system.dead_letters() if each.task_id == task.task_id)
    assert [(each.attempt, each.message) for each in letter.errors] == [
        (number, f"no, attempt {number}") for number in (1, 2, 3)
    ]
    assert letter.reason == "exhausted"


def test_while_a_retry_waits_the_status_says_until_when(system: System) -> None:
    task = system.submit("behave.comes_back", 2.0, max_retries=1)
    waiting: list[TaskState] = []

    def found() -> bool:
        state = system.find(task.task_id)
        if state is not None and state.next_attempt_at is not None:
            waiting.append(state)
        return bool(waiting)

    system.wait_until(found, "waiting for its next attempt")
    (state,) = waiting
    assert (state.status, state.attempt, state.last_error.category) == (
        TaskStatus.FAILED,
        1,
        "rate_limited",
    )
    over = ended(system, task)
    assert (over.status, over.attempt, over.next_attempt_at) == (TaskStatus.COMPLETED, 2, None)
    # What the handler asks for is kept to, without jitter.
    assert state.next_attempt_at <= over.started_at
    assert (state.next_attempt_at - state.last_error.at).total_seconds() == pytest.approx(2, abs=0.5)


def test_a_task_may_succeed_in_the_end(system: System) -> None:
    task = system.submit("behave.flaky", 3)
    state = ended(system, task)
    assert (state.status, state.attempt, state.retry_count) == (TaskStatus.COMPLETED, 3, 2)
    assert state.last_error.message == "not yet"
    assert system.result(task.task_id) == "attempt 3"


def test_what_can_not_help_is_not_tried_again(system: System) -> None:
    task = system.submit("behave.permanent", "gone", max_retries=5)
    state = ended(system, task)
    assert (state.status, state.reason, state.attempt) == (TaskStatus.DEAD, "permanent", 1)
    assert (state.last_error.retryable, state.last_error.category) == (False, "permanent")


def test_a_retry_that_would_come_too_late_ends_the_task(system: System) -> None:
    now = system.submit("behave.echo", 1).created_at
    task = system.submit("behave.comes_back", 30.0, start_by=now + timedelta(seconds=10))
    assert ended(system, task).status is TaskStatus.EXPIRED


def test_what_waits_survives_everybody(system: System) -> None:
    tasks = [system.submit("behave.flaky", 2, delay=0.3 + number / 20) for number in range(20)]
    system.kill_delay()
    system.kill_worker()
    more = [system.submit("behave.count", number, delay=0.5) for number in range(20)]
    system.start_delay()
    system.start_worker()
    states = system.wait_ended(task.task_id for task in (*tasks, *more))
    assert {state.status for state in states.values()} == {TaskStatus.COMPLETED}
    for state in states.values():
        assert state.not_before <= state.started_at
