"""The view as a worker reads it: not at all, until a task must be looked up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from taskline.errors import Unavailable, WrongTopology
from taskline.schemas.ids import TaskId
from taskline.settings import Settings
from taskline.state.store import StoredTask, ViewStore

if TYPE_CHECKING:
    from taskline.state.cassandra import CassandraStore


class LateView:
    """Connects to Cassandra for the first task that must be looked up, and stays connected."""

    def __init__(self, settings: Settings) -> None:
        """Nothing is imported or connected yet."""
        self._settings = settings
        self._store: ViewStore | None = None
        self._connecting = asyncio.Lock()

    async def read(self, task_id: TaskId) -> StoredTask | None:
        """As `ViewStore.read`.

        Raises:
            Unavailable: Cassandra does not answer, has no view, or its driver is not installed.
        """
        if self._store is None:
            async with self._connecting:
                if self._store is None:
                    self._store = await self._connect()
        return await self._store.read(task_id)

    async def close(self) -> None:
        """Let the connection go, if there is one."""
        close = getattr(self._store, "close", None)
        if close is not None:
            await close()

    async def _connect(self) -> ViewStore:
        try:
            # It takes a second of CPU, in which no handler on the loop may stand still.
            store, driver_error = await asyncio.to_thread(_driver)
        except ImportError as error:
            raise Unavailable(
                f"the view can't be read without its driver: pip install 'taskline[view]' ({error})"
            ) from error
        try:
            return await store.connect(self._settings)
        except (WrongTopology, driver_error) as error:
            raise Unavailable(str(error)) from error


def _driver() -> tuple[type[CassandraStore], type[Exception]]:
    """What most workers never need, since they look nothing up."""
    from cassandra import DriverException  # noqa: PLC0415

    from taskline.state.cassandra import CassandraStore  # noqa: PLC0415

    return CassandraStore, DriverException
