"""One page of a listing: a bounded walk down the buckets, from the newest.

Invariant: `searched_to` only goes down, and a task at or above it either was shown, or does not fit the filter, or is one whose hints hid it (see
`docs/decisions/0010-listings.md` for which can be). A call does a bounded amount of work: when its
budget is spent it gives what it has, perhaps nothing, and how far it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from taskline.schemas.codec import Codec
from taskline.schemas.ids import MAX_CLOCK_AHEAD_MS, TaskId, created_at_ms
from taskline.state.listing import Filter, ListingStore, Slice, first_id
from taskline.state.status import TaskState
from taskline.state.store import StoredTask
from taskline.state.stored import decoded, readable

# Partitions that one call may read for ids, in all. A bucket has one a lane; a call looks at one bucket at least.
MAX_PARTITION_READS = 400
# Tasks that one call folds in vain (their hints fitted and their fold does not): each costs as much as a status read.
MAX_MISSES = 500
# No further bucket is begun after this: a caller would rather have a cursor than wait.
MAX_WALK_SECONDS = 1.0
# Buckets that are searched at once: one where tasks are dense, more while few are found. Bounds requests in flight.
_MAX_BUCKETS_AT_ONCE = 8
# Buckets that one look at the index names.
_BUCKETS_PER_LOOK = 64
# Folded at once; more would be thrown away when the page is full.
_MIN_CHUNK = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a page took."""

    # Looks at the index of buckets.
    index_reads: int = 0
    # Partitions that were read for ids.
    partition_reads: int = 0
    # Ids that came back.
    ids: int = 0
    # Tasks that were read whole, and folded.
    tasks: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Some tasks of a listing, newest first."""

    tasks: tuple[TaskState, ...]
    # All from this id upwards was searched; None: the listing is at its end.
    searched_to: TaskId | None
    # The tenant's tasks whose hints fit and that this version can't read.
    unreadable: tuple[TaskId, ...]
    cost: Cost


async def read_page(
    store: ListingStore, codec: Codec, wanted: Filter, *, before: TaskId | None, limit: int, now_ms: int
) -> Page:
    """The tasks that fit, from below `before` (None: from the newest), at most `limit`.

    Raises:
        Unavailable: the store does not answer.
    """
    return await _Walk(store, codec, wanted, limit).run(top(wanted, before, now_ms))


def top(wanted: Filter, before: TaskId | None, now_ms: int) -> TaskId:
    """The id below which the walk begins: clocks may be ahead by a bounded time."""
    newest_ms = now_ms + MAX_CLOCK_AHEAD_MS + 1
    if wanted.created_before_ms is not None:
        newest_ms = min(newest_ms, wanted.created_before_ms)
    begin = first_id(newest_ms)
    return begin if before is None else min(begin, before)


class _Walk:
    """One call."""

    def __init__(self, store: ListingStore, codec: Codec, wanted: Filter, limit: int) -> None:
        self._store = store
        self._codec = codec
        self._wanted = wanted
        self._limit = limit
        self._since = first_id(wanted.created_after_ms or 0)
        self._deadline = asyncio.get_running_loop().time() + MAX_WALK_SECONDS
        self._tasks: list[TaskState] = []
        self._unreadable: list[TaskId] = []
        self._index_reads = self._partition_reads = self._ids = self._folded = 0

    async def run(self, before: TaskId) -> Page:
        ahead: list[int] = []
        more, at_once = True, 1
        while before > self._since:
            if not ahead and more:
                ahead = await self._look(before)
                more = len(ahead) == _BUCKETS_PER_LOOK
            if not ahead:
                break
            group, ahead = ahead[:at_once], ahead[at_once:]
            slices = await asyncio.gather(*(self._slice(bucket, before) for bucket in group))
            for bucket, found in zip(group, slices, strict=True):
                before = await self._search(bucket, found)
                if self._full() or self._spent():
                    return self._page(before if before > self._since else None)
            at_once = min(2 * at_once, _MAX_BUCKETS_AT_ONCE)
        return self._page(None)

    async def _look(self, before: TaskId) -> list[int]:
        """The next buckets below."""
        self._index_reads += 1
        bucket_ms = self._store.bucket_ms
        return list(
            await self._store.buckets(
                self._wanted,
                newest=_newest_ms(before) // bucket_ms,
                oldest=created_at_ms(self._since) // bucket_ms,
                limit=_BUCKETS_PER_LOOK,
            )
        )

    async def _slice(self, bucket: int, before: TaskId) -> Slice:
        found = await self._store.slice(
            bucket, self._wanted, before=before, since=self._since, limit=self._limit - len(self._tasks)
        )
        self._partition_reads += found.partition_reads
        self._ids += len(found.ids)
        return found

    async def _search(self, bucket: int, found: Slice) -> TaskId:
        """Show what fits of a bucket, beginning with a slice of it; the id down to which that was done."""
        while True:
            stopped_at = await self._show(found.ids)
            if stopped_at is not None:
                return stopped_at
            if found.searched_to is None:
                return first_id(bucket * self._store.bucket_ms)
            if self._spent():
                return found.searched_to
            found = await self._slice(bucket, found.searched_to)

    async def _show(self, ids: Sequence[TaskId]) -> TaskId | None:
        """Read, fold and keep what fits. None: all was looked at; else the last id that was."""
        while ids:
            size = max(self._limit - len(self._tasks), _MIN_CHUNK)
            chunk, ids = ids[:size], ids[size:]
            stored = await self._store.read_many(chunk)
            for task_id in chunk:
                if task_id in stored:
                    self._judge(task_id, stored[task_id])
                if self._full():
                    return task_id
            if ids and self._spent():
                return chunk[-1]
        return None

    def _judge(self, task_id: TaskId, stored: StoredTask) -> None:
        self._folded += 1
        if stored.submission is None:
            return
        submission = decoded(self._codec, task_id, stored.submission)
        if submission is None or submission.tenant != self._wanted.tenant:
            return
        state = readable(self._codec, submission, stored)
        if state is None:
            self._unreadable.append(task_id)
        elif self._wanted.fits(state):
            self._tasks.append(state)

    def _full(self) -> bool:
        return len(self._tasks) >= self._limit

    def _spent(self) -> bool:
        return (
            self._partition_reads >= MAX_PARTITION_READS
            or self._folded - len(self._tasks) >= MAX_MISSES
            or asyncio.get_running_loop().time() >= self._deadline
        )

    def _page(self, searched_to: TaskId | None) -> Page:
        cost = Cost(
            index_reads=self._index_reads,
            partition_reads=self._partition_reads,
            ids=self._ids,
            tasks=self._folded,
        )
        return Page(
            tasks=tuple(self._tasks), searched_to=searched_to, unreadable=tuple(self._unreadable), cost=cost
        )


def _newest_ms(before: TaskId) -> int:
    """The newest time that an id below this one can have."""
    ms = created_at_ms(before)
    return ms if before > first_id(ms) else ms - 1
