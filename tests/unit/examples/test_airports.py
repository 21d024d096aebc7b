"""The example's own check must be able to fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import asdict

import pytest

pytest.importorskip("numpy")

from examples.airports.data import Airport, airports, priority_of
from examples.airports.tasks import EARTH_RADIUS_KM, nearest
from examples.airports.verify import differences

LINE = tuple(
    Airport(iata=name, state="TX", latitude=0.0, longitude=east)
    for name, east in (("A", 0), ("B", 1), ("C", 3))
)
DEGREE_KM = EARTH_RADIUS_KM * 3.141592653589793 / 180
RIGHT = {
    "A": {"iata": "B", "distance_km": DEGREE_KM},
    "B": {"iata": "A", "distance_km": DEGREE_KM},
    "C": {"iata": "B", "distance_km": 2 * DEGREE_KM},
}


def test_right_results_pass() -> None:
    assert differences(LINE, RIGHT) == []


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {"iata": "C", "distance_km": 0.0},
        {"iata": "nowhere", "distance_km": 1.0},
        {"iata": "A", "distance_km": 3 * DEGREE_KM},
        {"iata": "B", "distance_km": 2.001 * DEGREE_KM},
    ],
    ids=["missing", "itself", "unknown", "not the nearest", "wrong distance"],
)
def test_a_wrong_result_is_named(wrong: dict[str, object] | None) -> None:
    assert [line.split(":")[0] for line in differences(LINE, RIGHT | {"C": wrong})] == ["C"]


def test_the_input_is_whole_and_uses_every_priority() -> None:
    rows = airports()
    assert len({row.iata for row in rows}) == len(rows) == 3_376
    assert min(Counter(priority_of(row) for row in rows).values()) > 100


def test_the_handler_agrees_with_the_direct_computation(registry_context: object) -> None:
    rows = airports()
    sample = rows[::250]
    results = {row.iata: asdict(asyncio.run(nearest(row, registry_context))) for row in sample}
    wrong = [line for line in differences(rows, results) if line.split(":")[0] in results]
    assert wrong == []


@pytest.fixture
def registry_context() -> object:
    class Context:
        class logger:  # noqa: N801 - stands for the context's logger
            @staticmethod
            def debug(event: str, **fields: object) -> None: ...

    return Context()
