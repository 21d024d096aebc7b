"""What one assigned partition of a delay topic has in memory, from its assignment to its end. Pure.

Invariants:
- What is held is bounded: by the room, and by the one batch that may still come after the partition was paused. What waits beyond it
  stays in the log.
- A record is either held, on its way (forwarded, not acknowledged), or done; the tracker's watermark never passes one that is not done.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from taskline.infra.intake import Commit, TopicPartition
from taskline.infra.watermark import WatermarkTracker
from taskline.processors.delay_core import Held, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How much a partition may hold in memory."""

    records: int
    bytes: int


class Lane:
    """One partition from assigned to revoked or lost."""

    def __init__(self, name: TopicPartition, stage: Stage, room: Room, committed: Commit) -> None:
        """Begin at a group's commit."""
        self.name = name
        self.stage = stage
        self.tracker = WatermarkTracker.resumed(name, committed)
        # The last commit that is known to be stored.
        self.committed = committed
        # False: over; nothing of it is forwarded, completed or committed any more.
        self.open = True
        # True: the intake was told to bring no more.
        self.paused = False
        # Forwarded and not acknowledged, and forwarded and not committed (which includes them).
        self.under_way = 0
        self.uncommitted = 0
        # Whether the tracker has changed since the last commit was begun.
        self.changed = False
        # When the engine looks at it next, in ms since the epoch; None: not at all.
        self.alarm_ms: int | None = None
        self._room = room
        self._bytes = 0
        self._fifo: deque[Held] = deque()
        # (until, offset, record): what leaves by its own time, past those that wait in line.
        self._heap: list[tuple[int, int, Held]] = []

    def __len__(self) -> int:
        """How many records are held."""
        return len(self._fifo) + len(self._heap)

    @property
    def full(self) -> bool:
        """Whether no more should come."""
        return len(self) >= self._room.records or self._bytes >= self._room.bytes

    @property
    def roomy(self) -> bool:
        """Whether a full one may take more again: at half, since resuming costs a fetch."""
        return 2 * len(self) <= self._room.records and 2 * self._bytes <= self._room.bytes

    @property
    def next_ms(self) -> int | None:
        """When the first record leaves; None: nothing is held."""
        if not self._fifo:
            return self._heap[0][0] if self._heap else None
        in_line = self._fifo[0].until_ms
        return min(in_line, self._heap[0][0]) if self._heap else in_line

    def hold(self, held: Held) -> None:
        """Keep a record until its time."""
        self._bytes += held.size
        if self.stage.near or held.cause is not None:
            heapq.heappush(self._heap, (held.until_ms, held.record.position.offset, held))
        else:
            self._fifo.append(held)

    def pop(self) -> Held:
        """Take the first record."""
        heap, line = self._heap, self._fifo
        by_time = heap and (not line or heap[0][0] <= line[0].until_ms)
        held = heapq.heappop(heap)[2] if by_time else line.popleft()
        self._bytes -= held.size
        return held

    def clear(self) -> None:
        """Drop what is held: another owner reads it again."""
        self._fifo.clear()
        self._heap.clear()
        self._bytes = 0
