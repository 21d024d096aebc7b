"""What the API answers with, as frozen values: aware datetimes, UUIDs, members that do not apply are None.

An answer may gain members at any time. Those that are not fields here are in `raw`, the JSON object as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from taskline.schemas.events import Priority
from taskline.schemas.ids import TaskId
from taskline.state.status import TaskStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmittedTask:
    """The task that stands for a submission; it is in the log, so it will run, whatever dies."""

    task_id: TaskId
    task_type: str
    # pending, or scheduled for later; of a duplicate its state now, None while the view does not have it yet.
    status: TaskStatus | None
    created_at: datetime
    # It does not start earlier.
    scheduled_at: datetime | None
    # None of a duplicate.
    priority: Priority | None
    queue: str | None
    # Inside a dedup window: an earlier submission's task, and no new one.
    duplicate: bool
    # An earlier request with the same idempotency key has submitted it.
    replayed: bool
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptError:
    """Why an execution failed."""

    # The exception's qualified name, as the worker knows it.
    error_class: str
    message: str
    attempt: int
    at: datetime
    # False: the worker said that another attempt can't help.
    retryable: bool
    category: str
    # In histories only.
    traceback: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far an execution has come, by its handler's word."""

    # From 0 to 1; None: the handler did not say.
    fraction: float | None
    message: str | None
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSnapshot:
    """A task as it was when the API answered."""

    task_id: TaskId
    task_type: str
    status: TaskStatus
    priority: Priority
    queue: str
    created_at: datetime
    scheduled_at: datetime | None
    # Start of the newest execution.
    started_at: datetime | None
    # When it reached its end state.
    completed_at: datetime | None
    # The highest attempt that started, from 1; 0: none has.
    attempt: int
    retry_count: int
    max_retries: int
    # While the next attempt waits: it does not start earlier.
    next_attempt_at: datetime | None
    last_error: AttemptError | None
    # What the handler returned, once completed; always None in `list`, which leaves results out.
    result: Any
    # Why it is dead, in a word.
    reason: str | None
    worker: str | None
    # The first task of a chain of replays; its own id otherwise.
    root_id: TaskId
    replay_of: TaskId | None
    generation: int
    replayed_as: TaskId | None
    # After this the task may be forgotten.
    retain_until: datetime
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    # While it runs: the handler's newest word on how far it is.
    progress: Progress | None = None

    @property
    def ended(self) -> bool:
        """True for an end state: it never changes again."""
        return self.status.ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One execution of the handler."""

    attempt: int
    execution: TaskId
    outcome: str
    worker: str
    started_at: datetime
    ended_at: datetime | None
    error: AttemptError | None
    # Why it was handed back unfinished, in a word.
    reason: str | None
    # The handler's last word on how far it was.
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One lifecycle event as it stands in the log; what only some kinds have is in `raw`."""

    event: str
    at: datetime
    attempt: int
    worker: str
    # Its batch's offset in the task's lane, and its place in the batch.
    offset: int
    index: int
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What happened to a task: executions in order of their starts, events in log order."""

    task_id: TaskId
    task_type: str
    status: TaskStatus
    created_at: datetime
    attempts: tuple[Attempt, ...]
    events: tuple[Event, ...]
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskPage:
    """One page of a list."""

    tasks: tuple[TaskSnapshot, ...]
    # For the next page; None: this was the last. A page may be empty and yet have one.
    next_cursor: str | None
    # All tasks created later than this were searched.
    searched_to: datetime | None
    # Of the ids asked for: those that are no task of the caller's tenant.
    unknown: tuple[TaskId, ...] = ()
    # Tasks that the process that answered can't read, e.g. since a newer one has written them.
    unreadable: tuple[TaskId, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskLookup:
    """What became of the ids asked for."""

    tasks: Mapping[TaskId, TaskSnapshot]
    unknown: tuple[TaskId, ...]
    unreadable: tuple[TaskId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancellation:
    """How a cancel stands. `decided` False: it is in the log, and whether it came in time is not known yet."""

    task_id: TaskId
    decided: bool
    status: TaskStatus | None
    cancelled_at: datetime | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """A dead letter in short."""

    # The dead task's id.
    letter_id: TaskId
    # When it died.
    at: datetime
    task_type: str
    queue: str | None
    reason: str
    category: str
    error_class: str
    message: str
    attempt: int
    generation: int
    # replayed or discarded; None: it is open.
    resolution: str | None
    # The task that replays it.
    replayed_as: TaskId | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterPage:
    """Some dead letters, newest first."""

    dead_letters: tuple[DeadLetter, ...]
    # A page may be empty and yet have one; None: that was all.
    cursor: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A dead task was submitted again, as a new one."""

    letter_id: TaskId
    # replayed, or resumed: an earlier, interrupted replay had submitted the same task.
    outcome: str
    task_id: TaskId
    generation: int
    root_id: TaskId


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskTypeInfo:
    """A registered task type and the defaults of its tasks."""

    name: str
    queue: str
    priority: Priority
    # None: the worker's default.
    timeout_seconds: float | None
    max_retries: int
    # The payload's Avro schema; None: any JSON is taken.
    payload_schema: Any
