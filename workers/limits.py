"""How many handlers of a task type, or of one key within it, may run at once and how many may begin per second, in this process. Pure.

Invariant: no more than `max_concurrency` are between `enter` and `leave`, and in any span of t seconds at most rate·(t + 1) + 1 enter. What waits for a limit
holds no slot. Limits are a process's own: n workers let n times as much through.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from taskline.workers.dispatch import Gate

# A process remembers the pace of so many keys; of more, those that were quiet for the longest begin anew.
MAX_KEYS: Final = 10_000
FOREVER: Final = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeLimits:
    """The limits of one task type; None: no limit."""

    # Handlers at once.
    max_concurrency: int | None = None
    # Handlers that begin per second; a second's worth may begin at once.
    rate_per_second: float | None = None
    # The same for each concurrency key.
    max_concurrency_per_key: int | None = None
    rate_per_second_per_key: float | None = None

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ValueError: a limit under which nothing would ever run.
        """
        for name in ("max_concurrency", "max_concurrency_per_key"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} is a whole number from 1, not {value!r}")
        for name in ("rate_per_second", "rate_per_second_per_key"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} is a number above 0, not {value!r}")


UNLIMITED: Final = TypeLimits()


@dataclass(slots=True)
class _Use:
    running: int = 0
    # When the next one would begin if they came evenly (a virtual schedule), in seconds by the caller's clock.
    due: float = -math.inf


class Limits:
    """Counts what runs and when it began; moments are seconds by any clock that does not go back."""

    def __init__(self, own: Mapping[str, TypeLimits]) -> None:
        """`own`: each limited task type's own limits."""
        self._own = dict(own)
        self._now = dict(own)
        self._uses: dict[Gate, _Use] = {}

    def configure(self, overrides: Mapping[str, TypeLimits]) -> None:
        """Put these limits in the place of the types' own; types that are not named have their own again. What runs is counted on."""
        self._now = self._own | dict(overrides)

    def gates(self, task_type: str, key: str | None) -> tuple[Gate, ...]:
        """The gates that a task of this type and concurrency key stands behind, as its limits are now."""
        limits = self._now.get(task_type)
        if limits is None:
            return ()
        gates: tuple[Gate, ...] = (("type", task_type),)
        if key is not None and (limits.max_concurrency_per_key, limits.rate_per_second_per_key) != (
            None,
            None,
        ):
            gates += (("key", task_type, key),)
        return gates

    def known(self) -> list[Gate]:
        """The gates that somebody has entered."""
        return list(self._uses)

    def closed_until(self, gate: Gate, now: float) -> float | None:
        """None: one more may begin. Else when that may be, FOREVER: when one that runs has ended."""
        use = self._uses.get(gate)
        if use is None:
            return None
        most, rate = self._of(gate)
        if most is not None and use.running >= most:
            return FOREVER
        if rate is not None:
            at = use.due - _slack(rate)
            if now < at:
                return at
        return None

    def enter(self, gates: Sequence[Gate], now: float) -> None:
        """One begins."""
        for gate in gates:
            use = self._uses.pop(gate, None) or _Use()
            # The newest last.
            self._uses[gate] = use
            use.running += 1
            rate = self._of(gate)[1]
            if rate is not None:
                use.due = max(use.due, now) + 1 / rate

    def leave(self, gates: Sequence[Gate]) -> None:
        """One that had entered has ended."""
        for gate in gates:
            use = self._uses[gate]
            use.running -= 1
            if use.running == 0 and (use.due == -math.inf or len(self._uses) > MAX_KEYS):
                del self._uses[gate]

    def _of(self, gate: Gate) -> tuple[int | None, float | None]:
        assert isinstance(gate, tuple)  # noqa: S101 - made by `gates`
        limits = self._now.get(gate[1])
        if limits is None:
            return None, None
        if gate[0] == "type":
            return limits.max_concurrency, limits.rate_per_second
        return limits.max_concurrency_per_key, limits.rate_per_second_per_key


def _slack(rate: float) -> float:
    """How far ahead of an even pace one may be: a second's worth."""
    return max(0.0, 1 - 1 / rate)
