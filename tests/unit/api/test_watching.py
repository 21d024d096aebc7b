"""Watching a dependency, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from taskline.api.health import Health
from taskline.api.watching import PROBE_SECONDS, PROBE_TIMEOUT_SECONDS, RETRY_SECONDS, watch
from taskline.errors import Unavailable, WrongTopology


class Dependency:
    """Away until told otherwise; notes when it was asked."""

    def __init__(self) -> None:
        self.connects = 0
        self.probes = 0
        self.failure: Exception | None = Unavailable("away")
        self.silent = False

    async def connect(self) -> Callable[[], Awaitable[None]]:
        self.connects += 1
        if self.failure is not None:
            raise self.failure
        return self.probe

    async def probe(self) -> None:
        self.probes += 1
        if self.silent:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure


def run_virtually(scenario: Callable[[Dependency, Health], Awaitable[None]]) -> None:
    from taskline.testing.loop import VirtualLoop

    dependency, health = Dependency(), Health(["view"])

    async def main() -> None:
        watching = asyncio.ensure_future(watch("view", dependency.connect, health))
        try:
            await scenario(dependency, health)
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def test_what_is_away_is_looked_for_until_it_is_there() -> None:
    async def scenario(dependency: Dependency, health: Health) -> None:
        await asyncio.sleep(10.5 * RETRY_SECONDS)
        assert dependency.connects == 11
        assert health.checks()["view"].detail == "away"
        assert not health.checks()["view"].up
        dependency.failure = None
        await asyncio.sleep(RETRY_SECONDS)
        assert health.checks()["view"].up
        assert health.checks()["view"].detail is None

    run_virtually(scenario)


def test_what_is_there_is_asked_again_and_again() -> None:
    async def scenario(dependency: Dependency, health: Health) -> None:
        dependency.failure = None
        await asyncio.sleep(RETRY_SECONDS + 5.5 * PROBE_SECONDS)
        assert dependency.probes == 6
        dependency.failure = Unavailable("gone")
        await asyncio.sleep(PROBE_SECONDS)
        assert health.checks()["view"].detail == "gone"
        dependency.failure = None
        await asyncio.sleep(PROBE_SECONDS)
        assert health.checks()["view"].up
        assert dependency.connects == 1

    run_virtually(scenario)


def test_silence_counts_as_absence() -> None:
    async def scenario(dependency: Dependency, health: Health) -> None:
        dependency.failure = None
        await asyncio.sleep(1.5 * RETRY_SECONDS)
        dependency.silent = True
        await asyncio.sleep(PROBE_SECONDS + PROBE_TIMEOUT_SECONDS)
        assert not health.checks()["view"].up
        assert "no answer within" in (health.checks()["view"].detail or "")
        dependency.silent = False
        await asyncio.sleep(PROBE_SECONDS)
        assert health.checks()["view"].up

    run_virtually(scenario)


def test_a_probe_that_fails_otherwise_counts_as_absence_too() -> None:
    async def scenario(dependency: Dependency, health: Health) -> None:
        dependency.failure = None
        await asyncio.sleep(1.5 * RETRY_SECONDS)
        dependency.failure = RuntimeError("table dropped")
        await asyncio.sleep(PROBE_SECONDS)
        assert health.checks()["view"].detail == "RuntimeError: table dropped"
        dependency.failure = None
        await asyncio.sleep(PROBE_SECONDS)
        assert health.checks()["view"].up

    run_virtually(scenario)


def test_anything_else_at_the_connection_ends_the_watch() -> None:
    async def connect() -> Callable[[], Awaitable[None]]:
        raise WrongTopology(["topic tasks.high is missing"], "taskline topics create")

    with pytest.raises(WrongTopology):
        asyncio.run(watch("view", connect, Health(["view"])))
