"""The view as a worker reads it: not at all, until a task must be looked up."""

from __future__ import annotations

import asyncio

from taskline.errors import Unavailable, WrongTopology
from taskline.schemas.ids import TaskId
from taskline.settings import Settings
from taskline.state.store import StoredTask, ViewStore


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
            # Most workers never look anything up, and need no driver.
            from cassandra import DriverException  # noqa: PLC0415

            from taskline.state.cassandra import CassandraStore  # noqa: PLC0415
        except ImportError as error:
            raise Unavailable(
                f"the view can't be read without its driver: pip install 'taskline[view]' ({error})"
            ) from error
        try:
            return await CassandraStore.connect(self._settings)
        except (WrongTopology, DriverException) as error:
            raise Unavailable(str(error)) from error
