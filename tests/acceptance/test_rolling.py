"""Workers are restarted one by one under load: asked to leave, they repeat nothing that has finished; killed, only what was in flight.

TASKLINE_TEST_TASKS says how many tasks run in each of the two tests, at least (500), TASKLINE_TEST_RESTART_SECONDS how far the restarts are apart (2). Workers are
harmed for as long as tasks are submitted, so more tasks are more restarts.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from effect_system import (
    SERVES,
    START_SECONDS,
    SUPPORT,
    Group,
    Ledger,
    Line,
    Worker,
    group_of,
    histories,
    own_settings,
)
from effect_tasks import registry

from taskline import Settings, Submission, TaskHandle, TaskProducer
from taskline.infra.intake import Commit
from taskline.infra.local.roles import Role
from taskline.infra.log import Position
from taskline.schemas.ids import TaskId
from taskline.state.fold import Outcome, TaskHistory
from taskline.state.status import TaskStatus

TASKS = int(os.environ.get("TASKLINE_TEST_TASKS", "500"))
RESTART_SECONDS = float(os.environ.get("TASKLINE_TEST_RESTART_SECONDS", "2"))
WORKERS = 4
# At least. Each costs the start of a worker, a kill a session besides.
RESTARTS = 2
KILLS = 1
PER_SECOND = 100
# Shorter than the longest handlers, so that some are handed back.
GRACE_SECONDS = 1.0
# A session, what was in flight run again, and a slow machine.
END_SECONDS = 90.0 + TASKS / PER_SECOND

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300 + TASKS // 10)]


@dataclass(kw_only=True)
class System:
    """What runs, and what was submitted."""

    workers: list[Worker]
    projector: Role
    ledger: Ledger
    group: Group
    tasks: dict[TaskId, Position] = field(default_factory=dict)
    # How many handlers each worker had begun when that was last noted.
    begun: dict[str, int] = field(default_factory=dict)

    def busy(self, worker: Worker) -> bool:
        """Whether a handler has begun on it since its start."""
        return self.ledger.begins(worker.name) > self.begun.get(worker.name, 0)

    def restarted(self, worker: Worker) -> None:
        """What it has begun so far does not make it busy."""
        self.begun[worker.name] = self.ledger.begins(worker.name)

    def check(self) -> None:
        for role in (*self.workers, self.projector):
            role.check()


@pytest.fixture(scope="module")
def settings(servers: Any, keyspace: str) -> Iterator[Settings]:
    with own_settings(servers, keyspace, grace_seconds=GRACE_SECONDS) as settings:
        yield settings


@pytest.fixture(scope="module")
def system(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    scratch = tmp_path_factory.mktemp("rolling")
    ledger = Ledger(scratch / "ledger")
    workers = [Worker(f"worker-{number}", settings, scratch, ledger) for number in range(WORKERS)]
    projector = Role(("projector",), settings, log=scratch / "projector.log", cwd=SUPPORT)
    with ExitStack() as running:
        group = running.enter_context(group_of(settings))
        for role in (*workers, projector):
            running.enter_context(role)
        for worker in workers:
            worker.wait_until(
                lambda worker=worker: worker.times(SERVES) > 0, seconds=START_SECONDS, what="serving"
            )
        yield System(workers=workers, projector=projector, ledger=ledger, group=group)


def test_restarted_workers_repeat_nothing_that_finished(system: System, settings: Settings) -> None:
    def restart(worker: Worker) -> None:
        assert worker.stop() == 0, worker.tail()
        system.restarted(worker)
        worker.serve()

    tasks, restarts = under_load(system, settings, restart, RESTARTS)
    told = histories(settings, tasks, seconds=END_SECONDS)
    lines = system.ledger.lines()
    ran = Counter(outcome_of(lines.get(task_id, ())) for task_id in tasks)
    released = [row for each in told.values() for row in each.attempts if row.outcome is Outcome.RELEASED]
    print(f"{len(tasks)} tasks, {restarts} restarts: {dict(ran)}; {len(released)} executions handed back")
    lost = [task_id for task_id in tasks if not completed(told.get(task_id))]
    assert not lost, (len(lost), told.get(lost[0]), lines.get(lost[0]))
    # Each handler ended once, and what had ended never began again: what began twice was handed back in between.
    assert set(ran) <= {"once", "begun again"}, ran
    for task_id in tasks:
        *before, last = told[task_id].attempts
        assert last.outcome is Outcome.SUCCEEDED
        assert {row.outcome for row in before} <= {Outcome.RELEASED}, told[task_id]
        assert len(begins(lines[task_id])) <= 1 + len(before), lines[task_id]
    # Without hand-backs the test would say nothing of them.
    assert released


def test_killed_workers_repeat_only_what_was_in_flight(system: System, settings: Settings) -> None:
    # Each victim, what the group knew to be done just after its death, and the ledger then.
    deaths: list[tuple[str, Mapping[int, Commit], Mapping[TaskId, list[Line]]]] = []

    def kill(worker: Worker) -> None:
        worker.kill()
        # Until its session is over nobody else commits what was its own.
        deaths.append((worker.name, dict(system.group.look()), system.ledger.lines()))
        system.restarted(worker)
        worker.serve()

    tasks, _ = under_load(system, settings, kill, KILLS)
    in_flight: set[TaskId] = set()
    kills: list[str] = []
    for name, commits, lines in deaths:
        begun = {
            task_id for task_id, told in lines.items() if any(line.worker == name for line in begins(told))
        }
        mine = system.group.undone(((each, system.tasks[each]) for each in begun), commits)
        over = sum(any(line.word == "end" for line in lines[each]) for each in mine)
        in_flight |= mine
        kills.append(f"{name} {len(mine) - over} running + {over} ended and not committed")
    told = histories(settings, tasks, seconds=END_SECONDS)
    lines = system.ledger.lines()
    ran = Counter(outcome_of(lines.get(task_id, ())) for task_id in tasks)
    repeated = {task_id for task_id in tasks if len(begins(lines.get(task_id, ()))) > 1}
    handed_back = {
        task_id
        for task_id in repeated
        if any(row.outcome is Outcome.RELEASED for row in told[task_id].attempts)
    }
    print(
        f"{len(tasks)} tasks, in flight at {len(kills)} kills ({', '.join(kills)}): {dict(ran)};"
        f" {len(repeated)} began again, {len(handed_back)} of them handed back"
    )
    lost = [task_id for task_id in tasks if not completed(told.get(task_id))]
    assert not lost, (len(lost), told.get(lost[0]), lines.get(lost[0]))
    assert set(ran) <= {"once", "begun again", "ended again"}, ran
    assert repeated - handed_back <= in_flight
    assert in_flight


def under_load(
    system: System, settings: Settings, harm: Callable[[Worker], None], least: int
) -> tuple[list[TaskId], int]:
    """Harm one worker after the other while tasks are submitted, at least so many of each.

    Returns:
        The tasks, once all have been run, and how many workers were harmed.
    """
    submitted: list[TaskId] = []
    enough = threading.Event()

    def submit() -> None:
        with TaskProducer(settings, registry.catalogue()) as producer:
            for outcome in producer.submit_many(paced(items(enough))):
                assert isinstance(outcome, TaskHandle), outcome
                system.tasks[outcome.task_id] = outcome.position
                submitted.append(outcome.task_id)

    ended = system.ledger.ended()
    for worker in system.workers:
        system.restarted(worker)
    submitter = threading.Thread(target=submit)
    submitter.start()
    harmed = 0
    try:
        while harmed < least or len(submitted) < TASKS:
            worker = system.workers[harmed % WORKERS]
            due = time.monotonic() + RESTART_SECONDS
            worker.wait_until(lambda worker=worker: system.busy(worker), seconds=END_SECONDS, what="at work")
            harm(worker)
            system.check()
            harmed += 1
            time.sleep(max(0.0, due - time.monotonic()))
    finally:
        enough.set()
        submitter.join()
    deadline = time.monotonic() + END_SECONDS
    while system.ledger.ended() < ended + len(submitted) and time.monotonic() < deadline:
        system.check()
        time.sleep(0.1)
    return submitted, harmed


def items(enough: threading.Event) -> Iterator[Submission]:
    """Inline, in a child's loop and in a child of their own, mostly of 0 to 200 ms, and some of seconds."""
    for number in itertools.count():
        if enough.is_set():
            return
        if number % 50 == 0:
            kind, ms = ("effect.loop", "effect.inline", "effect.child")[number // 50 % 3], 2_500
        elif number % 4 == 3:
            kind, ms = "effect.child", number * 7 % 100
        else:
            kind, ms = ("effect.inline", "effect.loop")[number % 2], number * 7 % 201
        yield Submission(task_type=kind, payload={"ms": ms})


def paced(items: Iterator[Submission]) -> Iterator[Submission]:
    """So many a second; what is late is made up for."""
    begun = time.monotonic()
    for number, item in enumerate(items):
        time.sleep(max(0.0, begun + number / PER_SECOND - time.monotonic()))
        yield item


def completed(told: TaskHistory | None) -> bool:
    return told is not None and told.state.status is TaskStatus.COMPLETED


def begins(lines: list[Line] | tuple[Line, ...]) -> list[Line]:
    return [line for line in lines if line.word == "begin"]


def outcome_of(lines: list[Line] | tuple[Line, ...]) -> str:
    """What the ledger says of a task, in a word."""
    words = [line.word for line in lines]
    if words == ["begin", "end"]:
        return "once"
    if words.count("end") == 0:
        return "not ended"
    if words.count("end") == 1 and words[-1] == "end":
        return "begun again"
    return "ended again"
