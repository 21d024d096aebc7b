"""Cancels fired over HTTP around pickups, retries and due times while a worker is killed (-9) and the lanes lag: every answer is true.

1,000 tasks; as many as TASKLINE_TEST_CANCELS says, if it is set.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_process import eventually, running_api
from cancel_tasks import registry

from taskline import Settings
from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.local.roles import Role

pytestmark = [pytest.mark.servers, pytest.mark.timeout(400)]

SUPPORT = Path(__file__).parents[1] / "support"
TASKS = int(os.environ.get("TASKLINE_TEST_CANCELS", "1000"))
PER_SECOND = 60
SEED = 7
ABORTS = 10
# Every so many tasks are not cancelled at all: they must run.
SPARED = 10
ENDED = {"completed", "dead", "cancelled", "expired"}
END_SECONDS = 60.0


@dataclass
class Asked:
    """One DELETE."""

    sent_ns: int
    answered_ns: int
    status: int


@dataclass
class Fired:
    """One task, and what was asked of it."""

    kind: str
    task_id: str = ""
    asked: list[Asked] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)


def test_every_answer_to_a_raced_cancel_is_true(
    topics_created: Settings, view_ready: None, tmp_path: Path
) -> None:
    settings = topics_created.model_copy(
        update={
            # A lane that lags for seconds is no reason to call a task unknown.
            "api": topics_created.api.model_copy(update={"read_your_writes_seconds": 10.0}),
            # Few slots, so that tasks also wait for one; and no child processes to wait for.
            "worker": topics_created.worker.model_copy(update={"concurrency": 4, "coroutines": "inline"}),
        }
    )
    ledger = tmp_path / "ledger"
    ledger.touch()
    environ = {"TEST_LEDGER": str(ledger)}
    workers = [
        Role(
            ("worker", "cancel_tasks:registry"),
            settings,
            log=tmp_path / f"worker-{n}.log",
            cwd=SUPPORT,
            environ=environ,
        )
        for n in range(2)
    ]
    delay = Role(("delay",), settings, log=tmp_path / "delay.log", cwd=SUPPORT)
    projector = Role(("projector",), settings, log=tmp_path / "projector.log", cwd=SUPPORT)
    directory = TypeDirectory(settings)
    try:
        directory.start()
        directory.register(registry.types)
    finally:
        directory.close()
    with ExitStack() as running:
        for role in (*workers, delay, projector):
            running.enter_context(role)
        api = running.enter_context(running_api(settings, tmp_path))
        eventually(api.ready, "the API is ready")
        fired, aborted = asyncio.run(race(api.url, workers[0], projector))
        for role in (*workers, delay, projector):
            role.check()
        exits = [role.stop() for role in (*workers, delay, projector)]

    begun = starts(ledger)
    report(fired, begun)
    assert exits == [0, 0, 0, 0]
    for task in fired:
        check(task, begun[task.task_id])
    counts = Counter(asked.status for task in fired for asked in task.asked)
    # It was a race, and nobody won it all.
    assert min(counts[200], counts[409]) > TASKS // 20
    for task in aborted:
        assert task.end["status"] == "cancelled"
        assert "end" not in {
            line.split()[0] for line in ledger.read_text().splitlines() if task.task_id in line
        }


def check(task: Fired, starts_ns: list[int]) -> None:
    """Every answer is true of what happened."""
    status = task.end.get("status")
    assert status in ENDED, f"hangs: {task}"
    granted = [asked for asked in task.asked if asked.status == 200]
    assert {asked.status for asked in task.asked} <= {200, 202, 409}, task
    for asked in granted:
        assert status == "cancelled", task
        late = [at for at in starts_ns if at > asked.answered_ns]
        assert not late, f"started {(late[0] - asked.answered_ns) / 1e6} ms after 200: {task}"
        # Once cancelled, for ever so.
        after = [other for other in task.asked if other.sent_ns > asked.answered_ns]
        assert all(other.status == 200 for other in after), task
    if not granted and status != "cancelled":
        assert starts_ns, f"neither cancelled nor run: {task}"
    if status == "cancelled":
        assert granted or any(asked.status == 202 for asked in task.asked), task


async def race(url: str, victim: Role, projector: Role) -> tuple[list[Fired], list[Fired]]:
    rng = random.Random(SEED)
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        await ready(client)
        aborting = asyncio.ensure_future(abort_some(client))
        faults = asyncio.ensure_future(disturb(victim, projector))
        fates = []
        for number in range(TASKS):
            fates.append(asyncio.ensure_future(fire(client, rng, spared=number % SPARED == 0)))
            await asyncio.sleep(rng.expovariate(PER_SECOND))
        fired = list(await asyncio.gather(*fates))
        aborted = await aborting
        await faults
        await ends(client, [*fired, *aborted])
    return fired, aborted


async def ready(client: httpx.AsyncClient) -> None:
    """Return when every role does its part: a task that is delayed has gone all the way."""
    body = {"task_type": "cancel.once", "payload": {"ms": 0}, "delay_seconds": 0.1}
    task_id = (await client.post("/tasks", json=body)).json()["task_id"]
    deadline = time.monotonic() + END_SECONDS
    while (await client.get(f"/tasks/{task_id}")).json().get("status") != "completed":
        assert time.monotonic() < deadline, "the roles do not start"
        await asyncio.sleep(0.1)


async def abort_some(client: httpx.AsyncClient) -> list[Fired]:
    return [await abort(client) for _ in range(ABORTS)]


async def disturb(victim: Role, projector: Role) -> None:
    """A worker dies in the middle, and the lanes lag once before and once after."""
    whole = TASKS / PER_SECOND
    await asyncio.sleep(whole * 0.2)
    await lag(projector)
    await asyncio.sleep(whole * 0.2)
    await asyncio.to_thread(victim.kill)
    victim.start()
    await asyncio.sleep(whole * 0.2)
    await lag(projector)


async def lag(projector: Role) -> None:
    projector.signal(signal.SIGSTOP)
    await asyncio.sleep(1.5)
    projector.signal(signal.SIGCONT)


async def fire(client: httpx.AsyncClient, rng: random.Random, *, spared: bool) -> Fired:
    """Submit a task, and cancel it once or twice around a moment at which it may start."""
    kind = rng.choice(("once", "twice", "delayed"))
    delay = rng.uniform(0.2, 2.0) if kind == "delayed" else None
    body: dict[str, Any] = {
        "task_type": "cancel.twice" if kind == "twice" else "cancel.once",
        "payload": {"ms": rng.choice((0, 20, 150))},
    }
    if delay is not None:
        body["delay_seconds"] = delay
    # Around the pickup; the retry, which waits 0.2 to 0.6 s; or the time at which it is due.
    moment = {"once": 0.0, "twice": rng.choice((0.0, 0.3)), "delayed": (delay or 0.0) - 0.05}[kind]
    pauses = [max(0.0, rng.gauss(moment, 0.02 + moment / 10))]
    if rng.random() < 0.3:
        pauses.append(rng.uniform(0, 0.3))
    # All that is drawn is drawn before the first wait.
    response = await client.post("/tasks", json=body)
    assert response.status_code == 201, response.text
    task = Fired(kind=kind, task_id=response.json()["task_id"])
    for pause in () if spared else pauses:
        await asyncio.sleep(pause)
        await ask(client, task)
    return task


async def ask(client: httpx.AsyncClient, task: Fired, **query: str) -> None:
    sent_ns = time.time_ns()
    response = await client.delete(f"/tasks/{task.task_id}", params=query)
    task.asked.append(Asked(sent_ns, time.time_ns(), response.status_code))


async def abort(client: httpx.AsyncClient) -> Fired:
    """Submit a task that would run for minutes, and stop it once it runs."""
    response = await client.post("/tasks", json={"task_type": "cancel.long", "payload": {}})
    task = Fired(kind="long", task_id=response.json()["task_id"])
    deadline = time.monotonic() + END_SECONDS
    while (await client.get(f"/tasks/{task.task_id}")).json().get("status") != "running":
        assert time.monotonic() < deadline, f"does not start: {task}"
        await asyncio.sleep(0.05)
    await ask(client, task, running="abort")
    return task


async def ends(client: httpx.AsyncClient, tasks: list[Fired]) -> None:
    """Read each task's end; whoever has none in time is left without."""
    deadline = time.monotonic() + END_SECONDS
    room = asyncio.Semaphore(20)

    async def end(task: Fired) -> None:
        async with room:
            while time.monotonic() < deadline:
                response = await client.get(f"/tasks/{task.task_id}", params={"wait": "10"})
                task.end = response.json()
                if task.end.get("status") in ENDED:
                    return

    await asyncio.gather(*map(end, tasks))
    # Whatever would still start does so within the time that a record may wait.
    await asyncio.sleep(2)


def starts(ledger: Path) -> defaultdict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for line in ledger.read_text().splitlines():
        word, task_id, at = line.split()
        if word == "begin":
            found[task_id].append(int(at))
    return found


def report(fired: list[Fired], begun: dict[str, list[int]]) -> None:
    answers = Counter((task.kind, asked.status) for task in fired for asked in task.asked)
    took = sorted((asked.answered_ns - asked.sent_ns) / 1e6 for task in fired for asked in task.asked)
    close = [
        (asked.sent_ns - at) / 1e6
        for task in fired
        for asked in task.asked
        for at in begun.get(task.task_id, [])
        if abs(asked.sent_ns - at) < 50e6
    ]
    print(
        dict(sorted(answers.items())),
        f"\nended: {dict(Counter(task.end.get('status') for task in fired))}",
        f"\n{len(close)} requests within 50 ms of a start; took ms: p50 {took[len(took) // 2]:.0f},"
        f" p99 {took[int(len(took) * 0.99)]:.0f}, max {took[-1]:.0f}",
    )
