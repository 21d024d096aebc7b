"""The real input: the weather of Seattle, 1,461 days of it, from the `vega_datasets` package. A day is an event."""

from __future__ import annotations

import csv
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path


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


def weather_csv() -> Path:
    """The file inside the installed package (which itself would import pandas)."""
    spec = importlib.util.find_spec("vega_datasets")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the example needs its input: pip install 'taskline[examples]'")
    return Path(spec.submodule_search_locations[0]) / "_data" / "seattle-weather.csv"


@cache
def reports() -> tuple[Report, ...]:
    """Every row, in the file's order."""
    with weather_csv().open(encoding="utf-8", newline="") as file:
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
