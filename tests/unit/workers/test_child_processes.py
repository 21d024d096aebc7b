"""Handlers one at a time in real child processes: what comes back, and what becomes of those that die or hang."""

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
from child_tasks import registry

from taskline.errors import InvalidRegistry
from taskline.schemas.events import ErrorCategory, Priority
from taskline.workers.children import ProcessExecutor
from taskline.workers.children_server import ForkServer
from taskline.workers.executor import ChildDied, HandlerAbandoned, HandlerFailed


@pytest.fixture(scope="module", params=LOOPS)
def children(request: pytest.FixtureRequest) -> Iterator[Children]:
    with Children(request.param).open() as made:
        yield made


@asynccontextmanager
async def pool(server: ForkServer, size: int = 2) -> AsyncIterator[ProcessExecutor]:
    executor = ProcessExecutor(server, size)
    try:
        yield executor
    finally:
        pids = executor.pids
        executor.close()
        await until(lambda: not any(map(exists, pids)))


def written(path: Path) -> list[int]:
    """The process numbers that a handler has written down."""
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def wait_until_reaped(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.001)


@pytest.mark.parametrize("suffix", ["", ".async"])
def test_a_result_comes_back_and_the_child_is_another_process(children: Children, suffix: str) -> None:
    ctx = context(attempt=4, priority=Priority.HIGH, traceparent="00-ab-cd-01")

    async def scenario() -> None:
        async with pool(children.server) as executor:
            assert await run(executor, "echo" + suffix, {"a": [1, None]}) == b'{"a":[1,null]}'
            assert await run(executor, "echo" + suffix, None) is None
            seen = orjson.loads(await run(executor, "who" + suffix, None, ctx) or b"")
            assert seen.pop("pid") in set(executor.pids) - {os.getpid()}
            assert seen == {
                "task_id": str(ctx.task_id),
                "attempt": 4,
                "priority": "high",
                "traceparent": "00-ab-cd-01",
            }

    children.run(scenario())


def test_a_typed_handler_gets_an_instance_and_a_payload_that_does_not_fit_fails_the_task(
    children: Children,
) -> None:
    async def scenario() -> None:
        async with pool(children.server) as executor:
            for name in ("parcel", "parcel.async"):
                assert await run(executor, name, {"name": "box", "weight": 3}) == b'"Parcel box 3"'
                with pytest.raises(HandlerFailed, match="weight"):
                    await run(executor, name, {"name": "box", "weight": "heavy"})
            assert len(executor.pids) == 1

    children.run(scenario())


@pytest.mark.parametrize("suffix", ["", ".async"])
@pytest.mark.parametrize(
    ("name", "payload", "error_class", "message"),
    [
        ("fail", "no such thing", "LookupError", "no such thing"),
        ("strange", None, "child_tasks.Strange", "very strange"),
        ("leave", 3, "SystemExit", "3"),
        ("interrupt", None, "KeyboardInterrupt", ""),
        ("no_json", None, "taskline.errors.InvalidResult", "the result at '/' a object where a JSON value belongs"),
        ("large", 1_000_000, "taskline.errors.InvalidResult", "the result has 1000002 bytes as JSON; the limit is 1000000 (worker.max_result_bytes)"),
    ],
)  # fmt: skip
def test_what_a_handler_raises_is_the_tasks_failure_not_the_childs(
    children: Children, name: str, suffix: str, payload: Any, error_class: str, message: str
) -> None:
    async def scenario() -> None:
        async with pool(children.server) as executor:
            with pytest.raises(HandlerFailed) as raised:
                await run(executor, name + suffix, payload)
            info = raised.value.failure.info
            assert (info.error_class, info.message) == (error_class, message)
            if error_class.endswith("InvalidResult"):
                assert raised.value.failure.category is ErrorCategory.PERMANENT
            else:
                assert info.traceback is not None
                first = info.traceback.splitlines()[1]
                assert "child_tasks.py" in first
            before = executor.pids
            assert await run(executor, "echo" + suffix, 1) == b"1"
            assert executor.pids == before

    children.run(scenario())


@pytest.mark.parametrize("suffix", ["", ".async"])
@pytest.mark.parametrize(
    ("name", "payload", "cause"),
    [
        ("end", 3, "exit status 3"),
        ("end", 0, "exit status 0"),
        ("segfault", None, "signal SIGSEGV"),
        ("babble", None, "it sent what can't be read"),
    ],
)
def test_a_handler_that_ends_its_child_is_to_blame_alone_and_the_pool_goes_on(
    children: Children, name: str, suffix: str, payload: Any, cause: str
) -> None:
    async def scenario() -> None:
        async with pool(children.server) as executor:
            other = asyncio.ensure_future(run(executor, "sleep.plain", 0.2))
            with pytest.raises(ChildDied, match=cause) as raised:
                await run(executor, name + suffix, payload)
            assert raised.value.alone
            assert await run(executor, "echo", 1) == b"1"
            assert int(await other or b"") in executor.pids

    children.run(scenario())


def test_a_child_that_is_killed_while_idle_harms_no_task(children: Children) -> None:
    async def scenario() -> None:
        async with pool(children.server) as executor:
            await run(executor, "echo")
            (pid,) = executor.pids
            # Before this loop can have heard of it; its parent reaps it.
            kill(pid)
            wait_until_reaped(pid)
            assert await run(executor, "echo", 1) == b"1"
            assert pid not in executor.pids
            (pid,) = executor.pids
            kill(pid)
            await until(lambda: not executor.pids)
            assert await run(executor, "echo", 1) == b"1"

    children.run(scenario())


def test_a_child_that_is_killed_while_busy_takes_only_its_own_task(
    children: Children, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with pool(children.server) as executor:
            hanging = asyncio.ensure_future(run(executor, "hang", str(tmp_path / "pid")))
            other = asyncio.ensure_future(run(executor, "sleep.plain", 0.3))
            await until((tmp_path / "pid").exists)
            kill(await _number(tmp_path / "pid"))
            with pytest.raises(ChildDied, match="signal SIGKILL") as raised:
                await hanging
            assert raised.value.alone
            await other

    children.run(scenario())


async def _number(path: Path) -> int:
    await until(lambda: written(path))
    return written(path)[0]


def test_a_hanging_handler_is_killed_when_it_is_cancelled_and_the_others_go_on(
    children: Children, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with pool(children.server) as executor:
            hanging = asyncio.ensure_future(run(executor, "hang", str(tmp_path / "pid")))
            other = asyncio.ensure_future(run(executor, "sleep.plain", 0.2))
            pid = await _number(tmp_path / "pid")
            hanging.cancel()
            begun = time.monotonic()
            with pytest.raises(asyncio.CancelledError):
                await hanging
            assert time.monotonic() - begun < 1
            assert not exists(pid)
            # Its place is free at once.
            assert await run(executor, "echo", 1) == b"1"
            await other

    children.run(scenario())


def test_a_kill_ends_the_programs_that_the_handler_has_started(children: Children, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pool(children.server) as executor:
            hanging = asyncio.ensure_future(run(executor, "hang.family", str(tmp_path / "pids")))
            await _number(tmp_path / "pids")
            pids = written(tmp_path / "pids")
            assert all(map(exists, pids))
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging
            await until(lambda: not any(map(exists, pids)))

    children.run(scenario())


def test_what_waits_for_a_child_can_be_cancelled(children: Children) -> None:
    async def scenario() -> None:
        async with pool(children.server, 1) as executor:
            first = asyncio.ensure_future(run(executor, "sleep.plain", 0.3))
            second = asyncio.ensure_future(run(executor, "echo", 2))
            third = asyncio.ensure_future(run(executor, "echo", 3))
            await asyncio.sleep(0.1)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            assert await third == b"3"
            assert int(await first or b"") in executor.pids
            assert len(executor.pids) == 1

    children.run(scenario())


@pytest.mark.parametrize("suffix", ["", ".async"])
def test_a_soft_limit_can_be_caught(children: Children, suffix: str) -> None:
    async def scenario() -> None:
        async with pool(children.server) as executor:
            name = "soft" + suffix
            assert await run(executor, name, 30, context(soft_seconds=0.2)) == b'"in time"'
            # Not kept beyond the handler, and not raised in the next.
            assert await run(executor, name, 0.4, context()) == b'"no limit"'
            assert await run(executor, name, 0.1, context(soft_seconds=20)) == b'"no limit"'
            assert await run(executor, name, 30, context(soft_seconds=-1)) == b'"in time"'
            assert len(executor.pids) == 1

    children.run(scenario())


@pytest.mark.parametrize("suffix", ["", ".async"])
def test_a_soft_limit_that_is_not_caught_fails_the_task(children: Children, suffix: str) -> None:
    async def scenario() -> None:
        async with pool(children.server) as executor:
            with pytest.raises(HandlerFailed) as raised:
                await run(executor, "soft.uncaught" + suffix, 30, context(soft_seconds=0.1))
            info = raised.value.failure.info
            assert info.error_class == "taskline.errors.SoftTimeout"
            assert info.traceback is not None
            assert "child_tasks.py" in info.traceback

    children.run(scenario())


def test_two_thousand_tasks_each_get_their_own_result(children: Children) -> None:
    async def scenario() -> None:
        async with pool(children.server, 3) as executor:
            names = ["echo", "echo.async"]
            runs = (run(executor, names[n % 10 == 0], n) for n in range(2_000))
            assert await asyncio.gather(*runs) == [b"%d" % n for n in range(2_000)]
            assert len(executor.pids) == 3

    children.run(scenario())


def test_large_payloads_and_results_pass(children: Children) -> None:
    async def scenario() -> None:
        async with pool(children.server) as executor:
            for size in (100, 65_536, 262_144, 900_000):
                text = "y" * size
                assert await run(executor, "echo", text) == f'"{text}"'.encode()

    children.run(scenario())


def test_a_payload_that_cannot_be_sent_fails_its_task_and_the_child_serves_on(children: Children) -> None:
    async def scenario() -> None:
        async with pool(children.server) as executor:
            await run(executor, "echo")
            before = executor.pids
            with pytest.raises((AttributeError, TypeError)):
                await run(executor, "echo", lambda: None)
            assert await run(executor, "echo", 1) == b"1"
            assert executor.pids == before

    children.run(scenario())


def test_handlers_may_have_processes_of_their_own_which_hear_signals(children: Children) -> None:
    async def scenario() -> None:
        async with pool(children.server) as executor:
            assert await run(executor, "family", 3) == b"[3,3]"
            assert await run(executor, "terminates") == b"-15"

    children.run(scenario())


def test_closing_lets_go_of_what_runs_and_leaves_no_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = ForkServer(config())
        executor = ProcessExecutor(server, 2)
        hanging = asyncio.ensure_future(run(executor, "hang", str(tmp_path / "pid")))
        await run(executor, "echo")
        await _number(tmp_path / "pid")
        pids = [*executor.pids, server.pid]
        assert len(pids) == 3
        executor.close()
        with pytest.raises(HandlerAbandoned):
            await hanging
        with pytest.raises(HandlerAbandoned):
            await run(executor, "echo")
        await server.close()
        assert not any(exists(pid) for pid in pids if pid is not None)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_fork_server_that_dies_is_replaced_and_nobody_is_blamed() -> None:
    async def scenario() -> None:
        server = ForkServer(config())
        executor = ProcessExecutor(server, 2)
        running = asyncio.ensure_future(run(executor, "sleep.plain", 30))
        await run(executor, "echo")
        pids = executor.pids
        assert server.pid is not None
        kill(server.pid)
        with pytest.raises(ChildDied, match="fork server ended: signal SIGKILL") as raised:
            await running
        assert not raised.value.alone
        await until(lambda: not any(map(exists, pids)))
        assert await run(executor, "echo", 1) == b"1"
        executor.close()
        await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_fork_server_says_when_it_has_imported_the_registry_or_never_will() -> None:
    async def scenario() -> None:
        server = ForkServer(config())
        up = server.start()
        assert server.start() is up
        assert not up.done()
        await up
        await server.close()
        up = server.start()
        await server.close()
        assert up.done()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_registry_that_children_cannot_import_is_the_reason_given() -> None:
    async def scenario() -> None:
        server = ForkServer(config("no_such_module:registry"))
        executor = ProcessExecutor(server, 1)
        with pytest.raises(InvalidRegistry, match="no_such_module"):
            await run(executor, "echo")
        executor.close()
        await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_task_that_the_childs_registry_lacks_fails(children: Children) -> None:
    async def scenario() -> None:
        task = type(registry)().task("elsewhere")(lambda payload: None)
        async with pool(children.server) as executor:
            with pytest.raises(HandlerFailed, match="no task 'elsewhere'"):
                await executor.run(task, 1, context())

    children.run(scenario())
