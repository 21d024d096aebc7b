"""The handler. `taskline worker examples.webhooks.tasks:registry` runs it.

It says nothing about which errors are worth another attempt: that a 500 is, that a 429 names the time and that a 400 is not is what
Taskline reads from the exception of `raise_for_status`. Only what HTTP can't say is said here: `Retry` and `Permanent`.
"""

from __future__ import annotations

import ssl
from dataclasses import asdict, dataclass
from functools import cache

import httpx

from examples.webhooks.data import Report
from taskline import Permanent, Registry, Retry, RetryPolicy, TaskContext

TASK_TYPE = "webhooks.deliver"
# Seconds where a real one has minutes, so that the demo's story takes seconds too.
POLICY = RetryPolicy(base_seconds=0.3, multiplier=2, cap_seconds=3)
MAX_RETRIES = 4
# Of one delivery, however the receiver dawdles.
LIMIT_SECONDS = 20

registry = Registry()


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """Who is told, and what."""

    url: str
    report: Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """The subscriber's answer, and the task's result."""

    status: int
    # It had taken this event in before.
    duplicate: bool


# It waits and never computes: the worker's own loop is the cheapest place for it, and ends it at its limit.
@registry.task(TASK_TYPE, timeout=LIMIT_SECONDS, max_retries=MAX_RETRIES, retry=POLICY, isolation="inline")
async def deliver(delivery: Delivery, ctx: TaskContext) -> Receipt:
    """Tell one subscriber of one day's weather."""
    # No time-out of the client's: the task's own ends it. A connection of its own, since the other side may drop it at any time.
    async with httpx.AsyncClient(verify=_tls(), timeout=None, trust_env=False) as client:
        answer = await client.post(
            delivery.url,
            json=asdict(delivery.report),
            # The same in every attempt and replay, so that the subscriber can tell a repetition.
            headers={"Idempotency-Key": str(ctx.root_id)},
        )
    if answer.status_code == httpx.codes.GONE:
        raise Permanent("the subscriber has cancelled its subscription")
    if answer.status_code == httpx.codes.CONFLICT:
        # A 4xx, and still worth another attempt: the subscriber says when.
        raise Retry(
            after=answer.json()["busy_for_seconds"], reason="the subscriber works on an earlier report"
        )
    answer.raise_for_status()
    return Receipt(status=answer.status_code, duplicate=answer.json()["duplicate"])


@cache
def _tls() -> ssl.SSLContext:
    # Reading the system's certificates takes longer than a delivery.
    return ssl.create_default_context()
