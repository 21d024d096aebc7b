"""The real input: 3,376 airports from the `vega_datasets` package."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache

from examples.data_sets import data_set
from taskline.schemas.events import Priority

# Far-off states first, the big ones last: a rule that gives every priority some hundreds of tasks.
_HIGH = frozenset({"AK", "HI", "PR", "VI", "GU", "AS", "CQ", "NA"})
_LOW = frozenset({"TX", "CA", "OK", "FL", "OH", "NY", "GA", "MI"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Airport:
    """One row of airports.csv; also the payload of a task."""

    iata: str
    state: str
    # Degrees, north and east positive.
    latitude: float
    longitude: float


@cache
def airports() -> tuple[Airport, ...]:
    """Every row, in the file's order."""
    with data_set("airports.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            Airport(
                iata=row["iata"],
                state=row["state"],
                latitude=float(row["latitude"]),
                longitude=float(row["longitude"]),
            )
            for row in csv.DictReader(file)
        )


def priority_of(airport: Airport) -> Priority:
    """By state."""
    if airport.state in _HIGH:
        return Priority.HIGH
    return Priority.LOW if airport.state in _LOW else Priority.NORMAL
