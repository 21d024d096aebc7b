"""The `api` role: the wiring, the app on it, and the server, from start to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path

from taskline.api.app import create_app
from taskline.api.server import bound_socket, serve
from taskline.api.wiring import Wiring
from taskline.settings import Settings


async def run_api(settings: Settings, stop: asyncio.Event, *, announce: Path | None = None) -> None:
    """Serve until `stop` is set; then finish the requests in flight and flush.

    Args:
        settings: of the process.
        stop: set when it shall stop.
        announce: a file that gets the base URL once the port is open.

    Raises:
        WrongTopology: the topics are not as declared.
        InvalidSettings: the address can't be listened on, or Kafka's client refuses its settings.
    """
    # First, since nothing else matters without it.
    listener = bound_socket(settings.api.host, settings.api.port)
    wiring = Wiring(settings)
    try:
        await wiring.first_check()
        watching = asyncio.create_task(wiring.watch(), name="watch")
        serving = asyncio.create_task(
            serve(
                create_app(wiring.deps),
                listener,
                settings.api,
                wiring.deps.health,
                stop,
                announce=announce,
            ),
            name="serve",
        )
        try:
            await asyncio.wait((watching, serving), return_when=asyncio.FIRST_COMPLETED)
            # A watch ends only by failing; the requests in flight are finished all the same.
            stop.set()
            await serving
        finally:
            watching.cancel()
            await asyncio.wait((watching,))
        if not watching.cancelled():
            watching.result()
    finally:
        listener.close()
        await wiring.close()
