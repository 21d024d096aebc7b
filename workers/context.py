"""What a handler may know about the execution it is in."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import structlog

from taskline.schemas.events import Priority
from taskline.schemas.ids import TaskId, created_at_ms, from_ms
from taskline.workers.line import NOWHERE, Line, checked

# How often `stopping` looks. A handler that ends has seconds for it (worker.grace_seconds), and a look costs next to nothing.
_LOOK_SECONDS = 0.2


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
    # To the worker; for `progress` and `should_stop`.
    line: Line = field(default=NOWHERE, repr=False, compare=False)

    def progress(self, fraction: float | None, message: str | None = None) -> None:
        """Say how far the work is, for whoever looks at the task's status.

        From any thread, and as often as you like: it does not wait, and the newest is written about once a second
        (worker.progress_interval_seconds; less often the longer it takes). It may get lost, which is no error.

        Args:
            fraction: from 0 to 1; None: that can't be said.
            message: what is being done, in a few words; cut at 500 bytes.

        Raises:
            ValueError: the fraction is out of its range.
            TypeError: it is no number, or the message no text.
        """
        self.line.progress(*checked(fraction, message))

    @property
    def should_stop(self) -> bool:
        """Whether to come to an end: the worker is leaving, the task is to be aborted, or the soft time limit (else the hard one) has passed.

        Return or raise what you would anyway; `HandBack` gives an execution back to be begun again elsewhere.
        """
        limit_ms = self.deadline_ms if self.soft_deadline_ms is None else self.soft_deadline_ms
        return self.line.stopping or self.line.now_ms() >= limit_ms

    async def stopping(self) -> None:
        """Wait until `should_stop`."""
        while not self.should_stop:  # noqa: ASYNC110 - in a child of its own nobody could set an event
            await asyncio.sleep(_LOOK_SECONDS)

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
