"""Handlers of the acceptance tests: each run leaves one line in a ledger file, whatever becomes of the process."""

from __future__ import annotations

import asyncio
import os

from taskline import Registry, TaskContext

registry = Registry()


def note(line: str) -> None:
    """Append a line; O_APPEND makes short writes of several processes whole."""
    ledger = os.open(os.environ["TEST_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(ledger, f"{line}\n".encode())
    finally:
        os.close(ledger)


@registry.task("test.count")
async def count(payload: dict[str, int], ctx: TaskContext) -> int:
    """A few milliseconds of waiting, then an effect."""
    await asyncio.sleep(payload["ms"] / 1000)
    note(f"{ctx.task_id} {ctx.attempt}")
    return payload["n"]
