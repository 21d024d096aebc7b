"""The whole of Taskline for the cancel tests: roles as processes, requests with their instants, and the ledger of starts."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from api_process import ApiProcess, eventually, running_api
from cancel_tasks import registry

from taskline import Settings
from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.local.roles import Role

SUPPORT = Path(__file__).parent
# In a worker's log.
_SERVES = b'"event": "serving"'
ENDED = {"completed", "dead", "cancelled", "expired"}
# A client's pool looks at all its connections for each request: with one client for hundreds of requests that wait, the test would be what is slow.
_CLIENTS = 40


class Client:
    """Sends requests, no matter how many are under way; none waits for a connection, which would count as the API's time."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=2)
        self._clients = [
            httpx.AsyncClient(base_url=url, timeout=60, limits=limits, verify=False) for _ in range(_CLIENTS)
        ]
        self._turn = itertools.cycle(self._clients)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            await client.aclose()

    async def get(self, path: str, **params: str) -> dict[str, Any]:
        """The object that is answered."""
        found: dict[str, Any] = (await next(self._turn).get(path, params=params)).json()
        return found

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Send an object."""
        return await next(self._turn).post(path, json=body)

    async def delete(self, path: str, **params: str) -> httpx.Response:
        """Delete it."""
        return await next(self._turn).delete(path, params=params)


@dataclass(kw_only=True)
class Asked:
    """One DELETE, by CLOCK_MONOTONIC, which the handlers' processes share."""

    sent_ns: int
    answered_ns: int
    status: int
    # The problem's type, if it was refused.
    problem: str
    abort: bool


@dataclass(kw_only=True)
class Fired:
    """One task, and what was asked of it."""

    kind: str
    task_id: str
    asked: list[Asked] = field(default_factory=list)
    # Its state once it had ended, and when that was read; empty: it did not end in time.
    end: dict[str, Any] = field(default_factory=dict)
    end_read_ns: int = 0

    @property
    def status(self) -> str | None:
        """In the end."""
        status: str | None = self.end.get("status")
        return status


@dataclass(kw_only=True)
class System:
    """What runs."""

    api: ApiProcess
    workers: list[Role]
    delay: Role
    projector: Role
    ledger: Path
    # How often a worker was killed.
    kills: int = 0

    @property
    def roles(self) -> list[Role]:
        """All but the API."""
        return [*self.workers, self.delay, self.projector]

    def client(self) -> Client:
        """For the API."""
        return Client(self.api.url)

    async def kill(self, worker: Role) -> None:
        """Kill a worker with SIGKILL, and start it again; returns when it serves."""
        served = worker.log.read_bytes().count(_SERVES)

        def step() -> None:
            # Both or none, also if nobody waits for it any more.
            worker.kill()
            worker.start()

        await asyncio.to_thread(step)
        self.kills += 1
        while worker.log.read_bytes().count(_SERVES) == served:
            await asyncio.sleep(0.2)
            worker.check()

    def starts(self) -> dict[str, list[int]]:
        """When handlers began, by task id; ns of CLOCK_MONOTONIC."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for line in self.ledger.read_text().splitlines():
            word, task_id, _, at = line.split()
            if word == "begin":
                found[task_id].append(int(at))
        return found

    def finished(self) -> set[str]:
        """Tasks whose handlers left a line at their end."""
        lines = (line.split() for line in self.ledger.read_text().splitlines())
        return {task_id for word, task_id, *_ in lines if word == "end"}


@contextmanager
def running_system(settings: Settings, scratch: Path) -> Iterator[System]:
    """Two workers, the delay role, the projector and the API, ready; each must leave with 0."""
    ledger = scratch / "ledger"
    ledger.touch()

    def role(name: str, *arguments: str) -> Role:
        return Role(
            arguments,
            settings,
            log=scratch / f"{name}.log",
            cwd=SUPPORT,
            environ={"TEST_LEDGER": str(ledger)},
        )

    workers = [role(f"worker-{number}", "worker", "cancel_tasks:registry") for number in range(2)]
    delay, projector = role("delay", "delay"), role("projector", "projector")
    directory = TypeDirectory(settings)
    try:
        directory.start()
        directory.register(registry.types)
    finally:
        directory.close()
    with ExitStack() as running:
        for each in (*workers, delay, projector):
            running.enter_context(each)
        api = running.enter_context(running_api(settings, scratch))
        eventually(api.ready, "the API is ready")
        system = System(api=api, workers=workers, delay=delay, projector=projector, ledger=ledger)
        asyncio.run(_ready(system))
        yield system
        for each in system.roles:
            each.check()
        assert [each.stop() for each in system.roles] == [0, 0, 0, 0]


async def _ready(system: System) -> None:
    """Return when every role does its part: a task that is delayed has gone all the way, and a child has run."""
    async with system.client() as client:
        tasks = [
            await submit(client, "cancel.once", delay_seconds=0.1),
            *[await submit(client, "cancel.child") for _ in range(8)],
        ]
        await read_ends(client, tasks, 60)
        for role in system.roles:
            role.check()
        assert {task.status for task in tasks} == {"completed"}


async def submit(client: Client, task_type: str, *, kind: str = "", ms: int = 0, **options: Any) -> Fired:
    """Submit a task."""
    body = {"task_type": task_type, "payload": {"ms": ms}} | options
    response = await client.post("/tasks", body)
    assert response.status_code == 201, response.text
    return Fired(kind=kind or task_type, task_id=response.json()["task_id"])


async def cancel(client: Client, task: Fired, *, abort: bool = False) -> Asked:
    """Send one DELETE, and keep what came."""
    sent_ns = time.monotonic_ns()
    response = await client.delete(f"/tasks/{task.task_id}", **({"running": "abort"} if abort else {}))
    answered_ns = time.monotonic_ns()
    problem = "" if response.status_code in (200, 202) else response.json()["type"].rpartition(":")[2]
    asked = Asked(
        sent_ns=sent_ns,
        answered_ns=answered_ns,
        status=response.status_code,
        problem=problem,
        abort=abort,
    )
    task.asked.append(asked)
    return asked


async def until_status(client: Client, task: Fired, status: str, seconds: float = 60.0) -> None:
    """Return when the view says so of the task."""
    deadline = time.monotonic() + seconds
    while (found := (await client.get(f"/tasks/{task.task_id}")).get("status")) != status:
        assert time.monotonic() < deadline, f"{found}, not {status}: {task}"
        await asyncio.sleep(0.05)


async def read_ends(client: Client, tasks: list[Fired], seconds: float) -> None:
    """Read each task's end; whoever has none in time is left without."""
    deadline = time.monotonic() + seconds
    room = asyncio.Semaphore(20)

    async def read(task: Fired) -> None:
        async with room:
            while (left := deadline - time.monotonic()) > 0:
                wait = f"{min(10.0, left):.3f}"
                found = await client.get(f"/tasks/{task.task_id}", wait=wait)
                if found.get("status") in ENDED:
                    task.end, task.end_read_ns = found, time.monotonic_ns()
                    return

    await asyncio.gather(*map(read, tasks))
