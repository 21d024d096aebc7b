"""What readers ask the view about many tasks: a page of a listing, and tasks by their ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from taskline.infra.role import Clock, SystemClock
from taskline.schemas.codec import Codec
from taskline.schemas.ids import TaskId, created_at_ms
from taskline.state.listing import Filter, ListingStore, read_cursor, write_cursor
from taskline.state.listing_walk import Cost, read_page
from taskline.state.status import TaskState
from taskline.state.stored import decoded, readable


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """A page of a listing. It may be empty and yet not the last."""

    # Newest first.
    tasks: tuple[TaskState, ...]
    # For the next page; None: this is the last.
    next_cursor: str | None
    # All tasks created later than this (ms since the epoch) were searched; None: all that the filter allows.
    searched_to_ms: int | None
    # Tasks that this version of Taskline can't read, though they may fit.
    unreadable: tuple[TaskId, ...]
    cost: Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class TasksById:
    """Of some ids, the tenant's tasks."""

    tasks: Mapping[TaskId, TaskState]
    # The tenant's, and written so that this version can't read them.
    unreadable: frozenset[TaskId]


class TaskLists:
    """Answers questions about many tasks from a view's store."""

    def __init__(self, store: ListingStore, codec: Codec, clock: Clock | None = None) -> None:
        """Read `store`."""
        self._store = store
        self._codec = codec
        self._clock = clock or SystemClock()

    async def page(self, wanted: Filter, *, cursor: str | None, limit: int) -> Listing:
        """The next tasks that fit, newest first, after a bounded search.

        Raises:
            InvalidCursor: no cursor of this listing.
            Unavailable: the store does not answer.
        """
        before = None if cursor is None else read_cursor(wanted, cursor)
        page = await read_page(
            self._store, self._codec, wanted, before=before, limit=limit, now_ms=self._clock.now_ms()
        )
        end = page.searched_to
        return Listing(
            tasks=page.tasks,
            next_cursor=None if end is None else write_cursor(wanted, end),
            searched_to_ms=None if end is None else created_at_ms(end),
            unreadable=page.unreadable,
            cost=page.cost,
        )

    async def many(self, task_ids: Sequence[TaskId], *, tenant: str) -> TasksById:
        """Those of the tasks that are in the view and this tenant's; nothing is waited for.

        Raises:
            Unavailable: the store does not answer.
        """
        found: dict[TaskId, TaskState] = {}
        unreadable: set[TaskId] = set()
        for task_id, stored in (await self._store.read_many(tuple(dict.fromkeys(task_ids)))).items():
            if stored.submission is None:
                continue
            submission = decoded(self._codec, task_id, stored.submission)
            if submission is None or submission.tenant != tenant:
                continue
            state = readable(self._codec, submission, stored)
            if state is None:
                unreadable.add(task_id)
            else:
                found[task_id] = state
        return TasksById(tasks=found, unreadable=frozenset(unreadable))
