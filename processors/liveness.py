"""Does a projector still consume? Judged by what the broker says, since a client that is stuck can't be asked. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from taskline.processors.projection import Partition


class Liveness:
    """Notices records that have lain unread for longer than its patience."""

    def __init__(self, patience_seconds: float) -> None:
        """Be patient: a rebalance on a busy machine takes its time."""
        self._patience = patience_seconds
        # Where a partition with unread records stands, and since when (seconds).
        self._standing: dict[Partition, tuple[int, float]] = {}

    def observe(
        self,
        offsets: Mapping[Partition, tuple[int, int]] | None,
        *,
        taken: Mapping[Partition, int],
        excused: Collection[Partition],
        busy: bool,
        now: float,
    ) -> str | None:
        """Take a look; the cause of death in words, or None.

        Args:
            offsets: of the partitions that this process should read: committed offset and end of the log; None: the
                broker can't be asked, which is its trouble and not this process's.
            taken: offset after the newest record that was read from each partition.
            excused: partitions that are halted.
            busy: the buffer is full, since Cassandra is slow or away: nothing has to be read.
            now: seconds on a clock that never goes back.
        """
        standing: dict[Partition, tuple[int, float]] = {}
        for partition, (committed, end) in (offsets or {}).items():
            position = max(taken.get(partition, 0), committed)
            if busy or partition in excused or position >= end:
                continue
            seen, since = self._standing.get(partition, (position, now))
            standing[partition] = (position, since if seen == position else now)
        self._standing = standing
        stuck = sorted(
            partition for partition, (_, since) in standing.items() if now - since > self._patience
        )
        if stuck:
            return f"records lie unread on {', '.join(f'{topic}/{number}' for topic, number in stuck)}"
        return None
