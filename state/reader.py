"""What readers ask the view: a task's state and its history, folded on read.

Invariant: what is returned is the fold of a prefix of the task's lane, and never of a shorter one than an earlier answer
was (the store's reads are monotonic). Another tenant's task is as unknown as one that does not exist.
"""

from __future__ import annotations

import asyncio

import structlog

from taskline.errors import TaskNotFound
from taskline.infra.role import Clock, SystemClock
from taskline.schemas.codec import Codec
from taskline.schemas.events import CancelRequested, LifecycleEvent, TaskSubmitted
from taskline.schemas.ids import TaskId, created_at_ms
from taskline.settings import ApiSettings
from taskline.state.fold import TaskHistory, fold, history
from taskline.state.status import TaskState
from taskline.state.store import StoredTask, ViewStore
from taskline.state.stored import events_of, state_of

log = structlog.get_logger(__name__)

# Pauses while the projector may still be on its way: it is usually within one flush interval (20 ms), and a projector that
# is seconds behind must not be made slower by reads.
_FIRST_PAUSE_SECONDS = 0.01
_PAUSE_GROWTH = 1.6
_LONGEST_PAUSE_SECONDS = 0.25


class StatusReader:
    """Answers questions about single tasks from a view's store."""

    def __init__(self, store: ViewStore, codec: Codec, api: ApiSettings, clock: Clock | None = None) -> None:
        """Read `store`; `api` says how long to wait for the projector."""
        self._store = store
        self._codec = codec
        self._api = api
        self._clock = clock or SystemClock()

    async def get(self, task_id: TaskId, *, tenant: str) -> TaskState:
        """The task's state. An id only seconds old may be waited for (`api.read_your_writes_seconds`).

        Raises:
            TaskNotFound: unknown, or another tenant's.
            Unavailable: the store does not answer.
            UnknownSchema: a newer Taskline wrote one of its events.
        """
        submission, stored = await self._visible(task_id, tenant)
        return state_of(self._codec, submission, stored)

    async def history(self, task_id: TaskId, *, tenant: str) -> TaskHistory:
        """The task's state, executions and events; waits and raises as `get`."""
        submission, stored = await self._visible(task_id, tenant)
        return history(submission, events_of(self._codec, stored), stored.marks)

    async def after_request(self, task_id: TaskId, request_id: TaskId, *, tenant: str) -> TaskState | None:
        """The task's state right after a CancelRequested; None: that is not in the view yet. Waits and raises as `get`."""
        submission, stored = await self._visible(task_id, tenant)
        before: list[LifecycleEvent] = []
        for placed in events_of(self._codec, stored):
            before.append(placed.event)
            if isinstance(placed.event, CancelRequested) and placed.event.request_id == request_id:
                return fold(submission, before, stored.marks)
        return None

    async def _visible(self, task_id: TaskId, tenant: str) -> tuple[TaskSubmitted, StoredTask]:
        """The stored task once its submission is there, if it is this tenant's."""
        stored = await self._store.read(task_id)
        if (stored is None or stored.submission is None) and self._is_young(task_id):
            stored = await self._wait(task_id)
        if stored is None or stored.submission is None:
            raise TaskNotFound(task_id)
        submission = self._codec.decode(stored.submission, TaskSubmitted)
        if submission.tenant != tenant:
            raise TaskNotFound(task_id)
        return submission, stored

    def _is_young(self, task_id: TaskId) -> bool:
        age_ms = self._clock.now_ms() - created_at_ms(task_id)
        return age_ms <= self._api.young_task_seconds * 1000

    async def _wait(self, task_id: TaskId) -> StoredTask | None:
        """Read again, with growing pauses, until the submission is there or the wait is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._api.read_your_writes_seconds
        pause = _FIRST_PAUSE_SECONDS
        stored: StoredTask | None = None
        while (remaining := deadline - loop.time()) > 0:
            await asyncio.sleep(min(pause, remaining))
            stored = await self._store.read(task_id)
            if stored is not None and stored.submission is not None:
                break
            pause = min(pause * _PAUSE_GROWTH, _LONGEST_PAUSE_SECONDS)
        return stored
