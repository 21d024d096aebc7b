"""librdkafka's own log lines, each once in a while: while a broker is away it repeats the same few, up to twenty times a second."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

# librdkafka's lines go to this logger, so that they share the format and the level of all others.
KAFKA_LOGGER = "taskline.kafka"

# The same line again only after this long: often enough to see that the trouble lasts.
REPEAT_SECONDS = 30.0
# Different lines that are remembered; a client has a few dozen.
_MAX_REMEMBERED = 1_000
# What differs between repetitions: times, counts, request numbers (digits that are not part of a word or an address).
_NUMBER = re.compile(r"(?<![\w.:/#-])\d+(?:ms\b)?(?![.\w])")


class Repetitions(logging.Filter):
    """Lets a line pass once per `REPEAT_SECONDS`; lines that differ in numbers only count as one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Measure time, in seconds, with `now`."""
        super().__init__()
        self._now = now
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """False: a repetition."""
        key = _NUMBER.sub("#", record.getMessage())
        now = self._now()
        last = self._last.get(key)
        if last is not None and now - last < REPEAT_SECONDS:
            return False
        if len(self._last) >= _MAX_REMEMBERED:
            self._last.clear()
        self._last[key] = now
        return True


def kafka_logger() -> logging.Logger:
    """The logger that clients are given."""
    logger = logging.getLogger(KAFKA_LOGGER)
    if not any(isinstance(each, Repetitions) for each in logger.filters):
        logger.addFilter(Repetitions())
    return logger
