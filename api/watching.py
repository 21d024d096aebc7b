"""Keeping an eye on one dependency: connect until it works, then ask it every few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

from taskline.api.health import Health
from taskline.errors import Unavailable

# Between attempts to reach what is away, and between questions to what is there.
RETRY_SECONDS = 1.0
PROBE_SECONDS = 2.0
PROBE_TIMEOUT_SECONDS = 3.0

Probe = Callable[[], Awaitable[None]]


async def watch(name: str, connect: Callable[[], Awaitable[Probe]], health: Health) -> NoReturn:
    """Report a dependency's state for ever.

    Args:
        name: as `health` knows it.
        connect: makes the connection, or raises Unavailable while it is away, and gives the probe to ask it with. Whatever the
            probe raises counts as absence: a process that serves must not end over a question.
        health: where to report.

    Raises:
        Exception: whatever else `connect` raises.
    """
    probe: Probe | None = None
    while probe is None:
        try:
            probe = await connect()
        except Unavailable as error:
            health.report(name, up=False, detail=str(error))
            await asyncio.sleep(RETRY_SECONDS)
    while True:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                await probe()
        except TimeoutError:
            health.report(name, up=False, detail=f"no answer within {PROBE_TIMEOUT_SECONDS:g} seconds")
        except Unavailable as error:
            health.report(name, up=False, detail=str(error))
        except Exception as error:
            health.report(name, up=False, detail=f"{type(error).__name__}: {error}")
        else:
            health.report(name, up=True)
        await asyncio.sleep(PROBE_SECONDS)
