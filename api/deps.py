"""What the app stands on, as ports: the real ones are wired in `taskline.api.wiring`, tests bring their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from taskline.api.health import Health
from taskline.api.metrics import ApiMetrics
from taskline.api.submissions import Submissions, TaskTypes
from taskline.infra.role import Clock, SystemClock
from taskline.schemas.ids import TaskId
from taskline.settings import ApiSettings
from taskline.state.fold import TaskHistory
from taskline.state.status import TaskState


class StatusQueries(Protocol):
    """Questions to the view; `taskline.state.reader.StatusReader` answers them."""

    async def get(self, task_id: TaskId, *, tenant: str) -> TaskState:
        """The task's state.

        Raises:
            TaskNotFound: unknown, or another tenant's.
            Unavailable: the view does not answer.
        """
        ...

    async def history(self, task_id: TaskId, *, tenant: str) -> TaskHistory:
        """The task's executions and events; raises as `get`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiDeps:
    """Everything that the routes use."""

    settings: ApiSettings
    submissions: Submissions
    status: StatusQueries
    types: TaskTypes
    # Largest request body; see `taskline.api.wiring.body_limit`.
    max_body_bytes: int
    health: Health = field(default_factory=Health)
    metrics: ApiMetrics = field(default_factory=ApiMetrics)
    clock: Clock = field(default_factory=SystemClock)
