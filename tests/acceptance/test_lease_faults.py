"""Leases under faults, on real servers: workers die or fall silent, reports come late and to another replica, a replica is killed.

CI runs a few dozen tasks; TASKLINE_TEST_TASKS=2000 is the whole of it.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from gateway_system import GatewayProcess, GatewaySystem, gateway_settings

from taskline import Submission, TaskHandle
from taskline.schemas.types import TaskType
from taskline.state.fold import Outcome, TaskHistory
from taskline.state.status import TaskStatus

TASKS = int(os.environ.get("TASKLINE_TEST_TASKS", "60"))
LEASE_SECONDS = 2.0
WORKERS = 8
# The lease of one task is extended for so many times its length; with 2,000 tasks that is minutes.
EXTENSIONS_SECONDS = 300.0 if TASKS >= 2_000 else 6.0
# What a worker does about a task.
HONEST, SILENT, DEAD, LATE, FAILS = "honest", "silent", "dead", "late", "fails"
MOST_FATES = 3
FATES = {HONEST: 70, SILENT: 6, DEAD: 6, LATE: 8, FAILS: 10}


@dataclass
class Ledger:
    """What the workers did and were told."""

    lent: Counter[str] = field(default_factory=Counter)
    # Task → the attempts whose completion was answered 200.
    completed: dict[str, list[int]] = field(default_factory=dict)
    # Of late completions: how they were answered.
    late: Counter[int] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    unknown: int = 0


class Crowd:
    """Workers as coroutines, on whichever replica answers."""

    def __init__(self, gateways: list[GatewayProcess], seed: int) -> None:
        self._gateways = gateways
        self._rng = random.Random(seed)
        self.ledger = Ledger()
        self.stop = asyncio.Event()
        self._late: set[asyncio.Task[None]] = set()
        # Whatever the dice say, each is seen.
        self._first = [LATE, LATE, SILENT, DEAD, FAILS]

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            self._client = client
            async with asyncio.TaskGroup() as group:
                for number in range(WORKERS):
                    group.create_task(self._work(number))
            await asyncio.gather(*self._late)

    async def _work(self, number: int) -> None:
        while not self.stop.is_set():
            wanted = {
                "worker_id": f"w{number}",
                "task_types": ["test.work"],
                "batch_size": 4,
                "wait_seconds": 1,
            }
            answer = await self._post(self._any(), "fetch", wanted)
            for task in answer.json()["tasks"] if answer is not None and answer.status_code == 200 else ():
                await self._handle(task)
            if answer is None or answer.status_code != 200:
                await asyncio.sleep(0.2)

    async def _handle(self, task: dict[str, Any]) -> None:
        self.ledger.lent[task["task_id"]] += 1
        if task["attempt"] > MOST_FATES:
            # The last attempts are honest, so that nothing ends as a dead letter.
            fate = HONEST
        elif self._first:
            fate = self._first.pop()
        else:
            fate = self._rng.choices(list(FATES), list(FATES.values()))[0]
        self.ledger.fates[fate] += 1
        if fate == HONEST:
            await self._complete(task)
        elif fate == FAILS:
            await self._report(task, "fail", error_class="Flaky", message="no", retry_after_seconds=0.2)
        elif fate == LATE:
            self._late.add(asyncio.create_task(self._complete_late(task)))
        # SILENT and DEAD: nobody hears of it again.

    async def _complete(self, task: dict[str, Any]) -> None:
        answer = await self._report(task, "complete", result=task["attempt"])
        if answer.status_code == 200:
            self.ledger.completed.setdefault(task["task_id"], []).append(task["attempt"])
        else:
            assert answer.status_code == 409, answer.text

    async def _complete_late(self, task: dict[str, Any]) -> None:
        await asyncio.sleep(LEASE_SECONDS + 6)
        answer = await self._report(task, "complete", result=-1)
        self.ledger.late[answer.status_code] += 1
        if answer.status_code == 200:
            self.ledger.completed.setdefault(task["task_id"], []).append(task["attempt"])

    async def _report(self, task: dict[str, Any], kind: str, **told: Any) -> httpx.Response:
        """Until it is known, on any replica."""
        while True:
            answer = await self._post(
                self._any(), f"{task['task_id']}/{kind}", {"lease_token": task["lease_token"], **told}
            )
            if answer is not None and answer.status_code < 500:
                return answer
            self.ledger.unknown += 1
            await asyncio.sleep(0.2)

    async def _post(self, gateway: GatewayProcess, path: str, body: dict[str, Any]) -> httpx.Response | None:
        try:
            return await self._client.post(f"{gateway.url}/internal/tasks/{path}", json=body)
        except httpx.TransportError:
            return None

    def _any(self) -> GatewayProcess:
        return self._rng.choice(self._gateways)


@pytest.fixture
def system(servers: Any, keyspace: str, tmp_path: Any) -> Iterator[GatewaySystem]:
    from taskline.state.migrations import migrate

    settings = gateway_settings(servers, keyspace, lease_seconds=LEASE_SECONDS, buffer=50)
    migrate(settings)
    with GatewaySystem(settings, tmp_path) as running:
        running.register(
            TaskType(name="test.work", max_retries=8), TaskType(name="test.long", timeout_ms=600_000)
        )
        yield running


@pytest.mark.timeout(240 + 2 * EXTENSIONS_SECONDS + TASKS / 2)
def test_no_task_is_lost_and_no_stale_report_changes_anything(
    system: GatewaySystem, capsys: pytest.CaptureFixture[str]
) -> None:
    gateways = [system.gateway(), system.gateway()]
    long = system.submit("test.long", 1)
    (held,) = gateways[0].fetch("test.long", wait=30)
    keeper = Keeper(gateways, held)
    handles = system.submit_many(Submission(task_type="test.work", payload=number) for number in range(TASKS))
    begun = time.monotonic()
    crowd = Crowd(gateways, seed=TASKS)
    killer = threading.Thread(target=kill_and_restart, args=(gateways[1], TASKS / 100))
    with keeper:
        killer.start()
        asyncio.run(drive(crowd, system, handles))
        killer.join()
        took = time.monotonic() - begun
        time.sleep(max(0.0, EXTENSIONS_SECONDS - took))
    assert keeper.refused == []
    assert gateways[0].report(held, "complete", result="kept").status_code == 200

    histories = system.histories(each.task_id for each in handles)
    ledger = crowd.ledger
    assert [each.state.status for each in histories] == [TaskStatus.COMPLETED] * TASKS
    # Whoever was told 200 is the one whose result stands, and nobody else was.
    assert {str(each.state.task_id): [winner(each).attempt] for each in histories} == ledger.completed
    assert set(ledger.late) <= {200, 409}
    assert ledger.late[409] > 0
    # What ended without an outcome ended by its guard, and nothing else ran twice.
    ends = Counter(row.outcome for each in histories for row in each.attempts)
    assert ends[Outcome.SUCCEEDED] == TASKS
    (only,) = system.history(long.task_id).attempts
    assert only.outcome is Outcome.SUCCEEDED
    with capsys.disabled():
        print(
            f"\n{TASKS} tasks in {took:.0f} s (load {os.getloadavg()[0]:.1f}): attempts by outcome "
            f"{ {kind.value: count for kind, count in ends.items()} }, workers' fates {dict(ledger.fates)}, "
            f"late completions {dict(ledger.late)}, reports repeated {ledger.unknown}; "
            f"one lease of {LEASE_SECONDS:g} s kept for {keeper.seconds:.0f} s by {keeper.extensions} extensions"
        )


def winner(history: TaskHistory) -> Any:
    (row,) = [row for row in history.attempts if row.outcome is Outcome.SUCCEEDED]
    return row


async def drive(crowd: Crowd, system: GatewaySystem, handles: list[TaskHandle]) -> None:
    """Let the crowd work until every task has ended."""
    working = asyncio.create_task(crowd.run())

    def all_ended() -> bool:
        system.await_ended(handles, 60 + TASKS / 4)
        return True

    await asyncio.gather(asyncio.to_thread(all_ended))
    crowd.stop.set()
    await working


def kill_and_restart(gateway: GatewayProcess, after_seconds: float) -> None:
    time.sleep(2 + after_seconds)
    gateway.role.kill()
    time.sleep(1)
    gateway.start()


class Keeper:
    """Extends one lease, on either replica."""

    def __init__(self, gateways: list[GatewayProcess], task: dict[str, Any]) -> None:
        self._gateways = gateways
        self._task = task
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep)
        self.extensions = 0
        self.refused: list[str] = []
        self.seconds = 0.0

    def __enter__(self) -> Keeper:
        self._begun = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.seconds = time.monotonic() - self._begun

    def _keep(self) -> None:
        body = {"lease_token": self._task["lease_token"]}
        with httpx.Client(timeout=10) as client:
            turn = 0
            while not self._over.wait(LEASE_SECONDS / 6):
                turn += 1
                # A replica that is dead answers nothing: then the other.
                for gateway in (self._gateways[turn % 2], self._gateways[(turn + 1) % 2]):
                    try:
                        answer = client.post(
                            f"{gateway.url}/internal/tasks/{self._task['task_id']}/extend", json=body
                        )
                    except httpx.TransportError:
                        continue
                    if answer.status_code == 409:
                        self.refused.append(answer.text)
                        return
                    self.extensions += answer.status_code == 200
                    break
