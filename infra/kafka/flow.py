"""Which partitions a consumer fetches right now. The engine says what it wants, on its loop; the consumer's thread makes it so.

librdkafka throws away what it has prefetched of a partition when it is paused, so a short stall (a full buffer) is met by not
reading; only a stall beyond SHORT_STALL_SECONDS pauses the partitions, since the group must be polled all the while. A
partition whose own window is full stalls for long, and is paused at once.

Invariant: what is paused is derived from what is wanted and what is assigned, each time anew; a partition that goes away takes no pause
with it, and one that comes has none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from taskline.infra.intake import TopicPartition

SHORT_STALL_SECONDS = 1.0


class Gate(Enum):
    """Whether the thread may read."""

    OPEN = auto()
    # A short stall: nothing is read for a moment.
    WAITING = auto()
    # A long stall: everything is paused, and the group polled.
    CLOSED = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowChange:
    """What the consumer must be told."""

    pause: tuple[TopicPartition, ...] = ()
    resume: tuple[TopicPartition, ...] = ()


class Flow:
    """The wanted and the actual state. `pause`, `resume`, `hand_over` and `handed_over` belong to the loop, the rest to the thread."""

    def __init__(self) -> None:
        """Everything flows, and nothing is assigned."""
        self._lock = threading.Lock()
        self._changed = threading.Event()
        # Wanted.
        self._all_paused = False
        self._held: set[TopicPartition] = set()
        # A batch is on its way to the loop: the next one waits, so that the loop's own backlog is bounded.
        self._undelivered = False
        # Actual, and the thread's own.
        self._assigned: set[TopicPartition] = set()
        self._paused: set[TopicPartition] = set()
        self._stalled_since: float | None = None

    # ---- the loop's side -----------------------------------------------------------------------------------------

    def pause(self, partitions: Collection[TopicPartition] | None) -> None:
        """See `Intake.pause`."""
        with self._lock:
            if partitions is None:
                self._all_paused = True
            else:
                self._held.update(partitions)

    def resume(self, partitions: Collection[TopicPartition] | None) -> None:
        """See `Intake.resume`."""
        with self._lock:
            if partitions is None:
                self._all_paused = False
            else:
                self._held.difference_update(partitions)
        self._changed.set()

    def delivered(self) -> None:
        """The loop has taken the batch."""
        self._undelivered = False
        self._changed.set()

    def wake(self) -> None:
        """End a wait of the thread."""
        self._changed.set()

    # ---- the thread's side ----------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[TopicPartition, ...]:
        """What is assigned."""
        return tuple(self._assigned)

    def delivering(self) -> None:
        """A batch is on its way to the loop."""
        self._undelivered = True

    def assigned(self, partitions: Collection[TopicPartition]) -> None:
        """These came."""
        self._assigned.update(partitions)
        self._paused.difference_update(partitions)

    def gone(self, partitions: Collection[TopicPartition]) -> tuple[TopicPartition, ...]:
        """These went.

        Returns:
            Those of them that are paused, to be resumed before they are let go.
        """
        paused = tuple(self._paused.intersection(partitions))
        self._assigned.difference_update(partitions)
        self._paused.difference_update(partitions)
        with self._lock:
            self._held.difference_update(partitions)
        return paused

    def wait(self) -> Gate:
        """Wait while the loop wants nothing: until something changes (also `wake`), and not beyond a short stall."""
        if self._stalled:
            now = time.monotonic()
            self._stalled_since = now if self._stalled_since is None else self._stalled_since
            left = self._stalled_since + SHORT_STALL_SECONDS - now
            if left <= 0:
                return Gate.CLOSED
            self._changed.wait(left)
            # What is changed is changed before the event is set, so nothing is missed by looking after the reset.
            self._changed.clear()
            if self._stalled:
                return Gate.WAITING
        # Many short stalls in a row are no long one.
        self._stalled_since = None
        return Gate.OPEN

    @property
    def _stalled(self) -> bool:
        return self._all_paused or self._undelivered

    def change(self, *, flowing: bool) -> FlowChange | None:
        """What must be paused and resumed now; None: nothing. It counts as done.

        Args:
            flowing: False in a long stall.
        """
        if flowing and not self._held and not self._paused:
            return None
        with self._lock:
            wanted = self._assigned & self._held if flowing else set(self._assigned)
        pause, resume = wanted - self._paused, self._paused - wanted
        if not pause and not resume:
            return None
        self._paused = wanted
        return FlowChange(pause=tuple(sorted(pause)), resume=tuple(sorted(resume)))
