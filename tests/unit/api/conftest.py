"""The app on dependencies in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from api_kit import Api


@pytest.fixture
def make_api() -> Iterator[Callable[..., Api]]:
    """Make an app with the given settings of the section `api`."""
    made: list[Api] = []

    def make(**settings: object) -> Api:
        made.append(Api(**settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def api(make_api: Callable[..., Api]) -> Api:
    return make_api()
