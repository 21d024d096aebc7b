"""What a handler's context says to the worker and hears of it, wherever the handler runs; here with nobody at the other end.

Invariant: nothing here waits for the worker, and nothing that is lost on the way is an error. Every method may be called from any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from taskline.workers.outcome import head

# A status is read often and progress stands in it, and every one written is kept as long as the task: a sentence, not a log.
MAX_MESSAGE_BYTES = 500
_MS = 1_000


class Line:
    """The line of a context that belongs to no worker, as in a test that makes one itself: it takes everything and never asks to stop."""

    __slots__ = ()

    @property
    def stopping(self) -> bool:
        """Whether the handler is asked to come to an end."""
        return False

    def progress(self, fraction: float | None, message: str | None) -> None:
        """Tell the worker how far the handler is."""

    def heed(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the handler is asked to stop; at once, if it has been."""

    def now_ms(self) -> int:
        """The time by the clock that deadlines are meant by."""
        return round(time.time() * _MS)

    def __reduce__(self) -> str | tuple[Callable[[], Line], tuple[()]]:
        """In another process, or as a copy, it leads nowhere."""
        return (Line, ())


NOWHERE = Line()


def checked(fraction: Any, message: Any) -> tuple[float | None, str | None]:  # noqa: ANN401 - a handler's own values
    """Progress as it is recorded; a long message is cut.

    Raises:
        ValueError: the fraction is not from 0 to 1.
        TypeError: it is no number, or the message is no text.
    """
    if message is not None:
        if not isinstance(message, str):
            raise TypeError(f"progress: the message is text or None, not {type(message).__name__}")
        message = head(message, MAX_MESSAGE_BYTES)
    if fraction is None:
        return None, message
    if isinstance(fraction, str | bytes):
        raise TypeError("progress: the fraction is a number from 0 to 1 or None, not text")
    value = float(fraction)
    if not 0 <= value <= 1:
        raise ValueError(f"progress: the fraction is a number from 0 to 1, not {fraction!r}")
    return value, message
