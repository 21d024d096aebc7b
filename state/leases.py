"""One lease of a task, as the task's lane tells it. Pure.

Invariant: what is said of a lease is the fold's word on its execution (`taskline.state.fold`), and what has followed its end. A lease whose
execution closed while the task was not over has *counted*: its outcome, and no other, decides what follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from taskline.schemas.events import (
    CancelRequested,
    Crashed,
    DeadLettered,
    ErrorCategory,
    Expired,
    LifecycleEvent,
    RetryScheduled,
    Started,
    TaskSubmitted,
)
from taskline.schemas.ids import TaskId, to_ms
from taskline.state.fold import NO_MARKS, Marks, Outcome, TaskFold
from taskline.state.status import TaskError, TaskProgress


@dataclass(frozen=True, kw_only=True, slots=True)
class PastError:
    """How an earlier attempt, or this one, went wrong."""

    worker: str
    error: TaskError


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """What a task's lane says of one execution on a lease."""

    submission: TaskSubmitted
    started: Started
    outcome: Outcome
    # When the lease ends or ended, extensions included; ms since the epoch.
    lease_until: int
    # When the execution closed, by its closer's clock; None: it is open.
    closed_at: int | None
    # Its worker's newest word on how far it is.
    progress: TaskProgress | None
    # Whether it closed before the task was over, so that it had an effect. False while it is open.
    counted: bool
    # Whether the task has ended.
    over: bool
    # What followed its end, if that is in the lane: a scheduled or started attempt, a dead letter, an expiry.
    following: LifecycleEvent | None
    # Whether somebody asked, while the task was not over, for what runs of it to be stopped.
    abort: bool
    # How its attempts failed, in the order of their starts.
    errors: tuple[PastError, ...]
    # How many processes it has killed that ran nothing else.
    deaths: int

    @property
    def open(self) -> bool:
        """Whether an outcome of it still counts."""
        return self.outcome is Outcome.RUNNING and not self.over

    @property
    def followed(self) -> bool:
        """Whether nothing is left to be done about it."""
        return self.over or self.following is not None

    @property
    def server_errors(self) -> int:
        """How many attempts in a row, up to the newest, ended with a server error."""
        count = 0
        for past in reversed(self.errors):
            if past.error.category is not ErrorCategory.SERVER:
                break
            count += 1
        return count


def lease_of(
    submission: TaskSubmitted,
    events: Iterable[LifecycleEvent],
    execution: TaskId,
    marks: Marks = NO_MARKS,
) -> Lease | None:
    """What a task's events, in lane order, say of an execution on a lease; None: nothing (yet)."""
    task = TaskFold(submission, marks)
    started: Started | None = None
    following: LifecycleEvent | None = None
    closed = counted = abort = False
    deaths = 0
    for event in events:
        over = task.over
        if closed and following is None and started is not None and _follows(event, started.attempt):
            following = event
        task.apply(event)
        if isinstance(event, Started) and event.execution == execution and started is None:
            started = event
        elif isinstance(event, CancelRequested) and event.abort and not over:
            abort = True
        elif isinstance(event, Crashed) and event.alone:
            deaths += 1
        if started is not None and not closed and task.outcome_of(execution) is not Outcome.RUNNING:
            closed, counted = True, not over
    if started is None or started.lease_until is None:
        return None
    rows = task.rows()
    own = next(row for row in rows if row.execution == execution)
    return Lease(
        submission=submission,
        started=started,
        outcome=own.outcome,
        lease_until=started.lease_until if own.lease_until is None else to_ms(own.lease_until),
        closed_at=None if own.ended_at is None else to_ms(own.ended_at),
        progress=own.progress,
        counted=counted,
        over=task.over,
        following=following,
        abort=abort,
        errors=tuple(PastError(worker=row.worker, error=row.error) for row in rows if row.error is not None),
        deaths=deaths,
    )


def _follows(event: LifecycleEvent, attempt: int) -> bool:
    if isinstance(event, RetryScheduled | DeadLettered | Expired):
        return event.attempt >= attempt
    return isinstance(event, Started) and event.attempt > attempt
