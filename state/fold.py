"""The fold: a task's submission and its lane's events, in order, to its state and its history.

Invariant: the state is a pure function of the submission and the *prefix* of the task's events in lane order. So a re-read, a
duplicate under the same sequence number or a rebuild changes nothing, and any reader may evaluate any prefix.

Rules (each is a property test):

- Nothing but the submission: `pending`, or `scheduled` when it must not start before a later instant and is not known to have
  been dispatched (`Marks`: what other topics than the lane say; they only ever move from unset to set).
- `Started` opens an execution and supersedes an open one of the same dispatch record: the record was delivered again, because
  its first taker was thought dead. Executions of different dispatch records (two attempts) may be open together.
- `Released` and `Failed` close their own execution and no other. While another is open the task still runs; else
  it is `pending` or `failed`. The close of an execution that is not open (superseded, released, unknown) moves nothing.
- `Succeeded` ends the task, whichever execution reports it: also one that was superseded or released. The handler's effects
  are in the world and its result is as good as any; waiting for the other execution could only do the work twice in the reader's
  eyes, or lose it if that one fails. The other one's outcome is history.
- `Crashed` closes its own execution too. One that ran alone has failed; one that shared its process spent nothing, and is `pending`
  until it is started again.
- `RetryScheduled` says until when the next attempt waits, unless a later attempt has started already.
- `DeadLettered` ends the task. So does `Expired`, which supersedes an open execution of its dispatch record, as Started does. While another
  execution is open it ends nothing: then another copy of the record was dropped, and the execution's own end counts.
- `CancelRequested` ends the task if it is not over and no execution is open, and is history otherwise: what waits can be withdrawn,
  what runs (or whose worker died a moment ago) can't.
- `Cancelled` is an abort: it closes its own execution, and ends the task unless another execution is open.
- An execution on a *lease* (a Started with lease_until) is fenced: no outcome of it (`Succeeded`, `Failed`, `Cancelled`, `Released`) counts
  unless it is open at that place, since what followed the lease's end has begun elsewhere by then.
- `LeaseExtended` moves the end of an open lease, and never to an earlier one. `TimedOut` closes an open execution whose lease ends no later
  than it says, as a failed one; it changes nothing else.
- `Progress` is kept of an open execution, the newest, and changes no status. It is the task's while the execution is open: what is shown beside
  `completed` or `failed` could only be read as a doubt of it. The attempt keeps the last one, which says how far it came.
- The first end wins for ever. Later events are history: they appear in the attempts and change no field of the state.
- An execution id opens once; a second `Started` under it (a re-sent batch) moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from taskline.schemas.events import (
    LEASE_EXPIRED,
    LEASE_EXPIRED_MESSAGE,
    MAX_BATCH_EVENTS,
    PROCESS_DIED,
    Cancelled,
    CancelRequested,
    Crashed,
    DeadLettered,
    ErrorCategory,
    Expired,
    Failed,
    LeaseExtended,
    LifecycleEvent,
    Progress,
    Released,
    RetryScheduled,
    Started,
    Succeeded,
    TaskSubmitted,
    TimedOut,
)
from taskline.schemas.ids import TaskId, created_at_ms, from_ms
from taskline.state.status import TaskError, TaskProgress, TaskState, TaskStatus


class Outcome(StrEnum):
    """How an execution stands."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    # Handed back unfinished; no attempt was spent.
    RELEASED = "released"
    # The process that ran it died.
    CRASHED = "crashed"
    # It was aborted.
    CANCELLED = "cancelled"
    # Its lease ended without an outcome.
    TIMED_OUT = "timed_out"
    # Its dispatch record was started again elsewhere; it has not reported since.
    SUPERSEDED = "superseded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One execution of the handler: a row of a task's history."""

    attempt: int
    # A random id for this run of the handler.
    execution: TaskId
    outcome: Outcome
    worker: str
    started_at: datetime
    # When it closed; None: open.
    ended_at: datetime | None
    error: TaskError | None
    # Why it was handed back, in a word; None: it was not.
    reason: str | None
    # When its lease ends or ended; None: it has none.
    lease_until: datetime | None = None
    # Its handler's last word on how far it was; None: none.
    progress: TaskProgress | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneEvent:
    """An event and its place in the lane."""

    offset: int
    index: int
    event: LifecycleEvent

    @classmethod
    def at_sequence(cls, sequence: int, event: LifecycleEvent) -> LaneEvent:
        """The event whose place is given as one number (`sequence_of`)."""
        offset, index = divmod(sequence, MAX_BATCH_EVENTS)
        return cls(offset=offset, index=index, event=event)


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """What other topics than the task's lane say of it."""

    # Its dispatch record stands on a dispatch topic (known of tasks that had to wait only).
    dispatched: bool = False
    # The task that replays it.
    replayed_as: TaskId | None = None


NO_MARKS = Marks()


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskHistory:
    """All that the log says of a task."""

    state: TaskState
    # In the order in which they started.
    attempts: tuple[Attempt, ...]
    # In lane order, later events than the end included.
    events: tuple[LaneEvent, ...]


def fold(submission: TaskSubmitted, events: Iterable[LifecycleEvent], marks: Marks = NO_MARKS) -> TaskState:
    """The task's state after these events, which must be its own and in lane order."""
    task = TaskFold(submission, marks)
    for event in events:
        task.apply(event)
    return task.state()


def history(submission: TaskSubmitted, events: Iterable[LaneEvent], marks: Marks = NO_MARKS) -> TaskHistory:
    """The task's state, its executions one by one, and its events, which must be in lane order."""
    task = TaskFold(submission, marks)
    kept = tuple(events)
    for placed in kept:
        task.apply(placed.event)
    return TaskHistory(state=task.state(), attempts=task.rows(), events=kept)


@dataclass(kw_only=True, slots=True)
class _Execution:
    started: Started
    # The end of its lease, extensions included.
    lease_until: int | None
    outcome: Outcome = Outcome.RUNNING
    ended_at: int | None = None
    error: TaskError | None = None
    reason: str | None = None
    progress: TaskProgress | None = None

    @property
    def fenced(self) -> bool:
        """Whether no outcome of it counts any more."""
        return self.lease_until is not None and self.outcome is not Outcome.RUNNING

    def close(self, outcome: Outcome, at: int) -> bool:
        """Close it; False when it was closed by a report of its own before."""
        if self.outcome not in (Outcome.RUNNING, Outcome.SUPERSEDED, Outcome.RELEASED):
            return False
        self.outcome, self.ended_at = outcome, at
        return True

    def row(self) -> Attempt:
        return Attempt(
            attempt=self.started.attempt,
            execution=self.started.execution,
            outcome=self.outcome,
            worker=self.started.worker,
            started_at=from_ms(self.started.at),
            ended_at=None if self.ended_at is None else from_ms(self.ended_at),
            error=self.error,
            reason=self.reason,
            lease_until=None if self.lease_until is None else from_ms(self.lease_until),
            progress=self.progress,
        )


class TaskFold:
    """The fold in progress. `status` and what stands beside it freeze at the first end; `executions` go on."""

    def __init__(self, submission: TaskSubmitted, marks: Marks) -> None:
        """Begin with the submission alone."""
        self.submission = submission
        self.marks = marks
        waits = submission.delayed and not marks.dispatched
        self.status = TaskStatus.SCHEDULED if waits else TaskStatus.PENDING
        self.executions: dict[TaskId, _Execution] = {}
        self.last_started: Started | None = None
        self.last_error: TaskError | None = None
        self.retry: RetryScheduled | None = None
        self.attempt = 0
        self.ended_at: int | None = None
        self.result: bytes | None = None
        self.reason: str | None = None

    @property
    def over(self) -> bool:
        """Whether the task has ended."""
        return self.status.ended

    def outcome_of(self, execution: TaskId) -> Outcome | None:
        """How an execution stands; None: it has not started."""
        found = self.executions.get(execution)
        return None if found is None else found.outcome

    def rows(self) -> tuple[Attempt, ...]:
        """The executions, in the order in which they started."""
        return tuple(execution.row() for execution in self.executions.values())

    def apply(self, event: LifecycleEvent) -> None:
        """Go on by one event."""
        over = self.status.ended
        status = _RULES[type(event)](self, event, over)
        if not over:
            self.status = status
            if status.ended:
                self.ended_at = event.at

    def running(self) -> bool:
        """Whether an execution is open."""
        return any(execution.outcome is Outcome.RUNNING for execution in self.executions.values())

    def state(self) -> TaskState:
        """What the task is now."""
        submission, started, retry = self.submission, self.last_started, self.retry
        waits = retry is not None and self.status is TaskStatus.FAILED
        return TaskState(
            task_id=submission.task_id,
            tenant=submission.tenant,
            task_type=submission.task_type,
            queue=submission.queue,
            priority=submission.priority,
            status=self.status,
            created_at=from_ms(created_at_ms(submission.task_id)),
            not_before=None if submission.not_before is None else from_ms(submission.not_before),
            start_by=None if submission.start_by is None else from_ms(submission.start_by),
            retain_until=from_ms(submission.retain_until),
            started_at=None if started is None else from_ms(started.at),
            completed_at=None if self.ended_at is None else from_ms(self.ended_at),
            attempt=self.attempt,
            max_retries=submission.max_retries,
            next_attempt_at=from_ms(retry.due) if retry is not None and waits else None,
            last_error=self.last_error,
            result=self.result,
            worker=None if started is None else started.worker,
            reason=self.reason,
            root_id=submission.root_id,
            replay_of=submission.replay_of,
            generation=submission.generation,
            replayed_as=self.marks.replayed_as,
            progress=self._progress(),
        )

    def _progress(self) -> TaskProgress | None:
        if self.status is not TaskStatus.RUNNING:
            return None
        running = (each for each in reversed(self.executions.values()) if each.outcome is Outcome.RUNNING)
        newest = next(running, None)
        return None if newest is None else newest.progress


def _started(task: TaskFold, event: Started, over: bool) -> TaskStatus:
    if event.execution in task.executions:
        return task.status
    _supersede(task, event)
    task.executions[event.execution] = _Execution(started=event, lease_until=event.lease_until)
    if not over:
        task.last_started = event
        task.attempt = max(task.attempt, event.attempt)
        if task.retry is not None and task.retry.attempt < event.attempt:
            task.retry = None
    return TaskStatus.RUNNING


def _supersede(task: TaskFold, event: Started | Expired) -> None:
    """The dispatch record was delivered again: whoever had it was thought dead."""
    source = (event.source_topic, event.source_partition, event.source_offset)
    for execution in task.executions.values():
        other = execution.started
        if (
            execution.outcome is Outcome.RUNNING
            and (other.source_topic, other.source_partition, other.source_offset) == source
        ):
            execution.close(Outcome.SUPERSEDED, event.at)


def _released(task: TaskFold, event: Released, over: bool) -> TaskStatus:
    execution = task.executions.get(event.execution)
    if execution is None or execution.outcome is not Outcome.RUNNING:
        return task.status
    execution.close(Outcome.RELEASED, event.at)
    execution.reason = event.reason
    return TaskStatus.RUNNING if task.running() else TaskStatus.PENDING


def _failed(task: TaskFold, event: Failed, over: bool) -> TaskStatus:
    return _ended_badly(task, event, Outcome.FAILED, _error(event), over)


def _crashed(task: TaskFold, event: Crashed, over: bool) -> TaskStatus:
    if event.alone:
        return _ended_badly(task, event, Outcome.CRASHED, _crash(event), over)
    execution = task.executions.get(event.execution)
    if execution is None or execution.outcome is not Outcome.RUNNING:
        return task.status
    execution.close(Outcome.CRASHED, event.at)
    execution.reason = event.cause
    return TaskStatus.RUNNING if task.running() else TaskStatus.PENDING


def _timed_out(task: TaskFold, event: TimedOut, over: bool) -> TaskStatus:
    execution = task.executions.get(event.execution)
    if (
        execution is None
        or execution.outcome is not Outcome.RUNNING
        or execution.lease_until is None
        or execution.lease_until > event.lease_until
    ):
        return task.status
    return _ended_badly(task, event, Outcome.TIMED_OUT, _lease_error(event), over)


def _lease_extended(task: TaskFold, event: LeaseExtended, over: bool) -> TaskStatus:
    execution = task.executions.get(event.execution)
    if execution is not None and execution.outcome is Outcome.RUNNING and execution.lease_until is not None:
        execution.lease_until = max(execution.lease_until, event.lease_until)
    return task.status


def _ended_badly(
    task: TaskFold, event: Failed | Crashed | TimedOut, outcome: Outcome, error: TaskError, over: bool
) -> TaskStatus:
    execution = task.executions.get(event.execution)
    if execution is not None and execution.fenced:
        return task.status
    if not over:
        task.last_error = error
    if execution is None:
        return task.status
    was_open = execution.outcome is Outcome.RUNNING
    if execution.close(outcome, event.at):
        execution.error = error
    if not was_open or task.running():
        return task.status
    return TaskStatus.FAILED


def _retry_scheduled(task: TaskFold, event: RetryScheduled, over: bool) -> TaskStatus:
    if over or event.attempt < task.attempt or task.running():
        return task.status
    task.retry = event
    return TaskStatus.FAILED


def _expired(task: TaskFold, event: Expired, over: bool) -> TaskStatus:
    _supersede(task, event)
    return task.status if task.running() else TaskStatus.EXPIRED


def _cancel_requested(task: TaskFold, event: CancelRequested, over: bool) -> TaskStatus:
    return task.status if task.running() else TaskStatus.CANCELLED


def _cancelled(task: TaskFold, event: Cancelled, over: bool) -> TaskStatus:
    execution = task.executions.get(event.execution)
    if execution is not None:
        if execution.fenced:
            return task.status
        execution.close(Outcome.CANCELLED, event.at)
    return task.status if task.running() else TaskStatus.CANCELLED


def _succeeded(task: TaskFold, event: Succeeded, over: bool) -> TaskStatus:
    execution = task.executions.get(event.execution)
    if execution is not None:
        if execution.fenced:
            return task.status
        execution.close(Outcome.SUCCEEDED, event.at)
    if not over:
        task.result = event.result
    return TaskStatus.COMPLETED


def _dead_lettered(task: TaskFold, event: DeadLettered, over: bool) -> TaskStatus:
    if not over:
        task.reason = event.reason
    return TaskStatus.DEAD


def _progress(task: TaskFold, event: Progress, over: bool) -> TaskStatus:
    execution = task.executions.get(event.execution)
    if execution is not None and execution.outcome is Outcome.RUNNING:
        execution.progress = TaskProgress(
            fraction=event.fraction, message=event.message, at=from_ms(event.at)
        )
    return task.status


# What each kind of event does: updates what it owns, and returns the status that follows (unused once the task is over).
_RULES: dict[type[LifecycleEvent], Callable[[TaskFold, Any, bool], TaskStatus]] = {
    Started: _started,
    LeaseExtended: _lease_extended,
    TimedOut: _timed_out,
    Released: _released,
    Failed: _failed,
    Succeeded: _succeeded,
    RetryScheduled: _retry_scheduled,
    Crashed: _crashed,
    Expired: _expired,
    DeadLettered: _dead_lettered,
    CancelRequested: _cancel_requested,
    Cancelled: _cancelled,
    Progress: _progress,
}


def _error(failed: Failed) -> TaskError:
    return TaskError(
        error_class=failed.error_class,
        message=failed.message,
        traceback=failed.traceback,
        retryable=failed.retryable,
        category=failed.category,
        attempt=failed.attempt,
        at=from_ms(failed.at),
    )


def _lease_error(timed_out: TimedOut) -> TaskError:
    return TaskError(
        error_class=LEASE_EXPIRED,
        message=LEASE_EXPIRED_MESSAGE,
        traceback=None,
        retryable=True,
        category=ErrorCategory.TIMEOUT,
        attempt=timed_out.attempt,
        at=from_ms(timed_out.at),
    )


def _crash(crashed: Crashed) -> TaskError:
    return TaskError(
        error_class=PROCESS_DIED,
        message=crashed.cause,
        traceback=None,
        retryable=True,
        category=ErrorCategory.CRASH,
        attempt=crashed.attempt,
        at=from_ms(crashed.at),
    )
