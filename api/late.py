"""Dependencies that may come later than the first request: until then every question is answered with a 503."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from taskline.api.appending import TaskTypes
from taskline.api.deps import ListQueries, StatusQueries
from taskline.api.problems import TYPES_UNAVAILABLE, ProblemError
from taskline.errors import Unavailable
from taskline.schemas.ids import TaskId
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType
from taskline.state.claims import Claim, ClaimKey, ClaimStore
from taskline.state.fold import TaskHistory
from taskline.state.keys import ApiKey, KeyReader
from taskline.state.listing import Filter
from taskline.state.lists import Listing, TasksById
from taskline.state.status import TaskState

_RETRY_AFTER_SECONDS = "2"
_NOT_YET = "the view has not answered since this process started"


class AllTypes(TaskTypes, Protocol):
    """A `TypeDirectory`."""

    def writer_schema(self, fingerprint: bytes) -> PayloadSchema | None:
        """The schema with this fingerprint; None: nobody has registered it."""
        ...


class LateTypes:
    """The task types, once they have been read."""

    def __init__(self) -> None:
        self.source: AllTypes | None = None

    def get(self, name: str) -> TaskType:
        """As `TaskTypes.get`."""
        return self._read().get(name)

    def names(self) -> Sequence[str]:
        """As `TaskTypes.names`."""
        return self._read().names()

    def writer_schema(self, fingerprint: bytes) -> PayloadSchema | None:
        """As `TypeDirectory.writer_schema`; None also until the types have been read."""
        return None if self.source is None else self.source.writer_schema(fingerprint)

    def _read(self) -> AllTypes:
        if self.source is None:
            raise ProblemError(
                TYPES_UNAVAILABLE,
                "Kafka has not answered since this process started, so no task type is known",
                headers={"retry-after": _RETRY_AFTER_SECONDS},
            )
        return self.source


class LateKeys:
    """The API keys, once the view is connected."""

    def __init__(self) -> None:
        self.source: KeyReader | None = None

    async def find(self, prefix: str) -> ApiKey | None:
        """As `KeyReader.find`."""
        if self.source is None:
            raise Unavailable("Cassandra has not answered since this process started")
        return await self.source.find(prefix)


class LateClaims:
    """The claims of submissions, once the view is connected."""

    def __init__(self) -> None:
        self.source: ClaimStore | None = None

    async def take(self, wanted: Claim, now_ms: int) -> Claim:
        """As `ClaimStore.take`."""
        return await self._connected().take(wanted, now_ms)

    async def find(self, key: ClaimKey) -> Claim | None:
        """As `ClaimStore.find`."""
        return await self._connected().find(key)

    async def renew(self, held: Claim, wanted: Claim, now_ms: int) -> bool:
        """As `ClaimStore.renew`."""
        return await self._connected().renew(held, wanted, now_ms)

    async def settle(self, claim: Claim, outcome: TaskId, now_ms: int) -> None:
        """As `ClaimStore.settle`."""
        await self._connected().settle(claim, outcome, now_ms)

    def _connected(self) -> ClaimStore:
        if self.source is None:
            raise Unavailable("Cassandra has not answered since this process started")
        return self.source


class LateView:
    """The view, once it is connected."""

    def __init__(self) -> None:
        self.queries: StatusQueries | None = None
        self.lists: ListQueries | None = None

    async def get(self, task_id: TaskId, *, tenant: str) -> TaskState:
        """As `StatusQueries.get`."""
        return await self._connected().get(task_id, tenant=tenant)

    async def history(self, task_id: TaskId, *, tenant: str) -> TaskHistory:
        """As `StatusQueries.history`."""
        return await self._connected().history(task_id, tenant=tenant)

    async def after_request(self, task_id: TaskId, request_id: TaskId, *, tenant: str) -> TaskState | None:
        """As `CancelView.after_request`."""
        return await self._connected().after_request(task_id, request_id, tenant=tenant)

    async def page(self, wanted: Filter, *, cursor: str | None, limit: int) -> Listing:
        """As `ListQueries.page`."""
        return await self._connected_lists().page(wanted, cursor=cursor, limit=limit)

    async def many(self, task_ids: Sequence[TaskId], *, tenant: str) -> TasksById:
        """As `ListQueries.many`."""
        return await self._connected_lists().many(task_ids, tenant=tenant)

    def _connected_lists(self) -> ListQueries:
        if self.lists is None:
            raise Unavailable(_NOT_YET)
        return self.lists

    def _connected(self) -> StatusQueries:
        if self.queries is None:
            raise Unavailable(_NOT_YET)
        return self.queries
