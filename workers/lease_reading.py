"""Leases as the view has them: read until what is waited for is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from taskline.infra.backoff import pauses
from taskline.schemas.codec import Codec
from taskline.schemas.events import TaskSubmitted
from taskline.schemas.ids import TaskId
from taskline.state.leases import Lease, lease_of
from taskline.state.stored import events_of
from taskline.workers.cancels import TaskView

# The projector is usually within a flush interval (20 ms); one that is far behind must not be made slower by reads.
_FIRST_PAUSE_SECONDS = 0.015
_LONGEST_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A lease, and its task's submission as it was queued."""

    lease: Lease
    submission: bytes


class LeaseReader:
    """Reads leases from a view."""

    def __init__(self, view: TaskView, codec: Codec) -> None:
        """Read `view`."""
        self._view = view
        self._codec = codec

    async def read(self, task_id: TaskId, execution: TaskId) -> Found | None:
        """The lease; None: it is not in the view (yet).

        Raises:
            Unavailable: the view does not answer.
            UnknownSchema: a newer Taskline wrote one of the task's events.
            UndecodableRecord: one is broken.
        """
        stored = await self._view.read(task_id)
        if stored is None or stored.submission is None:
            return None
        submission = self._codec.decode(stored.submission, TaskSubmitted)
        events = [placed.event for placed in events_of(self._codec, stored)]
        lease = lease_of(submission, events, execution, stored.marks)
        return None if lease is None else Found(lease=lease, submission=stored.submission)

    async def until(
        self, task_id: TaskId, execution: TaskId, ready: Callable[[Lease], bool] = lambda lease: True
    ) -> Found:
        """The lease once it is there and `ready`; raises as `read`, and waits without end otherwise."""
        waits = pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while True:
            found = await self.read(task_id, execution)
            if found is not None and ready(found.lease):
                return found
            await asyncio.sleep(next(waits))
