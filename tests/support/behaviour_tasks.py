"""Handlers of the behaviour suite, the same in memory and in real worker processes.

Each handler that matters to a count leaves lines in a ledger file: what a handler did is in the world, whatever becomes of its
process. `submitted` is what submitters knew at first, `registry` what the workers run: it lacks a type, and has a newer version of
another.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

from taskline import Permanent, Registry, Retry, RetryPolicy, TaskContext, task

LEDGER_VARIABLE = "TEST_LEDGER"
RETRY = RetryPolicy(base_seconds=0.4, multiplier=2.0, cap_seconds=5.0)


def note(what: str, ctx: TaskContext) -> None:
    """Append a line; O_APPEND makes short writes of several processes whole."""
    ledger = os.open(os.environ[LEDGER_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(ledger, f"{what} {ctx.task_id}\n".encode())
    finally:
        os.close(ledger)


@dataclass
class Greeting:
    name: str
    times: int = 1


@task("behave.echo")
async def echo(payload: Any) -> Any:
    return payload


@task("behave.plain")
def plain(payload: dict[str, str]) -> str:
    return payload["text"].upper()


@task("behave.greet")
async def greet(greeting: Greeting, ctx: TaskContext) -> dict[str, Any]:
    return {
        "class": type(greeting).__name__,
        "text": f"hello {greeting.name}" * greeting.times,
        "task_id": str(ctx.task_id),
        "attempt": ctx.attempt,
    }


@task("behave.count")
async def count(payload: int, ctx: TaskContext) -> int:
    note("begin", ctx)
    note("end", ctx)
    return payload


@task("behave.work")
async def work(seconds: float, ctx: TaskContext) -> str:
    note("begin", ctx)
    await asyncio.sleep(seconds)
    note("end", ctx)
    return "worked"


@task("behave.fail", max_retries=0)
async def fail(payload: str) -> None:
    raise LookupError(payload)


@task("behave.fail_plain", max_retries=0)
def fail_plain(payload: str) -> None:
    raise LookupError(payload)


@task("behave.large")
async def large(size: int) -> str:
    return "x" * size


@task("behave.endless", timeout=0.5, max_retries=0)
async def endless(payload: None) -> None:
    await asyncio.Event().wait()


@task("behave.always", retry=RETRY)
async def always(payload: str, ctx: TaskContext) -> None:
    note("begin", ctx)
    raise LookupError(f"{payload}, attempt {ctx.attempt}")


@task("behave.flaky", retry=RETRY)
async def flaky(succeeds_at: int, ctx: TaskContext) -> str:
    if ctx.attempt < succeeds_at:
        raise ConnectionError("not yet")
    return f"attempt {ctx.attempt}"


@task("behave.comes_back", retry=RETRY)
async def comes_back(seconds: float, ctx: TaskContext) -> None:
    if ctx.attempt == 1:
        raise Retry(after=seconds, reason="busy")


@task("behave.permanent", retry=RETRY)
async def permanent(payload: str) -> None:
    raise Permanent(payload)


@task("behave.nobody")
async def nobody(payload: Any) -> None:
    raise AssertionError("no worker of the suite runs this")


def _older() -> Any:
    @dataclass
    class Evolving:
        name: str

    @task("behave.evolves")
    async def evolves(payload: Evolving) -> None:
        raise AssertionError("no worker of the suite runs the older version")

    return evolves


def _newer() -> Any:
    @dataclass
    class Evolving:
        name: str
        greeting: str = "good day"

    @task("behave.evolves")
    async def evolves(payload: Evolving) -> str:
        return f"{payload.greeting}, {payload.name}"

    return evolves


_common = (
    *(echo, plain, greet, count, work, fail, fail_plain, large, endless),
    *(always, flaky, comes_back, permanent),
)
submitted = Registry(*_common, nobody, _older())
registry = Registry(*_common, _newer())
