"""The view of a gateway: where it reads leases and looks up keys, connected when it can be."""

from __future__ import annotations

import asyncio

from cassandra import DriverException

from taskline.api.late import LateKeys
from taskline.api.watching import Probe
from taskline.errors import Unavailable, WrongTopology
from taskline.schemas.ids import TaskId
from taskline.settings import Settings
from taskline.state.cassandra import CassandraStore
from taskline.state.migrations import check_view
from taskline.state.store import StoredTask


class GatewayView:
    """Connects once, and stays connected."""

    def __init__(self, settings: Settings) -> None:
        """Nothing is connected yet."""
        self._settings = settings
        self._store: CassandraStore | None = None
        self.keys = LateKeys()

    async def connect(self) -> Probe:
        """Connect; what it gives asks whether Cassandra still answers.

        Raises:
            Unavailable: Cassandra does not answer, or has no view (that is mended from outside).
        """
        try:
            await asyncio.to_thread(check_view, self._settings)
            self._store = await CassandraStore.connect(self._settings)
        except (WrongTopology, DriverException) as error:
            raise Unavailable(str(error)) from error
        self.keys.source = await self._store.keys()
        return self._store.ping

    async def read(self, task_id: TaskId) -> StoredTask | None:
        """As `ViewStore.read`.

        Raises:
            Unavailable: Cassandra does not answer, or has not since this process started.
        """
        if self._store is None:
            raise Unavailable("Cassandra has not answered since this process started")
        return await self._store.read(task_id)

    async def close(self) -> None:
        """Let the connection go."""
        if self._store is not None:
            await self._store.close()
