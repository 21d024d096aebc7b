"""Growing, jittered pauses for what is retried until it works."""

from __future__ import annotations

import random
from collections.abc import Iterator

_GROWTH = 2.0
# Each pause is drawn from this share of its nominal length upwards, so that several processes do not return in step.
_JITTER_FLOOR = 0.5


def pauses(first_seconds: float, longest_seconds: float) -> Iterator[float]:
    """Endless pauses in seconds: doubling from `first_seconds` to `longest_seconds`, each shortened by up to a half."""
    nominal = first_seconds
    while True:
        yield nominal * random.uniform(_JITTER_FLOOR, 1.0)  # noqa: S311 - not a secret
        nominal = min(nominal * _GROWTH, longest_seconds)
