"""Both clients behind one face, on the API in memory or on scripted answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from api_kit import Api
from client_kit import Caller, on_api


@pytest.fixture(params=["sync", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api()
    yield made
    made.close()


@pytest.fixture
def make_caller(kind: str) -> Iterator[Callable[[Api], Caller]]:
    made: list[Caller] = []

    def make(api: Api) -> Caller:
        made.append(on_api(kind, api))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def client(api: Api, make_caller: Callable[[Api], Caller]) -> Caller:
    return make_caller(api)
