"""How many dead letters wait, and since when: looked up in the view by one of the projectors, for the alerts.

Of all processes the one that has partition 0 of the dead-letter topic looks, so that the view is asked once, however many there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import NoReturn, Protocol

import structlog

from taskline.errors import Unavailable
from taskline.infra.role import Clock
from taskline.processors import metrics
from taskline.processors.projection import Partition
from taskline.state.dead_letters import LetterStats

log = structlog.get_logger(__name__)

# An alert about dead letters is for people, who are not faster; a look reads at most some thousand rows.
LOOK_SECONDS = 30.0


class CountsLetters(Protocol):
    """`taskline.state.dead_letters.DeadLetters`."""

    async def stats(self) -> LetterStats:
        """The open letters and the oldest of them."""
        ...


class LetterWatch:
    """Keeps the two gauges."""

    def __init__(self, letters: CountsLetters, dlq_topic: str, *, clock: Clock) -> None:
        """Ask `letters`, in the process that has partition 0 of `dlq_topic`."""
        self._letters = letters
        self._token: Partition = (dlq_topic, 0)
        self._clock = clock

    async def run(self, assigned: Callable[[], Collection[Partition]]) -> NoReturn:
        """Look again and again; `assigned` says what this process has now."""
        while True:
            await self.look(assigned())
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self, assigned: Collection[Partition]) -> None:
        """Bring the gauges up to date; while the view is away they stay as they are."""
        if self._token not in assigned:
            metrics.OPEN_LETTERS.set(0)
            metrics.OLDEST_LETTER_SECONDS.set(0)
            return
        try:
            stats = await self._letters.stats()
        except Unavailable as error:
            log.warning("dead letters were not counted", error=str(error))
        except Exception:
            # A gauge must not end the projector.
            log.exception("dead letters were not counted")
        else:
            oldest = stats.oldest_open_ms
            age_ms = 0 if oldest is None else max(0, self._clock.now_ms() - oldest)
            metrics.OPEN_LETTERS.set(stats.open_letters)
            metrics.OLDEST_LETTER_SECONDS.set(age_ms / 1000)
