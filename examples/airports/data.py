"""The real input: 3,376 airports from the `vega_datasets` package."""

from __future__ import annotations

import csv
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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


def airports_csv() -> Path:
    """The file inside the installed package (which itself would import pandas)."""
    spec = importlib.util.find_spec("vega_datasets")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the example needs its input: pip install 'taskline[examples]'")
    return Path(spec.submodule_search_locations[0]) / "_data" / "airports.csv"


@cache
def airports() -> tuple[Airport, ...]:
    """Every row, in the file's order."""
    with airports_csv().open(encoding="utf-8", newline="") as file:
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
