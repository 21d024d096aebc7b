"""The view in memory: what a projector wrote, each piece until its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from taskline.errors import Unavailable
from taskline.infra.role import Clock
from taskline.schemas.ids import TaskId, bucket_of
from taskline.state.fold import Marks
from taskline.state.letter_row import Letter, LetterKey, LetterWrite, ResolutionWrite
from taskline.state.listing import Filter, Slice
from taskline.state.store import ReplayWrite, StoredTask, SubmissionWrite, TaskWrite, ViewStore, Write
from taskline.testing.letters import MemoryLetters


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
    # What the submission says of it; hints, as the columns in Cassandra are.
    hints: SubmissionWrite | None = None
    # The status column: what the write with the highest timestamp says.
    status: tuple[int, str] = (-1, "")


class MemoryView(ViewStore):
    """A `ViewStore` with the store's own expiry, by a clock; it can be away, and fail in the middle of a write."""

    def __init__(self, clock: Clock, *, bucket_ms: int = 600_000) -> None:
        """Forget by `clock`; listings look bucket by bucket."""
        self._clock = clock
        self._bucket_ms = bucket_ms
        self._rows: dict[TaskId, _Row] = {}
        self._letters = MemoryLetters(clock)
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
            if isinstance(write, LetterWrite | ResolutionWrite):
                self._letters.apply(write)
            else:
                self._apply(write, now_ms)
        if stored is not None:
            raise Unavailable(f"an injected fault after {min(stored, len(writes))} of {len(writes)} writes")

    async def read(self, task_id: TaskId) -> StoredTask | None:
        """As `ViewStore.read`."""
        await asyncio.sleep(0)
        self._check()
        return self._stored(task_id)

    @property
    def bucket_ms(self) -> int:
        """As `ListingStore.bucket_ms`."""
        return self._bucket_ms

    async def buckets(self, wanted: Filter, *, newest: int, oldest: int, limit: int) -> Sequence[int]:
        """As `ListingStore.buckets`."""
        await asyncio.sleep(0)
        self._check()
        found = {
            bucket_of(task_id, self._bucket_ms)
            for task_id, row in self._rows.items()
            if self._hinted(row, Filter(tenant=wanted.tenant, status=wanted.status))
        }
        return sorted((bucket for bucket in found if oldest <= bucket <= newest), reverse=True)[:limit]

    async def slice(self, bucket: int, wanted: Filter, *, before: TaskId, since: TaskId, limit: int) -> Slice:
        """As `ListingStore.slice`: no more ids than `limit`, so that a full bucket takes several."""
        await asyncio.sleep(0)
        self._check()
        found = sorted(
            (
                task_id
                for task_id, row in self._rows.items()
                if since <= task_id < before
                and bucket_of(task_id, self._bucket_ms) == bucket
                and self._hinted(row, wanted)
            ),
            reverse=True,
        )
        ids = found[:limit]
        return Slice(ids=ids, searched_to=ids[-1] if len(found) > limit else None, partition_reads=1)

    async def read_many(self, task_ids: Sequence[TaskId]) -> Mapping[TaskId, StoredTask]:
        """As `ListingStore.read_many`."""
        await asyncio.sleep(0)
        self._check()
        found = {task_id: self._stored(task_id) for task_id in task_ids}
        return {task_id: stored for task_id, stored in found.items() if stored is not None}

    def _hinted(self, row: _Row, wanted: Filter) -> bool:
        hints = row.hints
        return (
            hints is not None
            and row.submission is not None
            and row.submission.expires_at_ms > self._clock.now_ms()
            and hints.tenant == wanted.tenant
            and wanted.status in (None, row.status[1])
            and wanted.task_type in (None, hints.task_type)
            and wanted.priority in (None, hints.priority)
            and wanted.queue in (None, hints.queue)
        )

    def _stored(self, task_id: TaskId) -> StoredTask | None:
        row = self._rows.get(task_id)
        if row is None:
            return None
        now_ms = self._clock.now_ms()
        submission = row.submission
        events = {
            sequence: cell.value for sequence, cell in row.events.items() if cell.expires_at_ms > now_ms
        }
        alive = submission is not None and submission.expires_at_ms > now_ms
        if not alive and not events and row.replay is None:
            del self._rows[task_id]
            return None
        return StoredTask(
            submission=submission.value if alive and submission else None,
            events=events,
            marks=Marks(
                dispatched=row.dispatched, replayed_as=None if row.replay is None else row.replay.replayed_as
            ),
        )

    async def letter_tenants(self, day: int) -> Sequence[str]:
        """As `LetterStore.letter_tenants`."""
        await asyncio.sleep(0)
        self._check()
        return self._letters.tenants(day)

    async def letter_rows(
        self,
        tenant: str,
        day: int,
        *,
        past: tuple[int, TaskId],
        until_ms: int,
        newest_first: bool,
        limit: int,
    ) -> Sequence[Letter | LetterKey]:
        """As `LetterStore.letter_rows`."""
        await asyncio.sleep(0)
        self._check()
        return self._letters.rows(
            tenant, day, past=past, until_ms=until_ms, newest_first=newest_first, limit=limit
        )

    async def letter_places(self, letter_ids: Sequence[TaskId]) -> Mapping[TaskId, LetterKey]:
        """As `LetterStore.letter_places`."""
        await asyncio.sleep(0)
        self._check()
        return self._letters.places(letter_ids)

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

    def _apply(self, write: TaskWrite, now_ms: int) -> None:
        row = self._rows.setdefault(write.task_id, _Row())
        expires_at_ms = now_ms + write.ttl_seconds * 1000
        if isinstance(write, SubmissionWrite):
            row.submission = _Cell(write.submission, expires_at_ms)
            row.dispatched = row.dispatched or write.dispatched
            row.hints = write
            row.status = max(row.status, (write.timestamp_us, write.status.value))
        elif isinstance(write, ReplayWrite):
            if row.replay is None or row.replay.timestamp_us < write.timestamp_us:
                row.replay = write
        else:
            for sequence, event in write.events.items():
                row.events[sequence] = _Cell(event, expires_at_ms)
            row.status = max(row.status, (write.timestamp_us, write.status.value))
