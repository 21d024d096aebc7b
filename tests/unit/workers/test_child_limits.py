"""Memory and processor time of handlers in real child processes: who is stopped, who is blamed, and who goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from child_kit import Children, exists, run, until

from taskline.errors import InvalidTaskType
from taskline.schemas.events import ErrorCategory
from taskline.workers import Registry
from taskline.workers.children import ProcessExecutor
from taskline.workers.children_loop import LoopExecutor
from taskline.workers.children_server import ForkServer
from taskline.workers.executor import ChildDied, HandlerFailed
from taskline.workers.outcome import MAX_ERROR_BYTES

LIMIT_MB = 128


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children("uvloop", memory_mb=LIMIT_MB).open() as made:
        yield made


@asynccontextmanager
async def pool(server: ForkServer, size: int = 1) -> AsyncIterator[ProcessExecutor]:
    executor = ProcessExecutor(server, size)
    try:
        yield executor
    finally:
        pids = executor.pids
        executor.close()
        await until(lambda: not any(map(exists, pids)))


@asynccontextmanager
async def loops(server: ForkServer) -> AsyncIterator[LoopExecutor]:
    executor = LoopExecutor(server, 1, 30)
    try:
        yield executor
    finally:
        pids = executor.pids
        executor.close()
        await until(lambda: not any(map(exists, pids)))


def test_a_handler_at_the_limit_gets_a_memory_error_and_its_child_is_replaced(children: Children) -> None:
    async def scenario() -> None:
        async with pool(children.server, 2) as executor:
            assert await run(executor, "hoard", LIMIT_MB - 10) == b"%d" % (LIMIT_MB - 10)
            (pid,) = executor.pids
            other = asyncio.ensure_future(run(executor, "sleep.plain", 0.3))
            with pytest.raises(HandlerFailed) as raised:
                await run(executor, "hoard", LIMIT_MB + 10)
            failure = raised.value.failure
            assert (failure.category, failure.retryable) == (ErrorCategory.MEMORY, True)
            assert failure.info.error_class == "MemoryError"
            assert (
                failure.info.message
                == "out of memory: its child process may have 128 MB more than at its birth"
            )
            assert "child_tasks.py" in (failure.info.traceback or "")
            survivor = int(await other or b"")
            assert await run(executor, "hoard", 10) == b"10"
            # Beside the one that was asleep nobody is left of before.
            assert len({pid, survivor} & set(executor.pids)) == 1
            await until(lambda: len(executor.pids) == 2)

    children.run(scenario())


def test_a_task_types_own_limit_goes_before_the_usual_one_and_holds_for_it_alone(children: Children) -> None:
    async def scenario() -> None:
        async with pool(children.server) as executor:
            assert await run(executor, "hoard.more", 280) == b"280"
            for name, payload, limit in (
                ("hoard", 280, "128 MB"),
                ("hoard.less", 100, "32 MB"),
                ("hoard.more", 320, "300 MB"),
            ):
                with pytest.raises(HandlerFailed, match=limit):
                    await run(executor, name, payload)
            assert await run(executor, "hoard", 100) == b"100"

    children.run(scenario())


def test_what_a_memory_error_says_stays_within_what_can_be_recorded(children: Children) -> None:
    async def scenario() -> None:
        async with pool(children.server) as executor:
            with pytest.raises(HandlerFailed) as raised:
                await run(executor, "hoard.wordy", 10_000)
            info = raised.value.failure.info
            assert info.message.startswith("out of memory: its child process may have 300 MB more")
            assert len(info.message) > 1_000
            assert len(info.error_class) + len(info.message) + len(info.traceback or "") <= MAX_ERROR_BYTES

    children.run(scenario())


def test_a_library_that_dies_of_the_limit_is_a_death(children: Children) -> None:
    async def scenario() -> None:
        async with pool(children.server) as executor:
            with pytest.raises(ChildDied, match="signal SIGABRT") as raised:
                await run(executor, "hoard.c", LIMIT_MB + 10)
            assert raised.value.alone
            assert await run(executor, "echo", 1) == b"1"

    children.run(scenario())


def test_nobody_is_blamed_for_the_memory_of_a_process_that_many_share(children: Children) -> None:
    async def scenario() -> None:
        async with loops(children.server) as executor:
            asleep = asyncio.ensure_future(run(executor, "sleep", 0.5))
            hoarding = asyncio.ensure_future(run(executor, "hoard.async", LIMIT_MB + 10))
            await until(lambda: executor.pids)
            (pid,) = executor.pids
            with pytest.raises(ChildDied, match="out of memory") as raised:
                await hoarding
            assert not raised.value.alone
            # Others go to another child, and what ran beside it runs to its end.
            assert f'"pid":{pid},'.encode() not in (await run(executor, "who.async") or b"")
            assert exists(pid)
            assert await asleep == b'"slept"'
            await until(lambda: not exists(pid))
            assert len(executor.pids) == 1

    children.run(scenario())


@pytest.mark.parametrize("name", ["spin", "spin.async"])
def test_a_handler_that_uses_up_its_processor_time_is_ended_in_any_code(
    children: Children, name: str
) -> None:
    async def scenario() -> None:
        async with pool(children.server, 2) as executor:
            # Counted for each run anew, and only while it computes.
            for _ in range(3):
                assert await run(executor, name, 0.15) == b'"spun"'
            (pid,) = executor.pids
            begun = time.monotonic()
            with pytest.raises(HandlerFailed) as raised:
                await run(executor, name, 2.0)
            assert time.monotonic() - begun < 8
            failure = raised.value.failure
            assert (failure.category, failure.retryable) == (ErrorCategory.TIMEOUT, True)
            assert failure.info.message == "the handler used more than 0.3 s of processor time (cpu_seconds)"
            assert not exists(pid)
            assert await run(executor, "echo", 1) == b"1"

    children.run(scenario())


@pytest.mark.parametrize(
    ("options", "is_async", "said"),
    [
        ({"memory_mb": 64}, True, 'memory_mb needs a child process for the handler alone'),
        ({"cpu_seconds": 1.0, "isolation": "child"}, True, "cpu_seconds needs a child process"),
        ({"cpu_seconds": 1.0, "isolation": "inline"}, True, "cpu_seconds needs a child process"),
        ({"memory_mb": 64, "isolation": "thread"}, False, "memory_mb needs a child process"),
        ({"memory_mb": 0}, False, "memory_mb 0 leaves nothing to run with"),
        ({"memory_mb": 1.5}, False, "memory_mb 1.5 is no whole number"),
        ({"cpu_seconds": -1.0}, False, "cpu_seconds -1.0 leaves nothing to run with"),
        ({"memory_mb": 64, "cpu_seconds": 0.5, "isolation": "alone"}, True, None),
        ({"memory_mb": 64, "cpu_seconds": 0.5}, False, None),
        ({"memory_mb": 64, "isolation": "child"}, False, None),
    ],
)  # fmt: skip
def test_limits_are_for_what_has_a_process_to_itself(options: dict, is_async: bool, said: str | None) -> None:
    async def coroutine(payload: object) -> None: ...

    def function(payload: object) -> None: ...

    handler = coroutine if is_async else function
    if said is None:
        conduct = Registry().task("t", **options)(handler).conduct
        assert (conduct.memory_mb, conduct.cpu_seconds) == (64, options.get("cpu_seconds"))
    else:
        with pytest.raises(InvalidTaskType, match=said):
            Registry().task("t", **options)(handler)
