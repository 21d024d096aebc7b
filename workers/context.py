"""What a handler may know about the execution it is in."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import structlog

from taskline.schemas.events import Priority
from taskline.schemas.ids import TaskId, created_at_ms, from_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskContext:
    """One execution of a task, as its handler sees it.

    Execution is at least once: an effect is made idempotent by `root_id` (the same in every attempt and replay), or by
    `root_id` with `attempt`.
    """

    task_id: TaskId
    # The first task of a chain of replays; its own id for a task that replays none.
    root_id: TaskId
    task_type: str
    # From 1.
    attempt: int
    tenant: str
    queue: str
    priority: Priority
    # When this execution is stopped, in ms since the epoch.
    deadline_ms: int
    # When `SoftTimeout` is raised in the handler, likewise; None: it is not.
    soft_deadline_ms: int | None = None
    traceparent: str | None = None

    @property
    def created_at(self) -> datetime:
        """When the task was submitted, UTC."""
        return from_ms(created_at_ms(self.task_id))

    @property
    def deadline(self) -> datetime:
        """When this execution reaches its time limit, UTC."""
        return from_ms(self.deadline_ms)

    @property
    def logger(self) -> Any:  # noqa: ANN401 - structlog's loggers are proxies without a common type
        """A structlog logger that is bound to this execution."""
        return structlog.get_logger("taskline.task").bind(
            task_id=str(self.task_id), task_type=self.task_type, attempt=self.attempt, tenant=self.tenant
        )
