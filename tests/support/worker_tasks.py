"""Handlers for worker processes under test: each run leaves a line in a ledger, also one that is killed later."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass

from taskline.workers import Registry, TaskContext

registry = Registry()


@dataclass(frozen=True)
class Job:
    number: int
    seconds: float = 0.0


def note(word: str, job: Job, ctx: TaskContext) -> None:
    line = f"{word} {job.number} {ctx.attempt} {os.environ['WORKER']}\n".encode()
    # One write of a short line with O_APPEND is never torn or mixed with another process's.
    ledger = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(ledger, line)
    finally:
        os.close(ledger)


@registry.task("test.async")
async def in_loop(job: Job, ctx: TaskContext) -> int:
    note("begin", job, ctx)
    await asyncio.sleep(job.seconds)
    note("end", job, ctx)
    return job.number


@registry.task("test.plain")
def in_thread(job: Job, ctx: TaskContext) -> int:
    note("begin", job, ctx)
    time.sleep(job.seconds)
    note("end", job, ctx)
    return job.number


@registry.task("test.fail", max_retries=0)
async def failing(job: Job, ctx: TaskContext) -> None:
    note("begin", job, ctx)
    raise ValueError(f"number {job.number}")


@registry.task("test.kill")
async def killing(job: Job, ctx: TaskContext) -> None:
    """Takes the process along that it runs in."""
    note("begin", job, ctx)
    await asyncio.sleep(job.seconds)
    os.kill(os.getpid(), signal.SIGKILL)


@registry.task("test.other", queue="other")
async def elsewhere(job: Job) -> None:
    raise AssertionError("another queue's")
