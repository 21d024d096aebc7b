"""Waiting for servers that are away, as every role does at its start: for as long as it takes, and not into a stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import structlog

from taskline.errors import Unavailable

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Stopped(Exception):
    """A stop was asked for while a server was waited for; nothing is wrong."""


async def when_available(
    attempt: Callable[[], Awaitable[T]], stop: asyncio.Event, pauses: Iterator[float], *, what: str
) -> T:
    """What `attempt` gives once the server answers. What waiting can't mend (a wrong topology) is not waited out.

    Args:
        attempt: tried again after each Unavailable.
        stop: ends the waiting.
        pauses: seconds between attempts.
        what: for the log.

    Raises:
        Stopped: `stop` was set before.
    """
    while not stop.is_set():
        try:
            return await attempt()
        except Unavailable as error:
            seconds = next(pauses)
            log.warning("waiting for a server", what=what, error=str(error), pause_seconds=seconds)
            await pause(seconds, stop)
    raise Stopped


async def pause(seconds: float, stop: asyncio.Event) -> None:
    """Sleep, but not into a stop."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
