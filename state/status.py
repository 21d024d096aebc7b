"""A task's life: its statuses, the legal moves between them, and what one task looks like to a reader.

    scheduled ──► pending ── Started ──► running ── Succeeded ──► completed
                     ▲                   │     │
                     └──── Released ─────┘     │ Failed, Crashed, TimedOut
                                               ▼
                  running ◄── Started ────── failed ── DeadLettered ──► dead

`failed` waits for the next attempt (`next_attempt_at`), unless a dead letter follows.
`expired` is reached from what waits (scheduled, pending, failed), and from running only by an execution whose worker died: its record came again too
late. So is `cancelled`, and from running if the execution was aborted. An end state has no moves:
the first one that a task's lane reaches is its state for ever. `completed` is also reached from what waits: an
execution that was released or superseded may still report that its work was done (see `taskline.state.fold`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from taskline.schemas.events import (
    Cancelled,
    CancelRequested,
    Crashed,
    DeadLettered,
    ErrorCategory,
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
    TimedOut,
)
from taskline.schemas.ids import TaskId


class TaskStatus(StrEnum):
    """Where a task is in its life."""

    # Submitted with an instant before which it must not start.
    SCHEDULED = "scheduled"
    # Waits for a worker.
    PENDING = "pending"
    # A handler runs.
    RUNNING = "running"
    # The last execution failed; the next attempt waits until it is due, or what follows is not in the log yet.
    FAILED = "failed"
    # A handler returned.
    COMPLETED = "completed"
    # Given up: the task stands on the dead-letter topic.
    DEAD = "dead"
    # Withdrawn before a handler started again.
    CANCELLED = "cancelled"
    # Not started before its start_by.
    EXPIRED = "expired"

    @property
    def ended(self) -> bool:
        """True for an end state: it never changes again."""
        return self in END_STATES


_ENDS_OF_WAITING = frozenset(
    {TaskStatus.COMPLETED, TaskStatus.DEAD, TaskStatus.CANCELLED, TaskStatus.EXPIRED}
)

# Every legal move; a move that is not here can't come out of the fold (held by a property test).
TRANSITIONS: Mapping[TaskStatus, frozenset[TaskStatus]] = {
    TaskStatus.SCHEDULED: _ENDS_OF_WAITING | {TaskStatus.PENDING, TaskStatus.RUNNING, TaskStatus.FAILED},
    TaskStatus.PENDING: _ENDS_OF_WAITING | {TaskStatus.RUNNING, TaskStatus.FAILED},
    TaskStatus.RUNNING: frozenset(
        {
            TaskStatus.PENDING,
            TaskStatus.FAILED,
            TaskStatus.COMPLETED,
            TaskStatus.DEAD,
            # Aborted.
            TaskStatus.CANCELLED,
            # Its worker died, and its record came again too late.
            TaskStatus.EXPIRED,
        }
    ),
    TaskStatus.FAILED: _ENDS_OF_WAITING | {TaskStatus.RUNNING},
    TaskStatus.COMPLETED: frozenset(),
    TaskStatus.DEAD: frozenset(),
    TaskStatus.CANCELLED: frozenset(),
    TaskStatus.EXPIRED: frozenset(),
}
END_STATES = frozenset(status for status, moves in TRANSITIONS.items() if not moves)

# The status that a task has right after an event, if nothing else is known of it. For the view's hint column only: the
# fold also knows what came before.
STATUS_AFTER: Mapping[type[LifecycleEvent], TaskStatus] = {
    Started: TaskStatus.RUNNING,
    LeaseExtended: TaskStatus.RUNNING,
    TimedOut: TaskStatus.FAILED,
    Released: TaskStatus.PENDING,
    Succeeded: TaskStatus.COMPLETED,
    Failed: TaskStatus.FAILED,
    RetryScheduled: TaskStatus.FAILED,
    Crashed: TaskStatus.FAILED,
    Expired: TaskStatus.EXPIRED,
    DeadLettered: TaskStatus.DEAD,
    # Nearly always asked of what waits; of what runs it is refused, and the column says so until the next event.
    CancelRequested: TaskStatus.CANCELLED,
    Cancelled: TaskStatus.CANCELLED,
    Progress: TaskStatus.RUNNING,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskError:
    """Why an execution failed."""

    # The exception's qualified name.
    error_class: str
    message: str
    # The end of the traceback, when the handler left one.
    traceback: str | None
    # False: the worker said that another attempt can't help.
    retryable: bool
    # What kind of error it is, as the worker judged.
    category: ErrorCategory
    attempt: int
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskProgress:
    """How far an execution has come, by its handler's word."""

    # From 0 to 1; None: the handler did not say.
    fraction: float | None
    message: str | None
    # When it was written, by the worker's clock.
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskState:
    """A task as a reader sees it: the fold of its submission and its lane. Instants are aware, in UTC."""

    task_id: TaskId
    tenant: str
    task_type: str
    queue: str
    priority: Priority
    status: TaskStatus
    # From the id.
    created_at: datetime
    # The handler must not start earlier; None: at once.
    not_before: datetime | None
    # Not worth starting later; None: always worth it.
    start_by: datetime | None
    # Every store may forget the task after this.
    retain_until: datetime
    # Start of the execution that started last; None: none has.
    started_at: datetime | None
    # When the task reached its end state, by the clock of the process that ended it; None: it has not.
    completed_at: datetime | None
    # The highest attempt that started, from 1; 0: none has.
    attempt: int
    max_retries: int
    # While the next attempt waits: it does not start earlier; None: none waits.
    next_attempt_at: datetime | None
    # The newest error that was reported before the end, also when a later attempt succeeded.
    last_error: TaskError | None
    # What the handler returned, as JSON in UTF-8; None: nothing, or not completed.
    result: bytes | None
    # The process that started the last execution.
    worker: str | None
    # Why the task is dead, in a word; None: it is not.
    reason: str | None
    # The first task of a chain of replays (its own id when it is the first).
    root_id: TaskId
    replay_of: TaskId | None
    # How many replays led here.
    generation: int
    # The task that replays this dead one; None: none does.
    replayed_as: TaskId | None
    # While it runs: the newest word of the open execution that started last; None: it has said nothing, or none is open.
    progress: TaskProgress | None = None

    @property
    def retry_count(self) -> int:
        """How many attempts have followed the first."""
        return max(self.attempt - 1, 0)
