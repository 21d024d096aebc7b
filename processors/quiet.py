"""Keeps a client that narrates every failed attempt from filling the log while a broker is away."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

# While the broker is away aiokafka says so some hundred times a second, in a handful of different lines.
_INTERVAL_SECONDS = 10.0
_NAMES = ("aiokafka", "faust", "mode")


class Quiet(logging.Filter):
    """Passes each distinct message of the named loggers once in a while, and everything of all others."""

    def __init__(
        self,
        names: tuple[str, ...] = _NAMES,
        interval_seconds: float = _INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Judge loggers of these names and below; messages differ by their templates, not their values."""
        super().__init__()
        self._names = names
        self._interval = interval_seconds
        self._clock = clock
        self._passed: dict[tuple[str, int, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        if record.name.split(".", 1)[0] not in self._names:
            return True
        key = (record.name, record.levelno, str(record.msg))
        now = self._clock()
        last = self._passed.get(key)
        if last is not None and now - last < self._interval:
            return False
        self._passed[key] = now
        return True


def quiet_handlers() -> None:
    """Put the filter on the handlers of the root logger, once logging is configured."""
    quiet = Quiet()
    for handler in logging.getLogger().handlers:
        handler.addFilter(quiet)
