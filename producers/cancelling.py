"""Cancelling a task: the notice, the request, and what became of it.

Invariant: CANCELLED is said only when the task's own lane says so, at a place that the view has shown; then no worker starts its handler
again (taskline.workers.cancels). REFUSED is said only when the lane says that it was running or over at that place. What is not known in time is
REQUESTED: both records are in the log, and the state tells later.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from taskline.errors import Unavailable
from taskline.infra.backoff import pauses
from taskline.infra.cancels import NOTICE_SPREAD_SECONDS, notice_record
from taskline.infra.kafka.lifecycle import LifecycleLog
from taskline.infra.log import AsyncLog
from taskline.infra.role import Clock, SystemClock
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import CancelNotice, CancelRequested
from taskline.schemas.ids import TaskId, to_ms
from taskline.settings import Settings
from taskline.state.status import TaskState, TaskStatus

# The projector is usually within a flush interval (20 ms); one that is far behind must not be made slower by reads.
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.25


class Fate(Enum):
    """What became of a request to cancel."""

    # The task's handler will not start (again).
    CANCELLED = auto()
    # It runs, or is over.
    REFUSED = auto()
    # Not known yet.
    REQUESTED = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancellation:
    """The answer to a request to cancel."""

    fate: Fate
    # What the answer rests on; of REQUESTED: the newest state that was seen.
    state: TaskState


class CancelView(Protocol):
    """What cancelling asks the view (`StatusReader`)."""

    async def get(self, task_id: TaskId, *, tenant: str) -> TaskState:
        """The task's state.

        Raises:
            TaskNotFound: unknown, or another tenant's.
            Unavailable: the view does not answer.
        """
        ...

    async def after_request(self, task_id: TaskId, request_id: TaskId, *, tenant: str) -> TaskState | None:
        """The state right after a CancelRequested; None: it is not in the view yet. Raises as `get`."""
        ...


class Canceller:
    """Cancels tasks on behalf of a process."""

    def __init__(
        self,
        log: AsyncLog,
        view: CancelView,
        codec: Codec,
        settings: Settings,
        *,
        worker: str,
        clock: Clock | None = None,
    ) -> None:
        """Append to `log` under the name `worker`, and ask `view` what came of it."""
        self._log = log
        self._view = view
        self._codec = codec
        self._topics = Topics(namespace=settings.kafka.namespace)
        self._lifecycle = LifecycleLog(
            log, codec, self._topics, settings.topics.lanes, settings.worker.lifecycle_linger_ms
        )
        self._patience = settings.api.request_timeout_seconds
        self._worker = worker
        self._clock = clock or SystemClock()

    async def cancel(self, task_id: TaskId, *, tenant: str, abort: bool = False) -> Cancellation:
        """Cancel a task that waits; with `abort` also one that runs.

        Returns within api.request_timeout_seconds, and as long again for the log's acknowledgements.

        Raises:
            TaskNotFound: unknown, or another tenant's.
            Unavailable: the view did not answer at the beginning; nothing was asked for.
            DeliveryError: the log did not acknowledge: what was asked for may or may not come about.
            TimeoutError: as DeliveryError.
        """
        return await self.ask(await self._view.get(task_id, tenant=tenant), abort=abort)

    async def ask(self, before: TaskState, *, abort: bool = False) -> Cancellation:
        """As `cancel`, of a task whose state was just read; an end state answers by itself."""
        if before.status.ended:
            return _told(before)
        task_id = before.task_id
        request_id = uuid.uuid4()
        async with asyncio.timeout(self._patience):
            notice = CancelNotice(task_id=task_id, abort=abort)
            # In this order, and so far apart: a worker whose Started comes after the request knows the notice.
            await self._log.append(
                notice_record(notice, queue=before.queue, topics=self._topics, codec=self._codec)
            )
            await asyncio.sleep(NOTICE_SPREAD_SECONDS)
            await self._lifecycle.append(
                CancelRequested(
                    task_id=task_id,
                    tenant=before.tenant,
                    attempt=before.attempt,
                    worker=self._worker,
                    at=self._clock.now_ms(),
                    retain_until=to_ms(before.retain_until),
                    request_id=request_id,
                    abort=abort,
                )
            )
        return await self._outcome(before, request_id, abort=abort)

    async def _outcome(self, before: TaskState, request_id: TaskId, *, abort: bool) -> Cancellation:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        waits = pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        task_id, tenant, newest, placed = before.task_id, before.tenant, before, False
        while (left := deadline - loop.time()) > 0:
            await asyncio.sleep(min(next(waits), left))
            try:
                async with asyncio.timeout(left):
                    if not placed:
                        then = await self._view.after_request(task_id, request_id, tenant=tenant)
                        if then is None:
                            continue
                        newest, placed = then, True
                    else:
                        newest = await self._view.get(task_id, tenant=tenant)
            except (Unavailable, TimeoutError):
                # It is in the log; the view may be back before the time is over.
                continue
            if newest.status.ended or not abort:
                return _told(newest)
        return Cancellation(fate=Fate.REQUESTED, state=newest)


def _told(state: TaskState) -> Cancellation:
    cancelled = state.status is TaskStatus.CANCELLED
    return Cancellation(fate=Fate.CANCELLED if cancelled else Fate.REFUSED, state=state)
