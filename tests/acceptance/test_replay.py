"""Thousands of dead letters replayed by filter at 500 a second, killed (-9) half-way and run again: each exactly once."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import replay_tasks
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from taskline import Settings, Submission, TaskHandle, TaskProducer
from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.local.roles import Role
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import DeadLetter, DeadLetterResolved, Priority, TaskSubmitted
from taskline.schemas.ids import TaskId
from taskline.settings import as_environment
from taskline.state.cassandra import CassandraStore
from taskline.state.dead_letters import DeadLetters, LetterFilter, Order
from taskline.state.letter_row import Letter
from taskline.state.reader import StatusReader
from taskline.state.status import TaskStatus

pytestmark = [
    pytest.mark.servers,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("view_ready"),
]

SUPPORT = Path(__file__).parents[1] / "support"
# Of a task's own; 10,000 is what is promised, and takes a while.
LETTERS = int(os.environ.get("TASKLINE_TEST_LETTERS", "2000"))
OTHERS = 200
RATE = 500
SECONDS = 240.0


class System:
    """A worker, a projector, and the view's reading end."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.topics = Topics(namespace=settings.kafka.namespace)
        self._folder = folder
        self.ledger = folder / "ledger"
        self.ledger.touch()
        self.mended = folder / "mended"
        environ = {
            "TEST_LEDGER": str(self.ledger),
            replay_tasks.MENDED_VARIABLE: str(self.mended),
        }
        self.roles = [
            Role(
                ("worker", "replay_tasks:registry"),
                settings,
                log=folder / "worker.log",
                cwd=SUPPORT,
                environ=environ,
            ),
            Role(("projector",), settings, log=folder / "projector.log"),
        ]
        self._runner = asyncio.Runner()

    def __enter__(self) -> System:
        with TypeDirectory(self.settings) as types:
            types.register(replay_tasks.registry.types)
        for role in self.roles:
            role.start()
        self._store = self._runner.run(CassandraStore.connect(self.settings))
        self._letters = DeadLetters(self._store, self.settings)
        self._tasks = StatusReader(self._store, Codec(), self.settings.api)
        return self

    def __exit__(self, *error: object) -> None:
        for role in self.roles:
            role.stop()
        self._runner.run(self._store.close())
        self._runner.close()

    def submit(self, task_type: str, count: int) -> list[TaskId]:
        with TaskProducer(self.settings, replay_tasks.registry.catalogue()) as producer:
            made = list(
                producer.submit_many(Submission(task_type=task_type, payload=n) for n in range(count))
            )
        assert all(isinstance(each, TaskHandle) for each in made)
        return [each.task_id for each in made if isinstance(each, TaskHandle)]

    def letters(self, wanted: LetterFilter) -> dict[TaskId, Letter]:
        async def collect() -> dict[TaskId, Letter]:
            found: dict[TaskId, Letter] = {}
            cursor = None
            while True:
                page = await self._letters.list(wanted, order=Order.OLDEST_FIRST, limit=500, cursor=cursor)
                found |= {each.letter_id: each for each in page.letters}
                cursor = page.cursor
                if cursor is None:
                    return found

        return self._runner.run(collect())

    def states(self, task_ids: list[TaskId]) -> list[TaskStatus]:
        async def read() -> list[TaskStatus]:
            found = []
            for start in range(0, len(task_ids), 100):
                part = task_ids[start : start + 100]
                told = await asyncio.gather(*(self._tasks.get(each, tenant="default") for each in part))
                found += [each.status for each in told]
            return found

        return self._runner.run(read())

    def wait_until(self, condition: Callable[[], bool], what: str, *, pause: float = 0.2) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            for role in self.roles:
                role.check()
            assert time.monotonic() < deadline, f"not {what}: {self.roles[-1].tail()}"
            time.sleep(pause)

    def records(self, topic: str) -> list[bytes]:
        """The values of everything on a topic."""
        bootstrap = {"bootstrap.servers": self.settings.kafka.bootstrap_servers}
        consumer = Consumer(bootstrap | {"group.id": "unused", "enable.auto.commit": False})
        try:
            numbers = consumer.list_topics(topic, timeout=30).topics[topic].partitions
            ends = {
                n: consumer.get_watermark_offsets(TopicPartition(topic, n), timeout=30)[1] for n in numbers
            }
            consumer.assign([TopicPartition(topic, n, OFFSET_BEGINNING) for n in numbers])
            found: list[bytes] = []
            deadline = time.monotonic() + 60
            while len(found) < sum(ends.values()):
                assert time.monotonic() < deadline
                found += [each.value() for each in consumer.consume(1_000, 1.0) if each.error() is None]
            return found
        finally:
            consumer.close()

    def resolved_on_the_log(self) -> Counter[TaskId]:
        codec = Codec()
        values = self.records(self.topics.dlq)
        return Counter(
            codec.decode(each, DeadLetterResolved).letter_id
            for each in values
            if codec.kind_of(each) is DeadLetterResolved
        )

    def replays_on_the_log(self) -> dict[TaskId, Counter[TaskId]]:
        """Dead task → the ids that it was submitted again under, with their numbers."""
        found: dict[TaskId, Counter[TaskId]] = {}
        for value in self.records(self.topics.dispatch("default", Priority.NORMAL)):
            task = Codec().decode(value, TaskSubmitted)
            if task.replay_of is not None:
                found.setdefault(task.replay_of, Counter())[task.task_id] += 1
        return found

    def replay(self, output: Path) -> subprocess.Popen[bytes]:
        """Replay all of one type, in a process of its own."""
        arguments = ("replay", "--type", "replay.mine", "--rate", str(RATE), "--json")
        with output.open("wb") as lines, (self._folder / "replay.log").open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "taskline", "dlq", *arguments],
                env={**os.environ, **as_environment(self.settings)},
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=errors,
            )


@pytest.fixture
def system(topics_created: Settings, tmp_path: Path) -> Iterator[System]:
    with System(topics_created, tmp_path) as made:
        yield made


def outcomes(output: Path) -> Counter[str]:
    """What the lines say that are whole."""
    *lines, _ = output.read_text().split("\n")
    return Counter(json.loads(line)["outcome"] for line in lines)


def test_a_replay_that_is_killed_half_way_is_simply_run_again(system: System, tmp_path: Path) -> None:
    mine = system.submit("replay.mine", LETTERS)
    others = system.submit("replay.other", OTHERS)
    system.wait_until(lambda: len(system.letters(LetterFilter())) == LETTERS + OTHERS, "all letters listed")
    before = system.letters(LetterFilter(task_type="replay.other"))
    assert set(before) == set(others)
    system.mended.touch()

    first, second = tmp_path / "first", tmp_path / "second"
    with ExitStack() as cleanup:
        killed = cleanup.enter_context(system.replay(first))
        cleanup.callback(killed.kill)
        # Not between two of the pages that it takes.
        half_way = LETTERS // 2 + 50
        system.wait_until(lambda: sum(outcomes(first).values()) >= half_way, "half-way", pause=0.02)
        killed.kill()
    done_before = sum(outcomes(first).values())
    assert LETTERS // 2 <= done_before < LETTERS
    # What the first run appended is in the view before the second begins.
    on_the_log = system.resolved_on_the_log()
    system.wait_until(
        lambda: len(system.letters(LetterFilter(task_type="replay.mine"))) == LETTERS - len(on_the_log),
        "everything of the first run seen",
    )
    submitted = {task_id for ids in system.replays_on_the_log().values() for task_id in ids}

    began = time.monotonic()
    again = system.replay(second)
    assert again.wait(SECONDS) == 0, (tmp_path / "replay.log").read_text()
    told = outcomes(second)
    print(
        f"first run: {done_before}; second: {dict(told)} in {time.monotonic() - began:.1f} s with its start"
    )

    # Each exactly once by id, and nothing resolved twice.
    assert sum(told.values()) == LETTERS - len(on_the_log)
    assert told["resumed"] == len(submitted) - len(on_the_log)
    replays = system.replays_on_the_log()
    assert set(replays) == set(mine)
    assert all(list(ids.values()) == [1] for ids in replays.values())
    assert system.resolved_on_the_log() == Counter(mine)
    # All have done their work once, as the view says too.
    new_ids = [task_id for ids in replays.values() for task_id in ids]
    assert len(set(new_ids)) == LETTERS
    system.wait_until(lambda: set(system.states(new_ids)) == {TaskStatus.COMPLETED}, "all replays completed")
    assert Counter(system.ledger.read_text().split()) == Counter(map(str, range(LETTERS)))
    system.wait_until(lambda: not system.letters(LetterFilter(task_type="replay.mine")), "all resolved")
    rows = system.letters(LetterFilter(task_type="replay.mine", resolved=True))
    assert {letter_id: row.resolution.replayed_as for letter_id, row in rows.items() if row.resolution} == {
        letter_id: next(iter(ids)) for letter_id, ids in replays.items()
    }
    # The rest is as it was.
    assert system.letters(LetterFilter(task_type="replay.other", resolved=True)) == before
    assert len(
        [each for each in system.records(system.topics.dlq) if Codec().kind_of(each) is DeadLetter]
    ) == (LETTERS + OTHERS)
