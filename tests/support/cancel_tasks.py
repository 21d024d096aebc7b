"""Handlers of the cancel tests: each start leaves a line in a ledger file, with the instant, before anything else."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from taskline import Permanent, Registry, TaskContext
from taskline.workers.retry import RetryPolicy

registry = Registry()
SOON = RetryPolicy(base_seconds=0.4, multiplier=1.0, cap_seconds=1.0)
# Its retries come 0.5 to 1.5 s later.
LATER = RetryPolicy(base_seconds=1.0, multiplier=1.0, cap_seconds=1.5)


def note(word: str, ctx: TaskContext) -> None:
    """Append a line; O_APPEND makes short writes of several processes whole. The clock is the same in all of them."""
    line = f"{word} {ctx.task_id} {ctx.attempt} {time.monotonic_ns()}\n"
    ledger = os.open(os.environ["TEST_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(ledger, line.encode())
    finally:
        os.close(ledger)


@registry.task("cancel.once", retry=SOON)
async def once(payload: dict[str, Any], ctx: TaskContext) -> None:
    """A few milliseconds."""
    note("begin", ctx)
    await asyncio.sleep(payload["ms"] / 1_000)


@registry.task("cancel.child", retry=SOON)
def in_a_child(payload: dict[str, Any], ctx: TaskContext) -> None:
    """As `once`, in a child process."""
    note("begin", ctx)
    time.sleep(payload["ms"] / 1_000)


@registry.task("cancel.twice", retry=SOON)
async def twice(payload: dict[str, Any], ctx: TaskContext) -> None:
    """Fails at its first attempt."""
    note("begin", ctx)
    if ctx.attempt == 1:
        raise ConnectionError("not this time")


@registry.task("cancel.later", retry=LATER)
async def later(payload: dict[str, Any], ctx: TaskContext) -> None:
    """Runs for so long, and fails at its first attempt."""
    note("begin", ctx)
    if ctx.attempt == 1:
        await asyncio.sleep(payload["ms"] / 1_000)
        raise ConnectionError("not this time")


@registry.task("cancel.never", retry=SOON)
async def never(payload: dict[str, Any], ctx: TaskContext) -> None:
    """Fails for good."""
    note("begin", ctx)
    await asyncio.sleep(payload["ms"] / 1_000)
    raise Permanent("of no use")


@registry.task("cancel.long", retry=SOON)
async def long(payload: dict[str, Any], ctx: TaskContext) -> None:
    """Longer than the test."""
    note("begin", ctx)
    await asyncio.sleep(600)
    note("end", ctx)
