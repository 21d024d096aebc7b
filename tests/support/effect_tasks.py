"""Handlers of the rolling-restart and zombie tests: each leaves a line in a ledger when it begins and when it ends, with the worker and the instant."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from taskline import Permanent, Registry, RetryPolicy, TaskContext

registry = Registry()
# Retried soon, so that another attempt would be seen.
SOON = RetryPolicy(base_seconds=0.2, multiplier=1.0, cap_seconds=0.2)
# Names the worker to its handlers, wherever they run.
WORKER_VARIABLE = "TEST_WORKER"
# The worker whose handlers do not only take long, but then fail, each in its way.
UNLUCKY = "unlucky"
# While this file is missing, handlers on the unlucky worker do not end.
RELEASE_VARIABLE = "TEST_RELEASE"
_LOOK_SECONDS = 0.02
_LUCKY_SECONDS = 0.1


def note(word: str, ctx: TaskContext) -> None:
    """Append a line; O_APPEND makes short writes of several processes whole. The clock is the same in all of them."""
    line = f"{word} {ctx.task_id} {ctx.attempt} {os.environ[WORKER_VARIABLE]} {time.monotonic_ns()}\n"
    ledger = os.open(os.environ["TEST_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(ledger, line.encode())
    finally:
        os.close(ledger)


def unlucky() -> bool:
    """Whether this is the worker that is to be stopped."""
    return os.environ[WORKER_VARIABLE] == UNLUCKY


def released() -> bool:
    """Whether a handler of the zombie test may end here."""
    return not unlucky() or Path(os.environ[RELEASE_VARIABLE]).exists()


async def pause() -> None:
    """A while; on the unlucky worker, until it is released."""
    await asyncio.sleep(_LUCKY_SECONDS)
    while not released():  # noqa: ASYNC110 - a file says it, in several processes
        await asyncio.sleep(_LOOK_SECONDS)


def pause_in_child() -> None:
    """As `pause`."""
    time.sleep(_LUCKY_SECONDS)
    while not released():
        time.sleep(_LOOK_SECONDS)


@registry.task("effect.inline", isolation="inline")
async def inline(payload: dict[str, Any], ctx: TaskContext) -> str:
    """A coroutine on the worker's own loop."""
    note("begin", ctx)
    await asyncio.sleep(payload["ms"] / 1_000)
    note("end", ctx)
    return os.environ[WORKER_VARIABLE]


@registry.task("effect.loop")
async def loop(payload: dict[str, Any], ctx: TaskContext) -> str:
    """A coroutine on a loop in a child process."""
    note("begin", ctx)
    await asyncio.sleep(payload["ms"] / 1_000)
    note("end", ctx)
    return os.environ[WORKER_VARIABLE]


@registry.task("effect.child")
def child(payload: dict[str, Any], ctx: TaskContext) -> str:
    """A plain function, in a child process of its own."""
    note("begin", ctx)
    time.sleep(payload["ms"] / 1_000)
    note("end", ctx)
    return os.environ[WORKER_VARIABLE]


@registry.task("zombie.inline", isolation="inline", retry=SOON)
async def zombie_inline(payload: None, ctx: TaskContext) -> str:
    note("begin", ctx)
    await pause()
    note("end", ctx)
    return os.environ[WORKER_VARIABLE]


@registry.task("zombie.loop", retry=SOON)
async def zombie_loop(payload: None, ctx: TaskContext) -> str:
    note("begin", ctx)
    await pause()
    note("end", ctx)
    return os.environ[WORKER_VARIABLE]


@registry.task("zombie.child", retry=SOON)
def zombie_child(payload: None, ctx: TaskContext) -> str:
    note("begin", ctx)
    pause_in_child()
    note("end", ctx)
    return os.environ[WORKER_VARIABLE]


@registry.task("zombie.fails_inline", isolation="inline", retry=SOON)
async def fails_inline(payload: None, ctx: TaskContext) -> str:
    """Its failure would be retried."""
    note("begin", ctx)
    await pause()
    if unlucky():
        raise ConnectionError("here it fails")
    note("end", ctx)
    return os.environ[WORKER_VARIABLE]


@registry.task("zombie.fails_child", retry=SOON)
def fails_child(payload: None, ctx: TaskContext) -> str:
    """It has failed in the child before its parent goes on."""
    note("begin", ctx)
    pause_in_child()
    if unlucky():
        raise ConnectionError("here it fails")
    note("end", ctx)
    return os.environ[WORKER_VARIABLE]


@registry.task("zombie.buried", isolation="inline")
async def buried(payload: None, ctx: TaskContext) -> str:
    """Its failure would be a dead letter."""
    note("begin", ctx)
    await pause()
    if unlucky():
        raise Permanent("here it fails for good")
    note("end", ctx)
    return os.environ[WORKER_VARIABLE]
