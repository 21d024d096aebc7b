"""Dependencies that may come later than the first request: until then every question is answered with a 503."""

from __future__ import annotations

from collections.abc import Sequence

from taskline.api.deps import StatusQueries
from taskline.api.problems import TYPES_UNAVAILABLE, ProblemError
from taskline.api.submissions import TaskTypes
from taskline.errors import Unavailable
from taskline.schemas.ids import TaskId
from taskline.schemas.types import TaskType
from taskline.state.fold import TaskHistory
from taskline.state.status import TaskState

_RETRY_AFTER_SECONDS = "2"


class LateTypes:
    """The task types, once they have been read."""

    def __init__(self) -> None:
        self.source: TaskTypes | None = None

    def get(self, name: str) -> TaskType:
        """As `TaskTypes.get`."""
        return self._read().get(name)

    def names(self) -> Sequence[str]:
        """As `TaskTypes.names`."""
        return self._read().names()

    def _read(self) -> TaskTypes:
        if self.source is None:
            raise ProblemError(
                TYPES_UNAVAILABLE,
                "Kafka has not answered since this process started, so no task type is known",
                headers={"retry-after": _RETRY_AFTER_SECONDS},
            )
        return self.source


class LateView:
    """The view, once it is connected."""

    def __init__(self) -> None:
        self.queries: StatusQueries | None = None

    async def get(self, task_id: TaskId, *, tenant: str) -> TaskState:
        """As `StatusQueries.get`."""
        return await self._connected().get(task_id, tenant=tenant)

    async def history(self, task_id: TaskId, *, tenant: str) -> TaskHistory:
        """As `StatusQueries.history`."""
        return await self._connected().history(task_id, tenant=tenant)

    def _connected(self) -> StatusQueries:
        if self.queries is None:
            raise Unavailable("the view has not answered since this process started")
        return self.queries
