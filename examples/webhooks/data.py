"""The real input: the weather of Seattle, 1,461 days of it, from the `vega_datasets` package. A day is an event."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache

from examples.data_sets import data_set


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One row of seattle-weather.csv; what a subscriber is told."""

    # As in the file: 2012/01/31.
    date: str
    # drizzle, rain, sun, snow or fog.
    weather: str
    # In mm.
    precipitation: float
    # In °C.
    temp_max: float
    temp_min: float
    # In m/s.
    wind: float


@cache
def reports() -> tuple[Report, ...]:
    """Every row, in the file's order."""
    with data_set("seattle-weather.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            Report(
                date=row["date"],
                weather=row["weather"],
                precipitation=float(row["precipitation"]),
                temp_max=float(row["temp_max"]),
                temp_min=float(row["temp_min"]),
                wind=float(row["wind"]),
            )
            for row in csv.DictReader(file)
        )
