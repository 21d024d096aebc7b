"""Children that have served enough: replaced in time, never beneath a task."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from child_kit import Children, exists, run, until
from prometheus_client import REGISTRY

from taskline.workers import children_wear
from taskline.workers.children import ProcessExecutor
from taskline.workers.children_loop import LoopExecutor
from taskline.workers.children_server import ForkServer
from taskline.workers.children_wear import WearLimits


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children("uvloop").open() as made:
        yield made


@pytest.fixture
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_wear, "LOOK_SECONDS", 0.0)


@asynccontextmanager
async def pool(server: ForkServer, size: int, **limits: int) -> AsyncIterator[ProcessExecutor]:
    executor = ProcessExecutor(server, size, WearLimits(**limits))
    try:
        yield executor
    finally:
        pids = executor.pids
        executor.close()
        await until(lambda: not any(map(exists, pids)))


@asynccontextmanager
async def loops(server: ForkServer, size: int, **limits: int) -> AsyncIterator[LoopExecutor]:
    executor = LoopExecutor(server, size, 30, limits=WearLimits(**limits))
    try:
        yield executor
    finally:
        pids = executor.pids
        executor.close()
        await until(lambda: not any(map(exists, pids)))


def recycled(reason: str) -> float:
    return REGISTRY.get_sample_value("taskline_worker_children_recycled_total", {"reason": reason}) or 0


async def who(executor: Any, name: str) -> int:
    return orjson.loads(await run(executor, name) or b"")["pid"]


@pytest.mark.parametrize("name", ["who", "who.async"])
def test_a_child_serves_so_many_tasks_and_its_successor_is_there_before(
    children: Children, name: str
) -> None:
    async def scenario() -> None:
        before = recycled("tasks")
        made = (
            loops(children.server, 1, max_tasks=10)
            if name == "who.async"
            else pool(children.server, 1, max_tasks=10)
        )
        async with made as executor:
            (first,) = {await who(executor, name) for _ in range(8)}
            assert executor.pids == [first]
            # The last but one asks for the successor.
            assert await who(executor, name) == first
            await until(lambda: len(executor.pids) == 2)
            (second,) = set(executor.pids) - {first}
            assert exists(first)
            assert await who(executor, name) == first
            assert {await who(executor, name) for _ in range(8)} == {second}
            await until(lambda: not exists(first))
            assert executor.pids == [second]
            assert recycled("tasks") == before + 1

    children.run(scenario())


def test_no_task_waits_for_a_birth_while_children_come_and_go(children: Children) -> None:
    async def scenario() -> None:
        async with pool(children.server, 2, max_tasks=4) as executor:
            await asyncio.gather(run(executor, "sleep.plain", 0.05), run(executor, "sleep.plain", 0.05))
            unborn = []
            order = executor_order = children_wear.ChildLink.order

            def watched(link: Any, *arguments: Any) -> Any:
                unborn.append(not link.ready)
                return order(link, *arguments)

            children_wear.ChildLink.order = watched
            try:
                pids = await asyncio.gather(*(run(executor, "sleep.plain", 0.15) for _ in range(32)))
            finally:
                children_wear.ChildLink.order = executor_order
            assert len(set(pids)) >= 8
            assert max(Counter(pids).values()) <= 4
            # Each is born while the last task of the one before runs; a machine that is busy otherwise may be late.
            assert sum(unborn) <= 2

    children.run(scenario())


@pytest.mark.parametrize("name", ["who", "who.async"])
def test_two_thousand_tasks_get_their_results_from_children_that_serve_fifty_each(
    children: Children, name: str
) -> None:
    async def scenario() -> None:
        limits = {"max_tasks": 50}
        made = (
            loops(children.server, 2, **limits) if name == "who.async" else pool(children.server, 3, **limits)
        )
        async with made as executor:
            served: Counter[int] = Counter()
            most = 0

            async def one() -> None:
                nonlocal most
                served[await who(executor, name)] += 1
                most = max(most, len(executor.pids))

            crowd = asyncio.Semaphore(20)

            async def in_crowd() -> None:
                async with crowd:
                    await one()

            await asyncio.gather(*(in_crowd() for _ in range(2_000)))
            assert served.total() == 2_000
            assert max(served.values()) <= 50
            assert len(served) >= 40
            # Those that serve, as many successors at the most, and what still finishes.
            assert most <= 9
            await until(lambda: len(executor.pids) <= 3)

    children.run(scenario())


def test_one_task_a_child(children: Children) -> None:
    async def scenario() -> None:
        async with pool(children.server, 1, max_tasks=1) as executor:
            assert len({await who(executor, "who") for _ in range(10)}) == 10
        async with loops(children.server, 1, max_tasks=1) as executor:
            assert len(set(await asyncio.gather(*(who(executor, "who.async") for _ in range(10))))) == 10

    children.run(scenario())


def test_what_runs_in_a_spent_child_runs_to_its_end(children: Children) -> None:
    async def scenario() -> None:
        async with loops(children.server, 1, max_tasks=3) as executor:
            long = [asyncio.ensure_future(run(executor, "sleep", 0.6)) for _ in range(2)]
            first = await who(executor, "who.async")
            assert await who(executor, "who.async") != first
            assert exists(first)
            assert [await each for each in long] == [b'"slept"'] * 2
            await until(lambda: not exists(first))

    children.run(scenario())


@pytest.mark.parametrize("name", ["keep", "keep.async"])
def test_a_child_that_has_grown_is_replaced_once_its_successor_is_there(
    children: Children, looks_always: None, name: str
) -> None:
    async def scenario() -> None:
        before = recycled("rss")
        made = (
            loops(children.server, 1, max_rss_mb=150)
            if name == "keep.async"
            else pool(children.server, 1, max_rss_mb=150)
        )
        async with made as executor:
            first = int(await run(executor, name, 20) or b"")
            served = 1
            while int(await run(executor, name, 20) or b"") == first:
                served += 1
                assert served < 20
            # To 150 MB from what it was born with, 20 MB a task, and what it still gets until its successor is there.
            assert served >= 3
            await until(lambda: len(executor.pids) == 1)
            await until(lambda: not exists(first))
            assert recycled("rss") == before + 1

    children.run(scenario())


def test_what_a_task_left_of_the_memory_limit_is_not_taken_out_on_the_next(children: Children) -> None:
    async def scenario() -> None:
        before = recycled("memory")
        async with pool(children.server, 1, memory_mb=128) as executor:
            # One whose type may have more than others; looked at each time.
            await run(executor, "echo", 1)
            first = int(await run(executor, "keep.more", 30) or b"")
            assert int(await run(executor, "keep.more", 60) or b"") == first
            assert await who(executor, "who") != first
            assert recycled("memory") == before + 1

    children.run(scenario())


def test_memory_is_looked_at_once_a_second(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(children_wear, "rss_bytes", looks.append)

    async def scenario() -> None:
        async with pool(children.server, 1, max_rss_mb=100) as executor:
            for _ in range(50):
                await run(executor, "echo", 1)
            assert len(looks) == 1

    children.run(scenario())
