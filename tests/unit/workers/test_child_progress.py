"""Progress out of real child processes, and the wish to stop into them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from child_kit import LOOPS, Children, context, exists, run, until

from taskline.workers.children import ProcessExecutor
from taskline.workers.children_loop import LoopExecutor
from taskline.workers.context import TaskContext
from taskline.workers.executor import HandlerFailed
from taskline.workers.line import NOWHERE
from taskline.workers.progress import LoopLine

FAR = 60_000
# By the name of the executor: which handlers it can run.
KINDS = {"plain": "", "alone": ".async", "loop": ".async"}


@pytest.fixture(scope="module", params=LOOPS)
def children(request: pytest.FixtureRequest) -> Iterator[Children]:
    with Children(request.param).open() as made:
        yield made


@asynccontextmanager
async def executor_of(children: Children, kind: str) -> AsyncIterator[Any]:
    executor = LoopExecutor(children.server, 1, 30) if kind == "loop" else ProcessExecutor(children.server, 2)
    try:
        yield executor
    finally:
        pids = executor.pids
        executor.close()
        await until(lambda: not any(map(exists, pids)))


class Heard:
    """A line, and what came over it."""

    def __init__(self, soft_seconds: float | None = None) -> None:
        self.all: list[tuple[float | None, str | None]] = []
        self.line = LoopLine(
            lambda fraction, message: self.all.append((fraction, message)),
            pace=lambda _: 0.0,
            now_ms=NOWHERE.now_ms,
        )
        self.ctx: TaskContext = context(
            line=self.line, deadline_ms=NOWHERE.now_ms() + FAR, soft_seconds=soft_seconds
        )


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_handler_says_is_heard(children: Children, kind: str) -> None:
    async def scenario() -> None:
        async with executor_of(children, kind) as executor:
            heard = Heard()
            words = [[0.25, None, 0.3], [0.5, "half", 0.3], [None, "nearly", 0.3]]
            await run(executor, "tells" + KINDS[kind], words, heard.ctx)
            assert heard.all == [(0.25, None), (0.5, "half"), (None, "nearly")]

    children.run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_of_words_in_a_row_the_last_is_heard_while_the_handler_goes_on(children: Children, kind: str) -> None:
    async def scenario() -> None:
        async with executor_of(children, kind) as executor:
            heard = Heard()
            words = [[step / 100, None, 0] for step in range(50)] + [[0.5, "last", 0.5]]
            await run(executor, "tells" + KINDS[kind], words, heard.ctx)
            assert heard.all[-1] == (0.5, "last")
            assert len(heard.all) <= 3

    children.run(scenario())


def test_a_flood_from_many_threads_under_a_soft_limit_breaks_nothing(children: Children) -> None:
    async def scenario() -> None:
        async with executor_of(children, "plain") as executor:
            heard = Heard(soft_seconds=0.35)
            began = time.monotonic()
            said = int(await run(executor, "tells.much", 20, heard.ctx) or b"0")
            assert time.monotonic() - began < 10
            assert said > 100
            assert 1 <= len(heard.all) <= 20 * (time.monotonic() - began)
            # The child is as good as before.
            assert await run(executor, "echo", 7) == b"7"
            assert len(executor.pids) == 1

    children.run(scenario())


def test_a_fork_of_a_handler_has_no_say(children: Children) -> None:
    async def scenario() -> None:
        async with executor_of(children, "plain") as executor:
            heard = Heard()
            await run(executor, "tells.forked", None, heard.ctx)
            assert heard.all == []

    children.run(scenario())


def test_a_wrong_fraction_is_the_handler_s_failure(children: Children) -> None:
    async def scenario() -> None:
        async with executor_of(children, "plain") as executor:
            with pytest.raises(HandlerFailed, match="from 0 to 1") as failed:
                await run(executor, "tells.wrong", 1.5, Heard().ctx)
            assert failed.value.failure.info.error_class == "ValueError"

    children.run(scenario())


@pytest.mark.parametrize(
    ("kind", "handler"),
    [("plain", "heeds"), ("alone", "heeds.async"), ("alone", "waits.to.stop"), ("loop", "waits.to.stop")],
)
@pytest.mark.parametrize("after", [0.0, 0.3])
def test_a_handler_is_asked_to_stop(children: Children, kind: str, handler: str, after: float) -> None:
    async def scenario() -> None:
        async with executor_of(children, kind) as executor:
            # So that a child is there, and has no part in the time.
            await run(executor, "echo.async", 1)
            heard = Heard()
            running = asyncio.ensure_future(run(executor, handler, 20, heard.ctx))
            await asyncio.sleep(after)
            began = time.monotonic()
            heard.line.stop()
            assert orjson.loads(await running or b"") == "stopped"
            assert time.monotonic() - began < 5
            # The next one is not.
            assert orjson.loads(await run(executor, handler, 0.3, Heard().ctx) or b"") == "not asked"

    children.run(scenario())


def test_a_handler_is_asked_that_its_child_has_not_begun_yet(children: Children) -> None:
    async def scenario() -> None:
        async with executor_of(children, "plain") as executor:
            heard = Heard()
            heard.line.stop()
            assert await run(executor, "heeds", 20, heard.ctx) == b'"stopped"'

    children.run(scenario())


@pytest.mark.parametrize("kind", ["plain", "loop"])
def test_a_soft_limit_asks_too(children: Children, kind: str) -> None:
    async def scenario() -> None:
        async with executor_of(children, kind) as executor:
            heard = Heard(soft_seconds=0.0)
            handler = "heeds" if kind == "plain" else "waits.to.stop"
            try:
                said = await run(executor, handler, 20, heard.ctx)
            except HandlerFailed as failed:
                # The error may come before the look.
                assert "SoftTimeout" in failed.failure.info.error_class  # noqa: PT017
            else:
                assert said == b'"stopped"'

    children.run(scenario())


def test_a_hand_back_is_told_as_such(children: Children) -> None:
    async def scenario() -> None:
        async with executor_of(children, "plain") as executor:
            with pytest.raises(HandlerFailed) as failed:
                await run(executor, "hands.back", None)
            assert failed.value.failure.hand_back
            with pytest.raises(HandlerFailed) as failed:
                await run(executor, "fail", "x")
            assert not failed.value.failure.hand_back

    children.run(scenario())
