"""Half of the airports go in over HTTP, half through the producer library."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any
from uuid import UUID

import httpx

from examples.airports.data import Airport, priority_of
from taskline import Registry, Settings, Submission, TaskHandle, TaskProducer

TASK_TYPE = "geo.nearest"
# Requests in flight; the API answers each when its record is acknowledged.
_HTTP_CONCURRENCY = 32
_HTTP_TIMEOUT_SECONDS = 60.0

# Rows as a careless upstream might send them, each with the field that the API must name.
MALFORMED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"iata": "BAD", "state": "TX", "latitude": "north", "longitude": -97.0}, "/latitude"),
    ({"iata": "BAD", "state": "TX", "latitude": 30.0}, "/longitude"),
    ({"iata": "BAD", "state": "TX", "latitude": 30.0, "longitude": -97.0, "lattitude": 30.0}, "/lattitude"),
    ({"iata": None, "state": "TX", "latitude": 30.0, "longitude": -97.0}, "/iata"),
)


def submit_by_library(
    settings: Settings, registry: Registry, airports: Iterable[Airport], advance: Callable[[], None]
) -> dict[str, UUID]:
    """Pipelined; every handle that comes back is an acknowledged task.

    Returns:
        iata → task id.
    """
    rows = list(airports)
    found: dict[str, UUID] = {}
    with TaskProducer(settings, registry.catalogue()) as producer:
        outcomes = producer.submit_many(
            Submission(task_type=TASK_TYPE, payload=row, priority=priority_of(row)) for row in rows
        )
        for row, outcome in zip(rows, outcomes, strict=True):
            if not isinstance(outcome, TaskHandle):
                raise SystemExit(f"{row.iata} was not accepted: {outcome.error}")
            found[row.iata] = outcome.task_id
            advance()
    return found


async def submit_by_http(
    base_url: str, airports: Sequence[Airport], advance: Callable[[], None]
) -> dict[str, UUID]:
    """`POST /tasks`, some requests at a time.

    Returns:
        iata → task id.
    """
    found: dict[str, UUID] = {}
    rows = iter(airports)

    async def sender(client: httpx.AsyncClient) -> None:
        for row in rows:
            body = {"task_type": TASK_TYPE, "payload": asdict(row), "priority": priority_of(row).value}
            answer = await client.post("/tasks", json=body)
            if answer.status_code != httpx.codes.CREATED:
                raise SystemExit(f"{row.iata} was not accepted: {answer.status_code} {answer.text}")
            found[row.iata] = UUID(answer.json()["task_id"])
            advance()

    async with (
        httpx.AsyncClient(base_url=base_url, timeout=_HTTP_TIMEOUT_SECONDS) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(_HTTP_CONCURRENCY):
            group.create_task(sender(client))
    return found


def knows_task_type(base_url: str) -> bool:
    """Whether the API accepts tasks of the example's type."""
    answer = httpx.get(f"{base_url}/task-types", timeout=_HTTP_TIMEOUT_SECONDS)
    return answer.is_success and any(entry["name"] == TASK_TYPE for entry in answer.json()["task_types"])


def refused_rows(base_url: str) -> list[str]:
    """Send the malformed rows; each must be answered by a 400 that names the field.

    Returns:
        The answers in words.
    """
    said = []
    with httpx.Client(base_url=base_url, timeout=_HTTP_TIMEOUT_SECONDS) as client:
        for payload, pointer in MALFORMED:
            answer = client.post("/tasks", json={"task_type": TASK_TYPE, "payload": payload})
            problem = answer.json()
            if answer.status_code != httpx.codes.BAD_REQUEST or problem.get("pointer") != pointer:
                raise SystemExit(
                    f"{payload} should be refused at {pointer}: {answer.status_code} {answer.text}"
                )
            said.append(f"{answer.status_code} at {pointer}: {problem['detail']}")
    return said
