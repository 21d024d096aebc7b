"""Handlers that kill, hang and fail: each ends in the dead letters within its budget while all others go on; mended and replayed, they complete."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest
from isolation_tasks import registry

from taskline import Settings, TaskHandle, TaskProducer
from taskline.errors import TaskNotFound
from taskline.infra.local.roles import Role
from taskline.infra.role import SystemClock
from taskline.schemas.confluent import codec_for
from taskline.schemas.ids import TaskId
from taskline.settings import as_environment
from taskline.state.cassandra import CassandraStore
from taskline.state.fold import Outcome, TaskHistory
from taskline.state.reader import StatusReader
from taskline.state.status import TaskStatus

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]

SUPPORT = Path(__file__).parents[1] / "support"
END_SECONDS = 120.0
BYSTANDERS = 60


def test_harm_is_contained_and_what_died_of_it_can_be_replayed(
    topics_created: Settings, view_ready: None, tmp_path: Path
) -> None:
    settings = topics_created
    ledger, mended = tmp_path / "ledger", tmp_path / "mended"
    ledger.touch()
    environ = {"TEST_LEDGER": str(ledger), "TEST_MENDED": str(mended)}
    worker = Role(
        ("worker", "isolation_tasks:registry"),
        settings,
        log=tmp_path / "worker.log",
        cwd=SUPPORT,
        environ=environ,
    )
    delay = Role(("delay",), settings, log=tmp_path / "delay.log", cwd=SUPPORT)
    projector = Role(("projector",), settings, log=tmp_path / "projector.log", cwd=SUPPORT)
    with worker, delay, projector, TaskProducer(settings, registry.catalogue()) as producer:
        harmful = {
            "exit": producer.submit("harm.exit", 3),
            "segfault": producer.submit("harm.segfault", None),
            "hang": producer.submit("harm.hang", None),
            "hoard": producer.submit("harm.hoard", 200),
            "fail": producer.submit("harm.fail", None),
        }
        bystanders: list[TaskHandle] = []
        for number in range(BYSTANDERS):
            if number == BYSTANDERS // 2:
                harmful["among others"] = producer.submit("harm.exit_among_others", None)
            kind = "harm.none_plain" if number % 4 == 0 else "harm.none_async"
            bystanders.append(producer.submit(kind, 0.5 if number % 4 else 0.02))
        ids = [task.task_id for task in (*harmful.values(), *bystanders)]
        told = asyncio.run(histories_when_ended(settings, ids))
        died = {name: told[task.task_id] for name, task in harmful.items()}
        ran = runs(ledger)

        mended.touch()
        replay = subprocess.run(
            [sys.executable, "-m", "taskline", "dlq", "replay", "--all", "--yes"],
            cwd=tmp_path,
            env={**os.environ, **as_environment(settings)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert replay.returncode == 0, replay.stderr
        again = asyncio.run(replays_when_ended(settings, [task.task_id for task in harmful.values()]))
        assert worker.exit_code is None
    assert [role.exit_code for role in (worker, delay, projector)] == [0, 0, 0]

    # What harms nobody has noticed nothing, except that it may have been started once more beside one that does.
    for task in bystanders:
        history = told[task.task_id]
        assert (history.state.status, history.state.attempt) == (TaskStatus.COMPLETED, 1)
        assert history.state.result == b"1"
        assert history.attempts[-1].outcome is Outcome.SUCCEEDED
        assert {row.outcome for row in history.attempts[:-1]} <= {Outcome.CRASHED}
    for name, reason, starts in (
        # It has killed its process in every attempt that it had; of more, three deaths would be enough.
        ("exit", "poison", 2),
        ("segfault", "poison", 3),
        ("hang", "exhausted", 3),
        # Memory that it can't have counts as a death.
        ("hoard", "poison", 3),
        ("fail", "exhausted", 3),
    ):
        state = died[name].state
        assert (name, state.status, state.reason) == (name, TaskStatus.DEAD, reason)
        assert [row.attempt for row in died[name].attempts] == list(range(1, starts + 1))
        assert ran[harmful[name].task_id] == starts
    assert "3" in died["exit"].state.last_error.message
    assert "SEGV" in died["segfault"].state.last_error.message
    assert died["hang"].state.last_error.category == "timeout"
    assert died["hoard"].state.last_error.category == "memory"
    assert died["fail"].state.last_error.message == "attempt 3"
    # The first death took others along, and does not count; the three that follow were its own.
    among = died["among others"]
    assert (among.state.status, among.state.reason) == (TaskStatus.DEAD, "poison")
    assert [row.attempt for row in among.attempts] in ([1, 1, 2, 3], [1, 2, 3])

    for name, task in harmful.items():
        replayed = again[task.task_id]
        assert (name, replayed.state.status, replayed.state.result) == (
            name,
            TaskStatus.COMPLETED,
            b'"alive"',
        )
        assert (replayed.state.replay_of, replayed.state.root_id) == (task.task_id, task.task_id)
    repeated = sum(len(told[task.task_id].attempts) - 1 for task in bystanders)
    print(f"{len(bystanders)} bystanders completed, {repeated} of them started twice; replayed {len(again)}")


def runs(ledger: Path) -> Counter[TaskId]:
    return Counter(TaskId(line.split()[0]) for line in ledger.read_text().splitlines())


async def histories_when_ended(settings: Settings, ids: Iterable[TaskId]) -> dict[TaskId, TaskHistory]:
    async def ended(reader: StatusReader, task_id: TaskId) -> TaskHistory | None:
        history = await history_or_none(reader, task_id)
        return history if history is not None and history.state.status.ended else None

    return await wait_for(settings, ids, ended)


async def replays_when_ended(settings: Settings, dead: Iterable[TaskId]) -> dict[TaskId, TaskHistory]:
    """By the dead one's id: the history of what replays it."""

    async def ended(reader: StatusReader, task_id: TaskId) -> TaskHistory | None:
        history = await history_or_none(reader, task_id)
        if history is None or history.state.replayed_as is None:
            return None
        replay = await history_or_none(reader, history.state.replayed_as)
        return replay if replay is not None and replay.state.status.ended else None

    return await wait_for(settings, dead, ended)


async def wait_for(
    settings: Settings,
    ids: Iterable[TaskId],
    look: Callable[[StatusReader, TaskId], Awaitable[TaskHistory | None]],
) -> dict[TaskId, TaskHistory]:
    store = await CassandraStore.connect(settings)
    impatient = settings.api.model_copy(update={"read_your_writes_seconds": 0.0})
    reader = StatusReader(store, codec_for(settings.schemas), impatient, SystemClock())
    missing, found = list(ids), {}
    deadline = time.monotonic() + END_SECONDS
    try:
        while missing:
            assert time.monotonic() < deadline, f"{len(missing)} not ended: {missing[:3]}"
            for task_id in tuple(missing):
                history = await look(reader, task_id)
                if history is not None:
                    found[task_id] = history
                    missing.remove(task_id)
            await asyncio.sleep(0.2)
    finally:
        await store.close()
    return found


async def history_or_none(reader: StatusReader, task_id: TaskId) -> TaskHistory | None:
    try:
        return await reader.history(task_id, tenant="default")
    except TaskNotFound:
        return None
