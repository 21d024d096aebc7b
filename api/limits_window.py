"""A sliding window counter's arithmetic, and the header fields that tell of it.

The window is counted in two halves of the same length: what was used in the one before fades out evenly while the present one fills. That is
exact to a few per cent, and costs two numbers however high the limit is (a log of each request's time costs one per request).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Where one limit of one caller stands. Times are seconds from now."""

    length: int
    previous: int
    # Until nothing of the previous window counts any more.
    previous_left: float
    current: int
    # Until nothing of the current window counts any more: up to twice the length.
    current_left: float

    def used(self, after: float = 0.0) -> int:
        """How much counts as used, after a while in which nothing more is."""
        turn = self._turn()
        if after < turn:
            faded = self.previous * max(0.0, self.previous_left - after) / self.length
            # Apart: added up, what is almost a whole one would be rounded to one.
            return math.floor(faded) + self.current
        return math.floor(self.current * max(0.0, self.length - (after - turn)) / self.length)

    def remaining(self, limit: int) -> int:
        """How much is left."""
        return max(0, limit - self.used())

    def wait(self, limit: int, cost: int) -> float:
        """Seconds until `cost`, at most `limit`, fits if nobody else takes it; it fits at every later instant."""
        if self.used() + cost <= limit:
            return 0.0
        turn = self._turn()
        # Strictly less than so much may count, since what counts is rounded down.
        room = limit - cost + 1
        if room > self.current:
            at = self.previous_left - (room - self.current) * self.length / self.previous
            if at < turn:
                return at
            if self.current < room:
                return turn
        return turn + max(0.0, self.length - room * self.length / self.current)

    def after(self, cost: int) -> Window:
        """As it stands once `cost` more is used."""
        return replace(self, current=self.current + cost, current_left=self.current_left or 2.0 * self.length)

    def full_again(self) -> float:
        """Seconds until nothing counts as used."""
        if self.current:
            return self.current_left
        return self.previous_left if self.previous else 0.0

    def _turn(self) -> float:
        """Seconds until the current window becomes the previous one; with none begun, until that one is over."""
        return max(0.0, self.current_left - self.length) if self.current_left else self.previous_left


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """One limit as the `RateLimit` field tells it."""

    policy: str
    remaining: int
    # Within so many seconds no more than `remaining` is sure to be there.
    seconds: int


def whole_seconds(seconds: float) -> int:
    """The least whole number of seconds that is more than so many: a wait that ends at an instant has passed by then."""
    return math.floor(seconds) + 1


def policy_field(policies: Iterable[tuple[str, int, int]]) -> bytes:
    """`RateLimit-Policy` (draft-ietf-httpapi-ratelimit-headers-11) of (name, quota, window in seconds)."""
    return ", ".join(f'"{name}";q={quota};w={window}' for name, quota, window in policies).encode("ascii")


def standing_field(standings: Iterable[Standing]) -> bytes:
    """`RateLimit` of the same draft."""
    return ", ".join(f'"{each.policy}";r={each.remaining};t={each.seconds}' for each in standings).encode(
        "ascii"
    )
