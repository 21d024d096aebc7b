"""The records on Taskline's topics, as frozen values.

Each class mirrors one contract in `avsc/`, which documents the fields. Instants are whole ms since the epoch (UTC),
as on the wire; `taskline.state` turns them into aware datetimes for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from taskline.schemas.ids import TaskId, created_at_ms

# A batch holds fewer events than this, so that (offset, index) packs into one 64-bit sequence number.
MAX_BATCH_EVENTS = 4096


class ErrorCategory(StrEnum):
    """What kind of error ended an attempt; it decides what follows (taskline.workers.retry)."""

    # A fault that passes by itself: a connection, a time-out of something called.
    TRANSIENT = "transient"
    # Somebody asks for less; often says when to come back.
    RATE_LIMITED = "rate_limited"
    # Somebody else's server is broken.
    SERVER = "server"
    # Another attempt can't help.
    PERMANENT = "permanent"
    # The attempt's own time limit.
    TIMEOUT = "timeout"
    # The process that ran the handler died.
    CRASH = "crash"
    # The handler wanted more memory than its process may have.
    MEMORY = "memory"
    UNKNOWN = "unknown"

    @classmethod
    def read(cls, name: str) -> ErrorCategory:
        """The category of that name; UNKNOWN for one that only a later version knows: what follows from it was decided by who wrote it."""
        try:
            return cls(name)
        except ValueError:
            return cls.UNKNOWN


class Priority(StrEnum):
    """The three dispatch topics of a queue, most urgent first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSubmitted:
    """A task enters the system; also the dispatch record that workers consume."""

    task_id: TaskId
    tenant: str
    task_type: str
    queue: str
    priority: Priority
    payload: bytes
    payload_fingerprint: bytes | None = None
    not_before: int | None = None
    start_by: int | None = None
    retain_until: int
    timeout_ms: int | None = None
    max_retries: int
    idempotency_key: str | None = None
    affinity_key: str | None = None
    replay_of: TaskId | None = None
    # How many replays led here.
    generation: int = 0
    root_id: TaskId
    traceparent: str | None = None

    @property
    def delayed(self) -> bool:
        """Whether it was submitted for later than its creation."""
        return self.not_before is not None and self.not_before > created_at_ms(self.task_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class LifecycleEvent:
    """What every lifecycle event carries."""

    # True for the events after which a task is over; the first of them wins (taskline.state.fold).
    ends: ClassVar[bool] = False

    task_id: TaskId
    tenant: str
    attempt: int
    worker: str
    at: int
    retain_until: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Started(LifecycleEvent):
    """A worker took the task; acknowledged before the handler's first line."""

    execution: TaskId
    source_topic: str
    source_partition: int
    source_offset: int
    # The end of its lease, when the task is lent to a worker of the HTTP protocol.
    lease_until: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseExtended(LifecycleEvent):
    """A worker of the HTTP protocol keeps a task for longer."""

    execution: TaskId
    lease_until: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedOut(LifecycleEvent):
    """A lease ended without an outcome."""

    execution: TaskId
    # The end that passed; a lease that ends later is not closed by this.
    lease_until: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Released(LifecycleEvent):
    """A started execution was handed back unfinished and spent no attempt."""

    execution: TaskId
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Succeeded(LifecycleEvent):
    """The handler returned."""

    ends: ClassVar[bool] = True

    execution: TaskId
    result: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed(LifecycleEvent):
    """The handler did not return a result."""

    execution: TaskId
    error_class: str
    message: str
    traceback: str | None = None
    retryable: bool
    category: ErrorCategory = ErrorCategory.UNKNOWN


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryScheduled(LifecycleEvent):
    """The attempt failed, and the next one waits in a delay tier."""

    due: int


# What stands for an exception's class where a process died instead.
PROCESS_DIED = "ProcessDied"
# And where a lease ended without an outcome; and the text beside it.
LEASE_EXPIRED = "LeaseExpired"
LEASE_EXPIRED_MESSAGE = "the lease ended without an outcome"


@dataclass(frozen=True, kw_only=True, slots=True)
class Crashed(LifecycleEvent):
    """The process that ran the handler died under it."""

    execution: TaskId
    cause: str
    # True: nothing else ran in it, so the death is this task's own and spends an attempt.
    alone: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Expired(LifecycleEvent):
    """Not worth starting any more."""

    ends: ClassVar[bool] = True

    # The dispatch record that is not run; None: from a worker that did not say.
    source_topic: str | None = None
    source_partition: int | None = None
    source_offset: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLettered(LifecycleEvent):
    """No attempt is left or can help."""

    ends: ClassVar[bool] = True

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelRequested(LifecycleEvent):
    """Somebody asked that the task not be started again; ends it where it waits, and is history where it runs."""

    request_id: TaskId
    # True: a running execution is to be stopped, too.
    abort: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancelled(LifecycleEvent):
    """A worker stopped an execution, or did not begin it, since its task was to be aborted."""

    ends: ClassVar[bool] = True

    execution: TaskId


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(LifecycleEvent):
    """How far an execution has come, by its handler's word."""

    execution: TaskId
    # From 0 to 1.
    fraction: float | None = None
    message: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LifecycleEntry:
    """One encoded event in a batch, with what a store must know without decoding it."""

    task_id: TaskId
    retain_until: int
    event: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LifecycleBatch:
    """Lifecycle events of one lane, in order."""

    events: tuple[LifecycleEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptError:
    """Why one attempt failed, in short."""

    attempt: int
    at: int
    worker: str
    category: ErrorCategory
    error_class: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """A task that ended on the dead-letter topic, with all that its replay needs."""

    task_id: TaskId
    tenant: str
    task_type: str
    reason: str
    attempt: int
    error_class: str
    message: str
    traceback: str | None = None
    worker: str
    at: int
    category: ErrorCategory = ErrorCategory.UNKNOWN
    # Oldest first; of too many, the first and the newest.
    errors: tuple[AttemptError, ...] = ()
    source_topic: str
    source_partition: int
    source_offset: int
    submission: bytes


class LetterAction(StrEnum):
    """What was done about a dead letter."""

    REPLAYED = "replayed"
    DISCARDED = "discarded"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetterResolved:
    """Somebody replayed or discarded a dead letter."""

    letter_id: TaskId
    tenant: str
    letter_at: int
    action: LetterAction
    at: int
    by: str
    replayed_as: TaskId | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelNotice:
    """Tells workers to look before they start a task."""

    task_id: TaskId
    # True: a running execution is to be stopped, too.
    abort: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRef:
    """One lease of a guard."""

    task_id: TaskId
    execution: TaskId


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseGuard:
    """Leases that end about when this record is due."""

    retain_until: int
    leases: tuple[LeaseRef, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskTypeRegistered:
    """A task type, or a new payload schema of one."""

    task_type: str
    queue: str
    schema: str | None = None
    priority: Priority
    timeout_ms: int | None = None
    max_retries: int
    at: int


Record = (
    TaskSubmitted
    | LifecycleEvent
    | LifecycleBatch
    | DeadLetter
    | DeadLetterResolved
    | CancelNotice
    | LeaseGuard
    | TaskTypeRegistered
)

LIFECYCLE_EVENTS: tuple[type[LifecycleEvent], ...] = (
    Started,
    LeaseExtended,
    TimedOut,
    Released,
    Succeeded,
    Failed,
    RetryScheduled,
    Crashed,
    Expired,
    DeadLettered,
    CancelRequested,
    Cancelled,
    Progress,
)
RECORDS: tuple[type[Record], ...] = (
    TaskSubmitted,
    *LIFECYCLE_EVENTS,
    LifecycleBatch,
    DeadLetter,
    DeadLetterResolved,
    CancelNotice,
    LeaseGuard,
    TaskTypeRegistered,
)


def sequence_of(offset: int, index: int) -> int:
    """The place of an event in its lane as one number that sorts like (offset, index)."""
    return offset * MAX_BATCH_EVENTS + index
