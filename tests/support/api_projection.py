"""A projector for the app in memory: what its log acknowledges is in its view at once."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Mapping

from api_kit import CODEC, Api

from taskline.infra.log import OutRecord, Position
from taskline.schemas.events import LifecycleBatch, LifecycleEvent, TaskSubmitted
from taskline.schemas.ids import TaskId
from taskline.state.fold import fold
from taskline.state.status import TaskStatus

LIFECYCLE = "tasks.lifecycle"
_CANCELS = "tasks.cancels."


class Projection:
    """The tasks of one log and their events; several `Api`s may append to it, one after another."""

    def __init__(self) -> None:
        self.submissions: dict[TaskId, TaskSubmitted] = {}
        self.events: dict[TaskId, list[LifecycleEvent]] = {}
        # True: the view does not follow.
        self.lagging = False
        # Of this topic nothing is acknowledged.
        self.deaf: str | None = None
        self._behind: list[OutRecord] = []
        self._stores: list[Api] = []

    def attach(self, api: Api) -> None:
        """Project what this one appends, and show it all that there is."""
        append = api.log.append

        def projected(record: OutRecord) -> Future[Position]:
            if self.deaf is not None and record.topic.startswith(self.deaf):
                return asyncio.get_running_loop().create_future()
            future = append(record)
            if future.done() and not future.exception():
                self._behind.append(record)
                if not self.lagging:
                    self.catch_up()
            return future

        api.log.append = projected  # type: ignore[method-assign]
        self._stores.append(api)
        for task_id in self.submissions:
            self._show(task_id)

    def catch_up(self) -> None:
        """Show what the view does not have yet."""
        while self._behind:
            record = self._behind.pop(0)
            if record.topic == LIFECYCLE:
                for entry in CODEC.decode(record.value, LifecycleBatch).events:
                    self.add(CODEC.decode(entry.event, LifecycleEvent))
            elif not record.topic.startswith(_CANCELS):
                submission = CODEC.decode(record.value, TaskSubmitted)
                self.submissions[submission.task_id] = submission
                self._show(submission.task_id)

    def add(self, event: LifecycleEvent) -> None:
        """Put an event into the task's lane."""
        self.events.setdefault(event.task_id, []).append(event)
        self._show(event.task_id)

    def statuses(self) -> Mapping[TaskId, TaskStatus]:
        """Of all tasks in the view."""
        return {
            task_id: fold(submission, self.events.get(task_id, ())).status
            for task_id, submission in self.submissions.items()
        }

    def standing(self) -> list[TaskId]:
        """The tasks that are not cancelled."""
        return [task_id for task_id, status in self.statuses().items() if status is not TaskStatus.CANCELLED]

    def _show(self, task_id: TaskId) -> None:
        if task_id in self.submissions:
            for api in self._stores:
                api.store.put(self.submissions[task_id], *self.events.get(task_id, ()))
