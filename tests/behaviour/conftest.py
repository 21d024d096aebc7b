"""Every behaviour is written once; `system` runs it in memory and on the real servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from systems import MemorySystem, System


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("memory", id="memory"),
        pytest.param("real", id="real", marks=pytest.mark.servers),
    ],
)
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system for the whole suite: tests look at their own tasks only, and leave both roles running."""
    folder = tmp_path_factory.mktemp("behaviour")
    if request.param == "memory":
        with MemorySystem(folder / "ledger") as made:
            yield made
    else:
        yield from _real(request, folder)


def _real(request: pytest.FixtureRequest, folder: Path) -> Iterator[System]:
    servers, keyspace = request.getfixturevalue("servers"), request.getfixturevalue("keyspace")
    request.getfixturevalue("view_ready")
    from real_system import RealSystem, real_settings

    with RealSystem(real_settings(servers, keyspace), folder) as made:
        yield made
