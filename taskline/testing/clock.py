"""The wall clock of a virtual loop."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from taskline.schemas.ids import to_ms

# Where virtual time begins unless a test says otherwise: any fixed instant does, this one is easy to read.
DEFAULT_START = datetime(2030, 1, 1, tzinfo=UTC)
# Loop time is a float, and timers are due a little early (loop.TIMER_RESOLUTION_SECONDS): what lies this close below a
# whole millisecond is that millisecond.
_ROUNDING_MS = 1e-3


class VirtualClock:
    """`Clock` whose time is a start instant plus the loop's time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start: datetime = DEFAULT_START) -> None:
        """Read `loop.time()`; `start` is an aware datetime."""
        self._loop = loop
        self._start_ms = to_ms(start)

    def now_ms(self) -> int:
        """Milliseconds since the epoch, UTC."""
        return self._start_ms + int(self._loop.time() * 1000 + _ROUNDING_MS)
