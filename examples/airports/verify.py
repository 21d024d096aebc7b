"""The direct computation that the tasks' results must agree with: haversines over the whole table, by another formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from examples.airports.data import Airport
from examples.airports.tasks import EARTH_RADIUS_KM

# acos near 1 loses digits that haversines keep: some metres at the distance of two neighbouring runways.
TOLERANCE_KM = 0.05


def differences(airports: Sequence[Airport], results: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """What is wrong with `results` (iata → the task's result as read from the view), one line each.

    A result is right when the airport that it names is another one, as near as the nearest, and the distance is the true one.
    """
    index = {airport.iata: row for row, airport in enumerate(airports)}
    latitude = np.radians([airport.latitude for airport in airports])
    longitude = np.radians([airport.longitude for airport in airports])
    wrong = []
    for row, airport in enumerate(airports):
        result = results.get(airport.iata)
        if result is None or result["iata"] not in index or result["iata"] == airport.iata:
            wrong.append(f"{airport.iata}: no usable result: {result}")
            continue
        half = (
            np.sin((latitude - latitude[row]) / 2) ** 2
            + np.cos(latitude[row]) * np.cos(latitude) * np.sin((longitude - longitude[row]) / 2) ** 2
        )
        distances = 2 * EARTH_RADIUS_KM * np.arcsin(np.sqrt(half))
        found = distances[index[result["iata"]]]
        distances[row] = np.inf
        if found - distances.min() > TOLERANCE_KM or abs(found - result["distance_km"]) > TOLERANCE_KM:
            wrong.append(f"{airport.iata}: {result}, but the nearest is {distances.min():.3f} km away")
    return wrong
