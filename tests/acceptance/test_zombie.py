"""A worker that stood still for longer than its session goes on: it changes nothing that its successor did.

It is stopped while it hands partitions over, and so waits for handlers in the thread that would else be told at once that its session is over. With
TASKLINE_TEST_ZOMBIE=steady it is stopped between two rebalances; then it is a race whether a handler's end or that news comes first.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from effect_system import (
    SUPPORT,
    Ledger,
    Line,
    Worker,
    ends,
    group_of,
    histories,
    own_settings,
)
from effect_tasks import UNLUCKY, registry

from taskline import Settings, TaskProducer
from taskline.infra.intake import Commit
from taskline.infra.local.roles import Role
from taskline.infra.topics import DEFAULT_QUEUE, Topics, waiting_topics
from taskline.schemas.events import Priority
from taskline.schemas.ids import TaskId
from taskline.state.fold import TaskHistory
from taskline.state.status import TaskStatus

EACH = 4
# What would be recorded as succeeded, and what as failed, by a worker that did not know that its time was over.
SUCCEEDING = ("zombie.inline", "zombie.loop", "zombie.child")
FAILING = ("zombie.fails_inline", "zombie.fails_child", "zombie.buried")
STEADY = os.environ.get("TASKLINE_TEST_ZOMBIE") == "steady"
SUCCESSOR = "successor"
END_SECONDS = 60.0
# A retry of the zombie's would be due, forwarded and run within this.
AFTERMATH_SECONDS = 4.0
AFTERWARDS = 30
# In a worker's log, for each partition that it is given.
ASSIGNED = b'"event": "partition assigned"'

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What there was just before the stopped worker went on, and in the end."""

    settings: Settings
    kinds: Mapping[TaskId, str]
    resumed_ns: int
    before: Mapping[TaskId, TaskHistory]
    after: Mapping[TaskId, TaskHistory]
    # Of the group.
    committed: Mapping[int, Commit]
    committed_after: Mapping[int, Commit]
    lines: Mapping[TaskId, list[Line]]
    # Tasks that were submitted afterwards, and who ran them.
    later: Mapping[TaskId, str | None]
    exits: tuple[int, ...]

    def of(self, kinds: tuple[str, ...]) -> list[TaskId]:
        """The tasks of some kinds."""
        return [task_id for task_id, kind in self.kinds.items() if kind in kinds]


@pytest.fixture(scope="module")
def settings(servers: Any, keyspace: str) -> Iterator[Settings]:
    with own_settings(servers, keyspace, children=3 * EACH, concurrency=64) as settings:
        yield settings


@pytest.fixture(scope="module")
def evidence(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    scratch = tmp_path_factory.mktemp("zombie")
    ledger = Ledger(scratch / "ledger")
    zombie = Worker(UNLUCKY, settings, scratch, ledger)
    successor = Worker(SUCCESSOR, settings, scratch, ledger)
    delay = Role(("delay",), settings, log=scratch / "delay.log", cwd=SUPPORT)
    projector = Role(("projector",), settings, log=scratch / "projector.log", cwd=SUPPORT)
    with (
        projector,
        delay,
        zombie.serving(),
        group_of(settings) as group,
        TaskProducer(settings, registry.catalogue()) as producer,
        ExitStack() as running,
    ):
        tasks = {producer.submit(kind, None): kind for kind in (*SUCCEEDING, *FAILING) for _ in range(EACH)}
        kinds = {task.task_id: kind for task, kind in tasks.items()}
        records = [(task.task_id, task.position) for task in tasks]
        zombie.wait_until(lambda: ledger.begins(UNLUCKY) == len(kinds), seconds=30, what="at work on all")
        if not STEADY:
            # It waits for handlers of what it is to hand over, which don't end before the file is there.
            running.enter_context(successor.serving())
            zombie.wait_until(lambda: handing_over(settings, zombie), seconds=30, what="handing over")
        zombie.signal(signal.SIGSTOP)
        zombie.release.touch()
        try:
            if STEADY:
                running.enter_context(successor.serving())
            before = histories(settings, kinds, seconds=END_SECONDS)
            wait_until(lambda: not group.undone(records), "committed by the successor")
            committed = dict(group.seen)
        finally:
            resumed_ns = time.monotonic_ns()
            assigned = zombie.times(ASSIGNED)
            zombie.signal(signal.SIGCONT)
        time.sleep(AFTERMATH_SECONDS)
        zombie.wait_until(lambda: zombie.times(ASSIGNED) > assigned, seconds=30, what="a member again")
        later = serve_again(settings, producer)
        after = histories(settings, kinds, seconds=0.0)
        committed_after = dict(group.look())
        exits = tuple(role.stop() for role in (zombie, successor, delay, projector))
    return Evidence(
        settings=settings,
        kinds=kinds,
        resumed_ns=resumed_ns,
        before=before,
        after=after,
        committed=committed,
        committed_after=committed_after,
        lines=ledger.lines(),
        later=later,
        exits=exits,
    )


def test_the_zombie_was_one(evidence: Evidence) -> None:
    """Else the others say nothing: all that it had begun was the successor's, and done, when it went on."""
    for task_id in evidence.kinds:
        told = evidence.before[task_id]
        assert told.state.status is TaskStatus.COMPLETED
        assert told.state.result == json.dumps(SUCCESSOR).encode()
        began = [line.worker for line in evidence.lines[task_id] if line.word == "begin"]
        assert set(began) == {UNLUCKY, SUCCESSOR}
    ended = Counter(
        (evidence.kinds[task_id], "before" if line.at_ns < evidence.resumed_ns else "after")
        for task_id, lines in evidence.lines.items()
        for line in lines
        if task_id in evidence.kinds and line.worker == UNLUCKY and line.word == "end"
    )
    print(
        f"{len(evidence.kinds)} tasks began on both; on the stopped worker their handlers ended, too,"
        f" before it went on or after: {dict(sorted(ended.items()))}"
    )
    # A child goes on while its parent stands still: its effects are there twice.
    assert ended["zombie.child", "before"] == ended["zombie.loop", "before"] == EACH


def test_what_it_finds_finished_stays_the_successors(evidence: Evidence) -> None:
    unchanged(evidence, evidence.of(SUCCEEDING))


def test_what_fails_in_it_is_neither_retried_nor_buried(evidence: Evidence) -> None:
    tasks, topics = evidence.of(FAILING), Topics(namespace=evidence.settings.kafka.namespace)
    waited = sum(ends(evidence.settings, name) for name in waiting_topics(evidence.settings))
    buried = ends(evidence.settings, topics.dlq)
    again = sum(line.word == "begin" and line.attempt > 1 for each in tasks for line in evidence.lines[each])
    print(
        f"of {len(tasks)} tasks that failed in the zombie after the successor had completed them,"
        f" {waited} waited for another attempt, {again} had one, {buried} became dead letters"
    )
    unchanged(evidence, tasks)
    assert (waited, again, buried) == (0, 0, 0)


def test_it_commits_nothing_and_serves_again(evidence: Evidence) -> None:
    for number, commit in evidence.committed.items():
        assert evidence.committed_after[number].offset >= commit.offset
    who = Counter(evidence.later.values())
    print(f"afterwards: {dict(who)}")
    assert set(who) == {UNLUCKY, SUCCESSOR}
    assert evidence.exits == (0, 0, 0, 0)


def serve_again(settings: Settings, producer: TaskProducer) -> Mapping[TaskId, str | None]:
    """Submit until both workers have run some: a group that settles may take its partitions from the returned one once more."""
    ran: dict[TaskId, str | None] = {}
    deadline = time.monotonic() + END_SECONDS
    while len(set(ran.values())) < len({UNLUCKY, SUCCESSOR}) and time.monotonic() < deadline:
        later = [producer.submit("effect.inline", {"ms": 1}).task_id for _ in range(AFTERWARDS)]
        done = histories(settings, later, seconds=END_SECONDS)
        ran |= {task_id: json.loads(told.state.result or b"null") for task_id, told in done.items()}
    return ran


def handing_over(settings: Settings, worker: Worker) -> bool:
    """Whether it is asked to give away partitions that it has handlers of."""
    topic = Topics(namespace=settings.kafka.namespace).dispatch(DEFAULT_QUEUE, Priority.NORMAL)
    revoked = [line for line in worker.log.read_text().splitlines() if '"partitions revoked"' in line]
    return any(f'"{topic}/' in line for line in revoked)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not {what}"
        time.sleep(0.1)


def unchanged(evidence: Evidence, tasks: list[TaskId]) -> None:
    """Assert that nothing which counts was added to what the successor had done."""
    for task_id in tasks:
        kind, before, after = evidence.kinds[task_id], evidence.before[task_id], evidence.after[task_id]
        assert (kind, after.state) == (kind, before.state)
        began = [line for line in evidence.lines[task_id] if line.word == "begin"]
        assert [(line.worker, line.attempt) for line in began] == [(UNLUCKY, 1), (SUCCESSOR, 1)], kind
        assert [row.worker for row in after.attempts] == [row.worker for row in before.attempts], kind
