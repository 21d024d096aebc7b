"""`taskline projector` as a process, on a real log and a real view."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from view_kit import CODEC, batch, event, folded, submission

from taskline.infra.local.roles import Role
from taskline.infra.log import HEADER_CAUSE, HEADER_SOURCE, HEADER_TASK_ID
from taskline.infra.role import SystemClock
from taskline.infra.topics import Topics
from taskline.schemas.events import (
    LifecycleBatch,
    LifecycleEntry,
    LifecycleEvent,
    Priority,
    Started,
    Succeeded,
    TaskSubmitted,
    sequence_of,
)
from taskline.schemas.ids import TaskId, lane_of
from taskline.settings import Settings
from taskline.state.cassandra import CassandraStore
from taskline.state.status import TaskStatus
from taskline.state.store import StoredTask

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("view_ready")]

VISIBLE_SECONDS = 90.0
UNKNOWN_SCHEMA = b"\xc3\x01\x00\x01\x02\x03\x04\x05\x06\x07body"


class Bench:
    """The log's writing end, the view's reading end, and projectors in between."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.topics = Topics(namespace=settings.kafka.namespace)
        self.lanes = settings.topics.lanes
        self._folder = folder
        self._producer = Producer({"bootstrap.servers": settings.kafka.bootstrap_servers, "linger.ms": 2})
        self._runner = asyncio.Runner()
        self._store = self._runner.run(CassandraStore.connect(settings))
        self.roles: list[Role] = []

    def projector(self) -> Role:
        log = self._folder / f"projector-{len(self.roles)}.log"
        self.roles.append(Role(("projector",), self.settings, log=log))
        return self.roles[-1].start()

    def close(self) -> None:
        for role in self.roles:
            role.stop()
        self._runner.run(self._store.close())
        self._runner.close()

    def send(self, topic: str, value: bytes | None, **options: Any) -> None:
        self._producer.produce(topic, value, **options)
        self._producer.poll(0)

    def submit(self, task: TaskSubmitted) -> TaskSubmitted:
        self.send(
            self.topics.dispatch("default", task.priority),
            CODEC.encode(task),
            key=task.task_id.bytes,
            headers={HEADER_TASK_ID: task.task_id.bytes},
        )
        return task

    def happen(self, lane: int, events: Sequence[LifecycleEvent | LifecycleEntry]) -> None:
        self.send(self.topics.lifecycle, batch(events), partition=lane)

    def run(self, task: TaskSubmitted) -> None:
        """Submit and finish a task."""
        self.submit(task)
        lane = lane_of(task.task_id, self.lanes)
        self.happen(lane, [event(Started, task, now())])
        self.happen(lane, [event(Succeeded, task, now())])

    def flush(self) -> None:
        assert self._producer.flush(30) == 0

    def read(self, task_id: TaskId) -> StoredTask | None:
        return self._runner.run(self._store.read(task_id))

    def status(self, task: TaskSubmitted) -> TaskStatus | None:
        stored = self.read(task.task_id)
        return None if stored is None or stored.submission is None else folded(stored).status

    def wait_for(self, task: TaskSubmitted, status: TaskStatus = TaskStatus.COMPLETED) -> None:
        deadline = time.monotonic() + VISIBLE_SECONDS
        while (found := self.status(task)) is not status:
            for role in self.roles:
                if role.exit_code not in (None, 0, -9):
                    role.check()
            assert time.monotonic() < deadline, f"{found} instead of {status}: {self.roles[-1].tail()}"
            time.sleep(0.02)

    def records(self, topic: str, partitions: int, count: int) -> list[Any]:
        """The first `count` records of a topic, waited for."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.settings.kafka.bootstrap_servers,
                "group.id": f"{self.settings.kafka.namespace}test",
                "enable.auto.commit": False,
            }
        )
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(partitions)])
        found: list[Any] = []
        deadline = time.monotonic() + VISIBLE_SECONDS
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} records"
            message = consumer.poll(0.2)
            if message is not None and message.error() is None:
                found.append(message)
        consumer.close()
        return found


def now() -> int:
    return SystemClock().now_ms()


def tasks_of_lane(lane: int, lanes: int, count: int = 1) -> list[TaskSubmitted]:
    candidates = iter(lambda: submission(now()), None)
    return list(
        itertools.islice((each for each in candidates if lane_of(each.task_id, lanes) == lane), count)
    )


@pytest.fixture
def bench(topics_created: Settings, tmp_path: Path) -> Iterator[Bench]:
    with closing(Bench(topics_created, tmp_path)) as made:
        yield made


@contextmanager
def closing(bench: Bench) -> Iterator[Bench]:
    try:
        yield bench
    finally:
        bench.close()


def test_tasks_appear_and_sigterm_is_a_clean_stop(bench: Bench) -> None:
    role = bench.projector()
    tasks = [submission(now(), priority=priority) for priority in Priority for _ in range(20)]
    for task in tasks:
        bench.run(task)
    waiting = bench.submit(submission(now()))
    bench.flush()
    for task in tasks:
        bench.wait_for(task)
    bench.wait_for(waiting, TaskStatus.PENDING)
    assert role.stop() == 0
    # It left its group and committed: the next one begins where it ended, at once.
    successor = bench.projector()
    last = submission(now())
    bench.run(last)
    bench.flush()
    bench.wait_for(last)
    assert successor.stop() == 0


def test_garbage_goes_to_the_dead_letters_and_the_rest_goes_on(bench: Bench) -> None:
    bench.projector()
    (task,) = tasks_of_lane(1, bench.lanes)
    (other,) = tasks_of_lane(2, bench.lanes)
    misfiled = CODEC.encode(event(Started, other, now()))
    garbage = [b"garbage", b"", secrets.token_bytes(500), None, CODEC.encode(task), b"{}"]
    bench.submit(task)
    for value in garbage:
        bench.send(bench.topics.lifecycle, value, partition=1, key=b"k")
        bench.send(bench.topics.dispatch("default", Priority.HIGH), value)
    entry = LifecycleEntry(task_id=other.task_id, retain_until=other.retain_until, event=misfiled)
    bench.happen(1, [event(Started, task, now()), entry, event(Succeeded, task, now())])
    bench.flush()
    bench.wait_for(task)
    rejected = bench.records(bench.topics.dlq, bench.settings.topics.dlq_partitions, len(garbage) + 1)
    assert sorted(message.value() or b"" for message in rejected) == sorted(
        [value or b"" for value in garbage] + [misfiled]
    )
    assert sum(message.value() is None for message in rejected) == 1
    for message in rejected:
        headers = dict(message.headers())
        assert headers[HEADER_SOURCE].startswith(f"{bench.topics.lifecycle}/1/".encode())
        assert headers[HEADER_CAUSE]


def test_an_unknown_schema_halts_its_lane_only(bench: Bench) -> None:
    bench.projector()
    before, after = tasks_of_lane(0, bench.lanes, 2)
    (elsewhere,) = tasks_of_lane(1, bench.lanes)
    bench.run(before)
    bench.flush()
    bench.wait_for(before)
    bench.send(bench.topics.lifecycle, UNKNOWN_SCHEMA, partition=0)
    bench.run(after)
    bench.flush()
    bench.run(elsewhere)
    bench.flush()
    bench.wait_for(elsewhere)
    bench.wait_for(after, TaskStatus.PENDING)
    # Nor does a second projector, or a restart, skip it.
    bench.roles[0].stop()
    bench.projector()
    (later,) = tasks_of_lane(1, bench.lanes)
    bench.run(later)
    bench.flush()
    bench.wait_for(later)
    assert bench.status(after) is TaskStatus.PENDING
    assert "partition halted" in bench.roles[-1].tail()
    assert bench.roles[-1].stop() == 0


def test_a_killed_projector_loses_nothing(bench: Bench) -> None:
    first = bench.projector()
    tasks = [submission(now()) for _ in range(1_500)]
    for number, task in enumerate(tasks):
        bench.run(task)
        if number == len(tasks) // 3:
            bench.flush()
            # In the middle of the stream, with flushes in flight.
            bench.wait_for(tasks[50])
            first.kill()
    bench.flush()
    bench.projector()
    for task in tasks:
        bench.wait_for(task)
    # The view is the direct fold of the log, whatever was written twice.
    direct: dict[TaskId, dict[int, bytes]] = {}
    for message in bench.records(bench.topics.lifecycle, bench.lanes, 2 * len(tasks)):
        for index, entry in enumerate(CODEC.decode(message.value(), LifecycleBatch).events):
            direct.setdefault(entry.task_id, {})[sequence_of(message.offset(), index)] = entry.event
    for task in tasks:
        assert bench.read(task.task_id) == StoredTask(
            submission=CODEC.encode(task), events=direct[task.task_id]
        )


def test_several_projectors_share_the_work(bench: Bench) -> None:
    bench.projector()
    early = submission(now())
    bench.run(early)
    bench.flush()
    bench.wait_for(early)
    second = bench.projector()
    # A rebalance in the middle of a stream, when the second joins and when it leaves.
    tasks = []
    deadline = time.monotonic() + VISIBLE_SECONDS
    while "partitions assigned" not in second.tail():
        second.check()
        assert time.monotonic() < deadline
        tasks.append(submission(now()))
        bench.run(tasks[-1])
        bench.flush()
    assert second.stop() == 0
    for _ in range(50):
        tasks.append(submission(now()))
        bench.run(tasks[-1])
    bench.flush()
    for task in tasks:
        bench.wait_for(task)
