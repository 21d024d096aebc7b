"""The line between a handler and an event loop that speaks for it: the worker's own, or a loop child's.

Invariants: of what a handler says the newest is sent, at most one at a time and not sooner than the pace allows; after `close` nothing is. What the
handler's thread does is a few assignments and, once per sending, a wake-up of the loop.

A progress event is kept as long as its task and read with it (docs/decisions/0003), so their number must be bounded: the pauses grow with the time
that the execution has taken, and a day of it comes to a few hundred.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable
from typing import Any

import structlog

from taskline.workers.line import Line

log = structlog.get_logger(__name__)

# Of the time since the start: a reader of a task that has run for an hour can wait a minute for news.
GROWTH = 0.02

Send = Callable[[float | None, str | None], "Future[Any] | None"]
# From the seconds since the start to the pause after what is sent then.
Pace = Callable[[float], float]


def pause_seconds(elapsed_seconds: float, least_seconds: float) -> float:
    """How long after a progress event the next one may follow, of an execution that has run for so long."""
    return max(least_seconds, elapsed_seconds * GROWTH)


class LoopLine(Line):
    """Made on the loop; a handler may use it from anywhere."""

    __slots__ = (
        "_begun",
        "_due",
        "_latest",
        "_listener",
        "_loop",
        "_next",
        "_now_ms",
        "_open",
        "_pace",
        "_send",
        "_sent",
        "_stopping",
    )

    def __init__(self, send: Send, *, pace: Pace, now_ms: Callable[[], int]) -> None:
        """Begin an execution's line.

        Args:
            send: takes progress; what it returns resolves when the next may be sent, whatever the pace (None: at once).
            pace: the pauses.
            now_ms: the clock of deadlines.
        """
        self._send = send
        self._pace = pace
        self._now_ms = now_ms
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()
        # When the next one may be sent, by the loop's clock.
        self._next = self._begun
        self._latest: tuple[float | None, str | None] = (None, None)
        # True: the loop has been told that there is something to send.
        self._due = False
        self._sent: Future[Any] | None = None
        self._open = True
        self._stopping = False
        self._listener: Callable[[], None] | None = None

    @property
    def stopping(self) -> bool:
        """See `Line`."""
        return self._stopping

    def progress(self, fraction: float | None, message: str | None) -> None:
        """See `Line`."""
        # In this order, and in `_deliver` the other way round: what comes between the two is sent once more, and never missed.
        self._latest = (fraction, message)
        if not self._due and self._open:
            self._due = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                # The loop was closed: the worker has left.
                return

    def heed(self, listener: Callable[[], None]) -> None:
        """See `Line`."""
        self._listener = listener
        if self._stopping:
            listener()

    def now_ms(self) -> int:
        """See `Line`."""
        return self._now_ms()

    # ---- the loop's side ----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask the handler to come to an end."""
        if not self._stopping and self._open:
            self._stopping = True
            if self._listener is not None:
                self._listener()

    def close(self) -> None:
        """The handler has ended, or nobody listens to it any more."""
        self._open = False
        self._listener = None

    def _deliver(self) -> None:
        if not self._open:
            return
        now = self._loop.time()
        pause = self._pace(now - self._begun)
        if self._sent is not None and not self._sent.done():
            # The log may be away: then the newest is sent when it is back, and no heap of them.
            self._loop.call_later(pause, self._deliver)
            return
        if now < self._next:
            self._loop.call_at(self._next, self._deliver)
            return
        self._due = False
        self._next = now + pause
        try:
            self._sent = self._send(*self._latest)
        except Exception as error:
            # E.g. a schema registry that is away.
            log.debug("progress was lost", error=str(error))
