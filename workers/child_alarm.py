"""The soft time limit of a plain function in a child's main thread: SIGALRM raises `SoftTimeout` in it, once.

Invariant: it is raised only between the handler's first line and its last. An alarm that finds the process outside of them, because the
handler has just ended or not quite begun, raises nothing, so that a result is never lost to it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from taskline.workers import child_line, middleware
from taskline.workers.registry import Task
from taskline.workers.soft import soft_timeout

T = TypeVar("T")

# An alarm in the wrong moment comes again: the handler has begun by then, or the alarm was taken back.
_AGAIN_SECONDS = 0.001


class Alarm:
    """The process's only user of SIGALRM; a handler that sets an alarm of its own loses its soft limit."""

    def __init__(self) -> None:
        """Take SIGALRM over; in the main thread."""
        self._armed = False
        # What runs around a handler, and is not the handler; and what must not be cut off.
        self._outside = frozenset({Alarm.call.__code__, Task.call.__code__})
        self._outside |= child_line.FRAMES | middleware.FRAMES
        signal.signal(signal.SIGALRM, self._ring)

    def call(self, function: Callable[[], T], seconds: float) -> T:
        """Call a function that is over before long; after `seconds` SoftTimeout is raised in it."""
        self._armed = True
        try:
            # Zero would mean never.
            signal.setitimer(signal.ITIMER_REAL, max(_AGAIN_SECONDS, seconds))
            return function()
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        if not self._armed:
            return
        if frame is None or frame.f_code in self._outside:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
            return
        self._armed = False
        raise soft_timeout()
