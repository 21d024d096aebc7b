"""The port to the view's store: what a projector writes and what a reader gets back.

Invariant that every store keeps: writes are idempotent and commute. A task is one record: its submission's bytes, and its events'
bytes under their sequence numbers (`sequence_of`). Writing the same again, in another order or in other
groups gives the same record. What one `EventsWrite` holds becomes visible at once, so that a reader sees a prefix of the lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from taskline.schemas.events import MAX_BATCH_EVENTS, Priority
from taskline.schemas.ids import TaskId, created_at_ms
from taskline.state.fold import NO_MARKS, Marks
from taskline.state.letter_row import FAR_FUTURE_US, LetterWrite, ResolutionWrite
from taskline.state.status import TaskStatus

# Cassandra stores the second in which a cell expires in 32 signed bits by default (until January 2038) and refuses what
# lies beyond; no task's retention comes near this cap.
MAX_TTL_SECONDS = 5 * 365 * 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmissionWrite:
    """A task's submission, as its bytes."""

    task_id: TaskId
    lane: int
    bucket: int
    # Seconds until the store may forget it, from when the write was made; at least 1.
    ttl_seconds: int
    submission: bytes
    # Hints for people and listings; readers fold the bytes.
    tenant: str
    task_type: str
    queue: str
    priority: Priority
    status: TaskStatus
    # True: it stands on a dispatch topic after it has waited.
    dispatched: bool = False

    @property
    def timestamp_us(self) -> int:
        """The write timestamp: below that of every event; what was dispatched is above what was scheduled."""
        return created_at_ms(self.task_id) * 1000 - (0 if self.dispatched else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class EventsWrite:
    """Some events of a task, in lane order, as their bytes."""

    task_id: TaskId
    lane: int
    bucket: int
    ttl_seconds: int
    # Sequence number → the event with its frame.
    events: Mapping[int, bytes]
    # Hints: whose it is, and the status after the last of these events, if nothing else were known.
    tenant: str
    status: TaskStatus

    @property
    def timestamp_us(self) -> int:
        """The write timestamp: follows the lane, so that the hint of the newest event stays."""
        return created_at_ms(self.task_id) * 1000 + max(self.events) // MAX_BATCH_EVENTS + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayWrite:
    """A dead task was submitted again, as another one."""

    # The dead task.
    task_id: TaskId
    lane: int
    bucket: int
    ttl_seconds: int
    replayed_as: TaskId

    @property
    def timestamp_us(self) -> int:
        """The write timestamp: the first replay's mark stays, should there ever be two."""
        return FAR_FUTURE_US - created_at_ms(self.replayed_as) * 1000


TaskWrite = SubmissionWrite | EventsWrite | ReplayWrite
Write = TaskWrite | LetterWrite | ResolutionWrite


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTask:
    """What is stored of a task."""

    # None: its events came first; the task is not visible yet.
    submission: bytes | None = None
    events: Mapping[int, bytes] = field(default_factory=dict)
    marks: Marks = NO_MARKS


class ViewStore(Protocol):
    """Where the view is kept."""

    async def apply(self, writes: Sequence[Write]) -> None:
        """Store all of these, or raise; after an error some may be stored, and the caller tries all again.

        Raises:
            Unavailable: the store does not answer, or not in time.
        """
        ...

    async def read(self, task_id: TaskId) -> StoredTask | None:
        """What is stored of the task; None: nothing.

        Raises:
            Unavailable: the store does not answer, or not in time.
        """
        ...
