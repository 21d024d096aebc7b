"""How far one partition has come, when its records end in any order.

Invariant: every record below the watermark is done; the watermark never goes back and never passes a record that is
not done. What a crash leaves to be run again is exactly what was not done by the last commit (its offset and its metadata together).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise

import structlog

from taskline.infra.holes import UnreadableMetadata, decode_holes, decode_running, encode_holes
from taskline.infra.intake import Commit, TopicPartition

log = structlog.get_logger(__name__)


class WatermarkTracker:
    """The taken records of one partition; each call is O(1), amortised over the records."""

    def __init__(
        self, start: int, done: Iterable[tuple[int, int]] = (), suspects: Iterable[int] = ()
    ) -> None:
        """Begin where a group's commit says.

        Args:
            start: the committed offset: the first that may come.
            done: half-open ranges above it, ascending, that an earlier owner completed.
            suspects: offsets that ran in an earlier owner's process when it was last heard of.
        """
        self.suspects = frozenset(suspects)
        # Taken records that run and would take this process along (`begin`).
        self._running: set[int] = set()
        # Taken records at or above the watermark, ascending: the first is not done.
        self._window: deque[int] = deque()
        # Those of them that are not done.
        self._unfinished: set[int] = set()
        # What an earlier owner completed and has not come again; nothing of it is below _next.
        self._earlier: deque[tuple[int, int]] = deque(done)
        # One above the last taken record.
        self._next = start
        self._watermark = start
        self._advance()

    @classmethod
    def resumed(cls, name: TopicPartition, committed: Commit) -> WatermarkTracker:
        """Begin where a group has come to in a partition, with what its commit's metadata lists as done."""
        try:
            done = decode_holes(committed.offset, committed.metadata)
            suspects = decode_running(committed.offset, committed.metadata)
        except UnreadableMetadata as error:
            # To handle again what may be done is allowed; to skip what may not be is not.
            log.warning(
                "commit metadata ignored; records above the offset are handled again",
                topic=name.topic,
                partition=name.partition,
                offset=committed.offset,
                error=str(error),
            )
            done, suspects = (), ()
        return cls(committed.offset, done, suspects)

    @property
    def watermark(self) -> int:
        """The next offset to commit."""
        return self._watermark

    @property
    def next_offset(self) -> int:
        """The lowest offset that can still be taken: one above the last."""
        return self._next

    @property
    def window(self) -> int:
        """How many taken records are at or above the watermark, done or not."""
        return len(self._window)

    @property
    def unfinished(self) -> int:
        """How many taken records are not done."""
        return len(self._unfinished)

    def take(self, offset: int) -> bool:
        """Note a record that was read; offsets ascend, with any gaps.

        Returns:
            False when an earlier owner completed it: it is done and must not run.

        Raises:
            ValueError: the offset is not above the last one.
        """
        if offset < self._next:
            raise ValueError(f"offset {offset} was taken already: the next is {self._next} or above")
        self._next = offset + 1
        if offset < self._watermark:
            # The watermark went past it already, over what an earlier owner completed.
            return False
        if self._done_earlier(offset):
            if self._window:
                self._window.append(offset)
            else:
                self._advance()
            return False
        self._unfinished.add(offset)
        self._window.append(offset)
        return True

    def begin(self, offset: int) -> None:
        """Note that a taken record's handler is about to run in this process: from now on commits tell of it, until it is done."""
        if offset in self._unfinished:
            self._running.add(offset)

    def complete(self, offset: int) -> None:
        """Note that a taken record is done.

        Raises:
            ValueError: it was not taken, or is done already.
        """
        try:
            self._unfinished.remove(offset)
        except KeyError:
            state = "was never taken" if offset >= self._next else "is not waiting for completion"
            raise ValueError(f"offset {offset} {state}") from None
        self._running.discard(offset)
        window, unfinished = self._window, self._unfinished
        if window[0] != offset:
            return
        while window and window[0] not in unfinished:
            window.popleft()
        if window:
            self._watermark = window[0]
        else:
            self._advance()

    def commit(self, *, leaving: bool = False) -> Commit:
        """What to commit now.

        Args:
            leaving: the partition is handed over: whatever ran has been stopped, and nobody died of it.
        """
        offset = self._watermark
        running = () if leaving else self._running
        if len(self._window) == len(self._unfinished) and not self._earlier and not running:
            return Commit(offset=offset)
        return Commit(offset=offset, metadata=encode_holes(offset, self._done_above(), running))

    def _done_above(self) -> Iterator[tuple[int, int]]:
        """Ranges of what is done above the watermark, ascending and merged over offsets without a record; as many steps as records that are not done."""
        waiting = sorted(self._unfinished)
        for before, after in pairwise(waiting):
            if after > before + 1:
                yield before + 1, after
        start = waiting[-1] + 1 if waiting and waiting[-1] + 1 < self._next else None
        for first, stop in self._earlier:
            if start is None:
                yield first, stop
            elif first > self._next:
                yield start, self._next
                start = None
                yield first, stop
            else:
                yield start, stop
                start = None
        if start is not None:
            yield start, self._next

    def _advance(self) -> None:
        """Nothing is unfinished: go to the end of what was taken, and past what an earlier owner completed from there on."""
        self._watermark = max(self._watermark, self._next)
        earlier = self._earlier
        while earlier and earlier[0][0] <= self._watermark:
            self._watermark = max(self._watermark, earlier.popleft()[1])

    def _done_earlier(self, offset: int) -> bool:
        """Whether an earlier owner completed the record just taken; forgets what lies below the next one."""
        earlier = self._earlier
        while earlier and earlier[0][1] <= offset:
            earlier.popleft()
        if not earlier or earlier[0][0] > offset:
            return False
        stop = earlier.popleft()[1]
        if stop > self._next:
            earlier.appendleft((self._next, stop))
        return True
