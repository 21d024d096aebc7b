"""Read the tasks back from the view, over the status API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

import httpx

_CONCURRENCY = 16
_TIMEOUT_SECONDS = 30.0
# The states after which a task does not change.
_ENDED = frozenset({"completed", "dead", "cancelled", "expired"})
# Pause between two looks at tasks that are not over yet.
_POLL_SECONDS = 0.25


async def read_until_ended(
    base_url: str, tasks: Mapping[str, UUID], advance: Callable[[], None], *, seconds: float
) -> dict[str, dict[str, Any]]:
    """`GET /tasks/{id}` for every task until all have ended.

    Returns:
        Name → the status document.

    Raises:
        TimeoutError: some task did not end in time; the message names a few.
    """
    ended: dict[str, dict[str, Any]] = {}
    names = iter(tasks)

    async def reader(client: httpx.AsyncClient) -> None:
        # Tasks end roughly in the order of their submission: to wait for one asks little about those behind it.
        for name in names:
            while name not in ended:
                answer = await client.get(f"/tasks/{tasks[name]}")
                if answer.status_code == httpx.codes.OK and answer.json()["status"] in _ENDED:
                    ended[name] = answer.json()
                    advance()
                else:
                    await asyncio.sleep(_POLL_SECONDS)

    try:
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT_SECONDS) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(_CONCURRENCY):
                group.create_task(reader(client))
    except TimeoutError:
        missing = [f"{name} ({tasks[name]})" for name in tasks if name not in ended]
        message = f"{len(missing)} tasks did not end within {seconds:.0f} s: {', '.join(missing[:5])}"
        raise TimeoutError(message) from None
    return ended


async def projection_lags(base_url: str, submit: Callable[[], UUID], *, probes: int) -> list[float]:
    """How long after the handler's end a task reads completed, in seconds, on an idle system; one probe after another."""
    lags = []
    async with httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT_SECONDS) as client:
        for _ in range(probes):
            task_id = await asyncio.to_thread(submit)
            status: dict[str, Any] = {}
            while status.get("status") != "completed":
                answer = await client.get(f"/tasks/{task_id}")
                seen = time.time()
                status = answer.json() if answer.status_code == httpx.codes.OK else {}
            lags.append(max(0.0, seen - datetime.fromisoformat(status["completed_at"]).timestamp()))
    return lags
