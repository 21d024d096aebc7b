"""What the app stands on, as ports: the real ones are wired in `taskline.api.wiring`, tests bring their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from taskline.api.appending import TaskTypes
from taskline.api.health import Health
from taskline.api.letter_desk import LateLetters
from taskline.api.limits import RateLimits
from taskline.api.metrics import ApiMetrics
from taskline.api.submissions import Submissions
from taskline.infra.role import Clock, SystemClock
from taskline.producers.cancelling import Canceller
from taskline.schemas.ids import TaskId
from taskline.settings import ApiSettings
from taskline.state.fold import TaskHistory
from taskline.state.keys import KeyReader
from taskline.state.keys_memory import MemoryKeys
from taskline.state.listing import Filter
from taskline.state.lists import Listing, TasksById
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

    async def after_request(self, task_id: TaskId, request_id: TaskId, *, tenant: str) -> TaskState | None:
        """The state right after a request to cancel; None: that is not in the view yet. Raises as `get`."""
        ...


class ListQueries(Protocol):
    """Questions about many tasks; `taskline.state.lists.TaskLists` answers them."""

    async def page(self, wanted: Filter, *, cursor: str | None, limit: int) -> Listing:
        """The next tasks that fit, newest first.

        Raises:
            InvalidCursor: no cursor of this listing.
            Unavailable: the view does not answer.
        """
        ...

    async def many(self, task_ids: Sequence[TaskId], *, tenant: str) -> TasksById:
        """Those of the tasks that are the tenant's.

        Raises:
            Unavailable: the view does not answer.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiDeps:
    """Everything that the routes use."""

    settings: ApiSettings
    submissions: Submissions
    status: StatusQueries
    lists: ListQueries
    types: TaskTypes
    cancels: Canceller
    # Largest request body; see `taskline.api.wiring.body_limit`.
    max_body_bytes: int
    letters: LateLetters = field(default_factory=LateLetters)
    # Where API keys are looked up; nobody has one by default.
    keys: KeyReader = field(default_factory=MemoryKeys)
    # None: nothing is limited.
    limits: RateLimits | None = None
    health: Health = field(default_factory=Health)
    metrics: ApiMetrics = field(default_factory=ApiMetrics)
    clock: Clock = field(default_factory=SystemClock)
