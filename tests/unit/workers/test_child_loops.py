"""Coroutines, many at once, on loops in real child processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from child_kit import LOOPS, Children, config, context, exists, kill, run, until

from taskline.errors import InvalidRegistry
from taskline.schemas.events import Priority
from taskline.workers.children_loop import LoopExecutor
from taskline.workers.children_server import ForkServer
from taskline.workers.executor import ChildDied, HandlerAbandoned, HandlerFailed


@pytest.fixture(scope="module", params=LOOPS)
def children(request: pytest.FixtureRequest) -> Iterator[Children]:
    with Children(request.param).open() as made:
        yield made


@asynccontextmanager
async def loops(
    server: ForkServer, size: int = 1, stall_seconds: float = 30, **limits: float
) -> AsyncIterator[LoopExecutor]:
    executor = LoopExecutor(server, size, stall_seconds, **limits)
    try:
        yield executor
    finally:
        pids = executor.pids
        executor.close()
        await until(lambda: not any(map(exists, pids)))


def test_results_payloads_and_contexts_cross(children: Children) -> None:
    ctx = context(attempt=2, priority=Priority.LOW)

    async def scenario() -> None:
        async with loops(children.server) as executor:
            assert await run(executor, "echo.async", {"a": 1}) == b'{"a":1}'
            assert await run(executor, "echo.async", None) is None
            assert await run(executor, "parcel.async", {"name": "box"}) == b'"Parcel box 1"'
            seen = orjson.loads(await run(executor, "who.async", None, ctx) or b"")
            assert seen["pid"] in set(executor.pids) - {os.getpid()}
            assert (seen["task_id"], seen["attempt"], seen["priority"]) == (str(ctx.task_id), 2, "low")

    children.run(scenario())


@pytest.mark.parametrize(
    ("name", "payload", "error_class"),
    [
        ("fail.async", "x", "LookupError"),
        ("strange.async", None, "child_tasks.Strange"),
        ("leave.async", 3, "SystemExit"),
        ("interrupt.async", None, "KeyboardInterrupt"),
        ("no_json.async", None, "taskline.errors.InvalidResult"),
        ("cancels-itself", None, "asyncio.exceptions.CancelledError"),
        ("parcel.async", {"name": 1}, "taskline.errors.InvalidPayload"),
    ],
)
def test_what_a_coroutine_raises_is_its_own_failure(
    children: Children, name: str, payload: Any, error_class: str
) -> None:
    async def scenario() -> None:
        async with loops(children.server) as executor:
            other = asyncio.ensure_future(run(executor, "sleep", 0.1))
            with pytest.raises(HandlerFailed) as raised:
                await run(executor, name, payload)
            assert raised.value.failure.info.error_class == error_class
            assert await other == b'"slept"'
            assert len(executor.pids) == 1

    children.run(scenario())


def test_many_run_at_once_and_each_gets_its_own_result(children: Children) -> None:
    async def scenario() -> None:
        async with loops(children.server) as executor:
            begun = time.monotonic()
            sleepers = [asyncio.ensure_future(run(executor, "sleep", 0.5)) for _ in range(200)]
            assert await asyncio.gather(*(run(executor, "echo.async", n) for n in range(2_000))) == [
                b"%d" % n for n in range(2_000)
            ]
            assert set(await asyncio.gather(*sleepers)) == {b'"slept"'}
            # One after another they would take a hundred seconds.
            assert time.monotonic() - begun < 20

    children.run(scenario())


def test_large_payloads_and_results_pass_beside_each_other(children: Children) -> None:
    async def scenario() -> None:
        async with loops(children.server) as executor:
            texts = [letter * 262_144 for letter in "abcdefgh"]
            found = await asyncio.gather(*(run(executor, "echo.async", text) for text in texts))
            assert found == [f'"{text}"'.encode() for text in texts]

    children.run(scenario())


def test_load_is_spread_over_the_children(children: Children) -> None:
    async def scenario() -> None:
        async with loops(children.server, 2) as executor:
            sleepers = []
            for _ in range(6):
                sleepers.append(asyncio.ensure_future(run(executor, "sleep", 0.3)))
                await asyncio.sleep(0)
            await until(lambda: len(executor.pids) == 2)
            seen = [orjson.loads(await run(executor, "who.async") or b"")["pid"] for _ in range(1)]
            busy = [asyncio.ensure_future(run(executor, "sleep", 0.2)) for _ in range(8)]
            await asyncio.sleep(0)
            loads = sorted(len(link.runs) for link in executor._links)
            assert sum(loads) == 14
            assert loads[1] - loads[0] <= 1
            assert seen[0] in executor.pids
            await asyncio.gather(*sleepers, *busy)

    children.run(scenario())


def test_cancelling_cancels_the_coroutine_and_waits_for_its_end(children: Children, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with loops(children.server) as executor:
            other = asyncio.ensure_future(run(executor, "sleep", 0.5))
            running = asyncio.ensure_future(run(executor, "tidy", str(tmp_path / "note")))
            await run(executor, "echo.async")
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert (tmp_path / "note").read_text() == "tidied up"
            assert await other == b'"slept"'

    children.run(scenario())


def test_a_coroutine_that_returns_although_it_was_cancelled_has_a_result(children: Children) -> None:
    async def scenario() -> None:
        async with loops(children.server) as executor:
            running = asyncio.ensure_future(run(executor, "stubborn"))
            await run(executor, "echo.async")
            running.cancel()
            assert await running == b'"finished all the same"'

    children.run(scenario())


def test_a_soft_limit_can_be_caught(children: Children) -> None:
    async def scenario() -> None:
        async with loops(children.server) as executor:
            assert await run(executor, "soft.async", 30, context(soft_seconds=0.1)) == b'"in time"'
            assert await run(executor, "soft.async", 0.1, context(soft_seconds=20)) == b'"no limit"'
            assert await run(executor, "soft.async", 0.1, context()) == b'"no limit"'
            with pytest.raises(HandlerFailed) as raised:
                await run(executor, "soft.uncaught.async", 30, context(soft_seconds=0.1))
            assert raised.value.failure.info.error_class == "taskline.errors.SoftTimeout"

    children.run(scenario())


@pytest.mark.parametrize(
    ("name", "payload", "cause"),
    [
        ("end.async", 3, "exit status 3"),
        ("segfault.async", None, "signal SIGSEGV"),
        ("babble.async", None, "it sent what can't be read"),
    ],
)
def test_a_coroutine_that_ends_its_child_takes_the_others_along_and_is_not_blamed_for_it(
    children: Children, name: str, payload: Any, cause: str
) -> None:
    async def scenario() -> None:
        async with loops(children.server) as executor:
            others = [asyncio.ensure_future(run(executor, "sleep", 30)) for _ in range(5)]
            await run(executor, "echo.async")
            deaths = await asyncio.gather(run(executor, name, payload), *others, return_exceptions=True)
            assert len(deaths) == 6
            for death in deaths:
                assert isinstance(death, ChildDied)
                assert cause in death.cause
                assert not death.alone
            assert await run(executor, "echo.async", 1) == b"1"
            # The same, with nothing beside it.
            with pytest.raises(ChildDied, match=cause) as raised:
                await run(executor, name, payload)
            assert raised.value.alone

    children.run(scenario())


def test_a_loop_child_that_is_killed_from_outside_is_replaced(children: Children) -> None:
    async def scenario() -> None:
        async with loops(children.server) as executor:
            sleepers = [asyncio.ensure_future(run(executor, "sleep", 30)) for _ in range(3)]
            await run(executor, "echo.async")
            (pid,) = executor.pids
            kill(pid)
            for death in await asyncio.gather(*sleepers, return_exceptions=True):
                assert isinstance(death, ChildDied)
                assert death.cause == "signal SIGKILL"
            assert await run(executor, "echo.async", 1) == b"1"
            assert executor.pids != [pid]

    children.run(scenario())


def test_a_blocked_loop_is_killed_when_it_has_stood_still_for_too_long(children: Children) -> None:
    async def scenario() -> None:
        async with loops(children.server, stall_seconds=0.6) as executor:
            await run(executor, "echo.async")
            sleeper = asyncio.ensure_future(run(executor, "sleep", 30))
            begun = time.monotonic()
            blocked = asyncio.ensure_future(run(executor, "block", 30))
            for each in (blocked, sleeper):
                with pytest.raises(ChildDied, match="event loop was blocked") as raised:
                    await each
                assert not raised.value.alone
            assert 0.5 < time.monotonic() - begun < 10
            assert await run(executor, "echo.async", 1) == b"1"

    children.run(scenario())


def test_a_loop_that_turns_now_and_then_is_left_alone(children: Children) -> None:
    async def scenario() -> None:
        async with loops(children.server, stall_seconds=2) as executor:
            await run(executor, "echo.async")
            (pid,) = executor.pids
            sleeper = asyncio.ensure_future(run(executor, "sleep", 2.5))
            for _ in range(4):
                assert await run(executor, "block", 0.6) == str(pid).encode()
            assert await sleeper == b'"slept"'

    children.run(scenario())


def test_a_cancelled_handler_that_blocks_its_loop_is_killed_sooner(children: Children) -> None:
    async def scenario() -> None:
        async with loops(children.server, cancel_stall_seconds=0.4) as executor:
            await run(executor, "echo.async")
            (pid,) = executor.pids
            blocked = asyncio.ensure_future(run(executor, "block", 30))
            await asyncio.sleep(0.1)
            begun = time.monotonic()
            blocked.cancel()
            with pytest.raises(ChildDied, match="event loop was blocked"):
                await blocked
            assert time.monotonic() - begun < 10
            assert not exists(pid)
            assert await run(executor, "echo.async", 1) == b"1"

    children.run(scenario())


def test_a_worker_that_stood_still_itself_does_not_blame_its_children(children: Children) -> None:
    async def scenario() -> None:
        async with loops(children.server, stall_seconds=0.5) as executor:
            await run(executor, "echo.async")
            sleeper = asyncio.ensure_future(run(executor, "sleep", 2))
            await asyncio.sleep(0.1)
            time.sleep(1.5)  # noqa: ASYNC251 - that is the point
            assert await sleeper == b'"slept"'

    children.run(scenario())


def test_closing_lets_go_of_what_runs_and_leaves_no_process() -> None:
    async def scenario() -> None:
        server = ForkServer(config())
        executor = LoopExecutor(server, 1, 30)
        sleeper = asyncio.ensure_future(run(executor, "sleep", 30))
        await run(executor, "echo.async")
        blocked = asyncio.ensure_future(run(executor, "block", 30))
        await asyncio.sleep(0.1)
        pids = [*executor.pids, server.pid]
        executor.close()
        for each in (sleeper, blocked):
            with pytest.raises(HandlerAbandoned):
                await each
        with pytest.raises(HandlerAbandoned):
            await run(executor, "echo.async")
        await server.close()
        assert not any(exists(pid) for pid in pids if pid is not None)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_closing_while_the_first_child_starts_lets_go_too() -> None:
    async def scenario() -> None:
        server = ForkServer(config())
        executor = LoopExecutor(server, 1, 30)
        runs = [asyncio.ensure_future(run(executor, "echo.async")) for _ in range(3)]
        await asyncio.sleep(0)
        executor.close()
        for each in runs:
            with pytest.raises(HandlerAbandoned):
                await each
        await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_registry_that_children_cannot_import_is_the_reason_given() -> None:
    async def scenario() -> None:
        server = ForkServer(config("no_such_module:registry"))
        executor = LoopExecutor(server, 1, 30)
        with pytest.raises(InvalidRegistry, match="no_such_module"):
            await run(executor, "echo.async")
        executor.close()
        await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))
