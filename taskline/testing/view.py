"""The view in memory: what a projector wrote, each piece until its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from taskline.errors import Unavailable
from taskline.infra.role import Clock
from taskline.schemas.ids import TaskId
from taskline.state.fold import Marks
from taskline.state.store import ReplayWrite, StoredTask, SubmissionWrite, ViewStore, Write


@dataclass(frozen=True, slots=True)
class _Cell:
    value: bytes
    expires_at_ms: int


@dataclass(slots=True)
class _Row:
    submission: _Cell | None = None
    events: dict[int, _Cell] = field(default_factory=dict)
    dispatched: bool = False
    replay: ReplayWrite | None = None


class MemoryView(ViewStore):
    """A `ViewStore` with the store's own expiry, by a clock; it can be away, and fail in the middle of a write."""

    def __init__(self, clock: Clock) -> None:
        """Forget by `clock`."""
        self._clock = clock
        self._rows: dict[TaskId, _Row] = {}
        self._available = True
        # How many writes the next failing calls still store.
        self._failures: list[int] = []

    async def apply(self, writes: Sequence[Write]) -> None:
        """As `ViewStore.apply`."""
        await asyncio.sleep(0)
        self._check()
        stored = self._failures.pop(0) if self._failures else None
        now_ms = self._clock.now_ms()
        for write in writes[:stored]:
            self._apply(write, now_ms)
        if stored is not None:
            raise Unavailable(f"an injected fault after {min(stored, len(writes))} of {len(writes)} writes")

    async def read(self, task_id: TaskId) -> StoredTask | None:
        """As `ViewStore.read`."""
        await asyncio.sleep(0)
        self._check()
        row = self._rows.get(task_id)
        if row is None:
            return None
        now_ms = self._clock.now_ms()
        submission = row.submission
        events = {
            sequence: cell.value for sequence, cell in row.events.items() if cell.expires_at_ms > now_ms
        }
        alive = submission is not None and submission.expires_at_ms > now_ms
        if not alive and not events:
            del self._rows[task_id]
            return None
        return StoredTask(
            submission=submission.value if alive and submission else None,
            events=events,
            marks=Marks(
                dispatched=row.dispatched, replayed_as=None if row.replay is None else row.replay.replayed_as
            ),
        )

    @property
    def available(self) -> bool:
        """False between `stop` and `start`."""
        return self._available

    def stop(self) -> None:
        """Go away: reads and writes raise Unavailable until `start`."""
        self._available = False

    def start(self) -> None:
        """Come back, with all that was stored."""
        self._available = True

    def fail_next(self, *, stored: int = 0) -> None:
        """Let one coming `apply` raise Unavailable after it has stored the first `stored` of its writes."""
        self._failures.append(stored)

    def task_ids(self) -> tuple[TaskId, ...]:
        """The tasks of which anything is stored, expired or not, sorted."""
        return tuple(sorted(self._rows))

    def _check(self) -> None:
        if not self._available:
            raise Unavailable("the view is away")

    def _apply(self, write: Write, now_ms: int) -> None:
        row = self._rows.setdefault(write.task_id, _Row())
        expires_at_ms = now_ms + write.ttl_seconds * 1000
        if isinstance(write, SubmissionWrite):
            row.submission = _Cell(write.submission, expires_at_ms)
            row.dispatched = row.dispatched or write.dispatched
        elif isinstance(write, ReplayWrite):
            if row.replay is None or row.replay.timestamp_us < write.timestamp_us:
                row.replay = write
        else:
            for sequence, event in write.events.items():
                row.events[sequence] = _Cell(event, expires_at_ms)
