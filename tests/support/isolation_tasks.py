"""Handlers that harm the process they run in, and bystanders. Each start leaves a line in a ledger file.

What is broken is mended by a file: the handlers then do as they should.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from pathlib import Path

from taskline import Registry, RetryPolicy, TaskContext

registry = Registry()
# Retried soon, so that the test is short.
SOON = RetryPolicy(base_seconds=0.2, multiplier=1.0, cap_seconds=0.2)


def note(ctx: TaskContext) -> None:
    ledger = os.open(os.environ["TEST_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(ledger, f"{ctx.task_id} {ctx.attempt}\n".encode())
    finally:
        os.close(ledger)


def mended() -> bool:
    return Path(os.environ["TEST_MENDED"]).exists()


@registry.task("harm.exit", retry=SOON, max_retries=1)
def exits(payload: int, ctx: TaskContext) -> str:
    note(ctx)
    if not mended():
        os._exit(payload)
    return "alive"


@registry.task("harm.segfault", retry=SOON, max_retries=9)
def segfaults(payload: None, ctx: TaskContext) -> str:
    note(ctx)
    if not mended():
        ctypes.string_at(0)
    return "alive"


@registry.task("harm.hang", retry=SOON, max_retries=2, timeout=1.0)
def hangs(payload: None, ctx: TaskContext) -> str:
    note(ctx)
    while not mended():
        time.sleep(60)
    return "alive"


@registry.task("harm.hoard", retry=SOON, max_retries=9, memory_mb=64)
def hoards(payload: int, ctx: TaskContext) -> str:
    note(ctx)
    if not mended():
        bytearray(payload * 1024 * 1024)
    return "alive"


@registry.task("harm.exit_among_others", retry=SOON, max_retries=9)
async def exits_among_others(payload: None, ctx: TaskContext) -> str:
    note(ctx)
    # By now its bystanders are beside it.
    await asyncio.sleep(0.3)
    if not mended():
        os._exit(7)
    return "alive"


@registry.task("harm.fail", retry=SOON, max_retries=2)
async def fails(payload: None, ctx: TaskContext) -> str:
    note(ctx)
    if not mended():
        raise LookupError(f"attempt {ctx.attempt}")
    return "alive"


@registry.task("harm.none_async", retry=SOON)
async def bystander(seconds: float, ctx: TaskContext) -> int:
    note(ctx)
    await asyncio.sleep(seconds)
    return ctx.attempt


@registry.task("harm.none_plain", retry=SOON)
def plain_bystander(seconds: float, ctx: TaskContext) -> int:
    note(ctx)
    time.sleep(seconds)
    return ctx.attempt
