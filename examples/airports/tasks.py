"""The handler. `taskline worker examples.airports.tasks:registry` runs it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from examples.airports.data import Airport, airports
from taskline import Registry, TaskContext

EARTH_RADIUS_KM = 6_371.0

registry = Registry()


@dataclass(frozen=True, kw_only=True, slots=True)
class Nearest:
    """What the handler returns, and what the status shows as the task's result."""

    iata: str
    # Along the great circle.
    distance_km: float


# Async although it never waits: a millisecond of arithmetic is shorter than the way to a thread and back.
@registry.task("geo.nearest", timeout=30)
async def nearest(airport: Airport, ctx: TaskContext) -> Nearest:
    """Find the other airport that is nearest along the great circle."""
    x, y, z = _unit_vector(airport)
    # On the unit sphere the nearest point is the one with the largest scalar product.
    cosine, iata = max(
        (x * other_x + y * other_y + z * other_z, code)
        for code, other_x, other_y, other_z in _globe()
        if code != airport.iata
    )
    ctx.logger.debug("found", iata=airport.iata, nearest=iata)
    return Nearest(iata=iata, distance_km=EARTH_RADIUS_KM * math.acos(min(1.0, cosine)))


@cache
def _globe() -> tuple[tuple[str, float, float, float], ...]:
    return tuple((airport.iata, *_unit_vector(airport)) for airport in airports())


def _unit_vector(airport: Airport) -> tuple[float, float, float]:
    latitude, longitude = math.radians(airport.latitude), math.radians(airport.longitude)
    return (
        math.cos(latitude) * math.cos(longitude),
        math.cos(latitude) * math.sin(longitude),
        math.sin(latitude),
    )
