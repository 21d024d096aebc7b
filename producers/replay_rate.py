"""A bound on how fast something goes on. Pure: the time is an argument."""

from __future__ import annotations


class TokenBucket:
    """So many a second, evenly; what was missed lately may be made up for (the generic cell rate algorithm)."""

    def __init__(self, rate: float, *, burst_seconds: float, now: float) -> None:
        """Allow `rate` a second from `now` (seconds) on, and make up for at most `burst_seconds` of idleness."""
        if rate <= 0:
            raise ValueError(f"a rate of {rate} a second lets nothing through")
        self._interval = 1.0 / rate
        self._burst = burst_seconds
        # When the next one is due.
        self._due = now

    def reserve(self, now: float) -> float:
        """Take the next place; how many seconds after `now` it is."""
        self._due = max(self._due, now - self._burst)
        wait = max(0.0, self._due - now)
        self._due += self._interval
        return wait
