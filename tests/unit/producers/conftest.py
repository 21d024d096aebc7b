from __future__ import annotations

import pytest

from taskline.errors import UnknownTaskType
from taskline.schemas.events import Priority
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType

PLACE = {
    "type": "record",
    "name": "Place",
    "fields": [{"name": "lat", "type": "double"}, {"name": "lon", "type": "double"}],
}


class Types:
    """The least that a type source can be."""

    def __init__(self, *types: TaskType) -> None:
        self._types = {each.name: each for each in types}

    def get(self, name: str) -> TaskType:
        try:
            return self._types[name]
        except KeyError:
            raise UnknownTaskType(name, self._types) from None


@pytest.fixture
def types() -> Types:
    return Types(
        TaskType(name="any.json"),
        TaskType(
            name="geo.nearest",
            queue="geo",
            schema=PayloadSchema.parse(PLACE),
            priority=Priority.LOW,
            timeout_ms=5_000,
            max_retries=7,
        ),
    )
