"""A worker's engine between small fakes of its ports, in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from asyncio import Future
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import orjson
import pytest

from taskline.errors import DeliveryFailed
from taskline.infra.holes import decode_holes
from taskline.infra.intake import Commit, IntakeSink, TopicPartition
from taskline.infra.kafka.lifecycle import LifecycleLog
from taskline.infra.log import HEADER_DUE, HEADER_TARGET, InRecord, OutRecord, Position
from taskline.infra.tiers import Tiers
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import LifecycleBatch, LifecycleEvent, Priority, TaskSubmitted
from taskline.schemas.ids import TaskId, new_task_id
from taskline.settings import DelaySettings, WorkerSettings
from taskline.testing.clock import VirtualClock
from taskline.testing.loop import VirtualLoop
from taskline.workers.engine import WorkerEngine
from taskline.workers.executor import Executor, InlineExecutor
from taskline.workers.ports import WorkerPorts
from taskline.workers.registry import Registry

T = TypeVar("T")
TOPICS = Topics()
TIERS = Tiers.of(DelaySettings().tiers)


class FakeLog:
    """Appends that are acknowledged after `ack_seconds`, unless `verdict` says otherwise."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.records: list[OutRecord] = []
        self.attempts = 0
        self.ack_seconds = 0.001
        # None: acknowledged; an error: what the append fails with; "hang": never answered.
        self.verdict: Callable[[OutRecord], Exception | str | None] = lambda record: None

    def append(self, record: OutRecord) -> Future[Position]:
        loop = asyncio.get_running_loop()
        future: Future[Position] = loop.create_future()
        self.attempts += 1
        verdict = self.verdict(record)
        if verdict == "hang":
            return future
        # A record whose acknowledgement got lost is in the log all the same.
        if not isinstance(verdict, DeliveryFailed):
            self.records.append(record)

        def settle() -> None:
            if future.done():
                return
            if isinstance(verdict, Exception):
                future.set_exception(verdict)
            else:
                future.set_result(Position(topic=record.topic, partition=0, offset=len(self.records)))

        loop.call_later(self.ack_seconds, settle)
        return future

    def events(self) -> list[LifecycleEvent]:
        found = []
        for record in self.records:
            if record.topic == TOPICS.lifecycle:
                batch = self.codec.decode(record.value, LifecycleBatch)
                found.extend(self.codec.decode(entry.event, LifecycleEvent) for entry in batch.events)
        return found

    def kinds(self, task_id: TaskId | None = None) -> list[str]:
        return [type(event).__name__ for event in self.events() if task_id in (None, event.task_id)]

    def dlq(self) -> list[OutRecord]:
        return [record for record in self.records if record.topic == TOPICS.dlq]

    def waiting(self) -> list[OutRecord]:
        """What went into the delay tiers."""
        return [record for record in self.records if record.topic.startswith(TOPICS.delay_prefix)]


class FakeIntake:
    """What the test says comes in; everything the engine says is kept."""

    def __init__(self) -> None:
        self.sink: IntakeSink | None = None
        self.commits: list[dict[TopicPartition, Commit]] = []
        # The group's committed offsets.
        self.stored: dict[TopicPartition, Commit] = {}
        self.commit_error: Exception | None = None
        self.start_error: Exception | None = None
        self.paused = False
        self.held: set[TopicPartition] = set()
        self.assigned: set[TopicPartition] = set()
        self.closed = False

    async def start(self, sink: IntakeSink) -> None:
        if self.start_error is not None:
            raise self.start_error
        self.sink = sink

    def commit(self, commits: Mapping[TopicPartition, Commit]) -> Future[None]:
        future: Future[None] = asyncio.get_running_loop().create_future()
        if self.commit_error is None:
            self.commits.append(dict(commits))
            self.stored |= commits
            future.set_result(None)
        else:
            future.set_exception(self.commit_error)
        return future

    def pause(self, partitions: Collection[TopicPartition] | None = None) -> None:
        if partitions is None:
            assert not self.paused
            self.paused = True
        else:
            assert not self.held & set(partitions)
            self.held |= set(partitions)

    def resume(self, partitions: Collection[TopicPartition] | None = None) -> None:
        if partitions is None:
            assert self.paused
            self.paused = False
        else:
            assert self.held >= set(partitions)
            self.held -= set(partitions)

    async def close(self) -> None:
        self.closed = True
        if self.assigned and self.sink is not None:
            await self.revoke(*self.assigned)

    # ---- the test's side ----

    def assign(self, committed: Mapping[TopicPartition, Commit]) -> None:
        assert self.sink is not None
        self.assigned |= set(committed)
        self.sink.assigned(committed)

    async def revoke(self, *partitions: TopicPartition) -> Mapping[TopicPartition, Commit]:
        assert self.sink is not None
        self.assigned -= set(partitions)
        self.held -= set(partitions)
        commits = await self.sink.revoked(partitions)
        self.stored |= commits
        return commits

    def lose(self, *partitions: TopicPartition) -> None:
        assert self.sink is not None
        self.assigned -= set(partitions)
        self.sink.lost(partitions)


class Bench:
    """An engine and its surroundings."""

    def __init__(
        self,
        registry: Registry,
        functions: Executor | None = None,
        alone: Executor | None = None,
        coroutines: Executor | None = None,
        **settings: Any,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.clock = VirtualClock(loop)
        self.codec = Codec()
        self.log = FakeLog(self.codec)
        self.intakes = {priority: FakeIntake() for priority in Priority}
        self.settings = WorkerSettings(**settings)
        self.registry = registry
        self.types = registry.catalogue()
        self.engine = WorkerEngine(
            registry,
            WorkerPorts(
                intakes=self.intakes,
                log=self.log,
                lifecycle=LifecycleLog(self.log, self.codec, TOPICS, 1, 0.0),
                codec=self.codec,
                types=self.types,
                clock=self.clock,
                rng=random.Random(0),
                coroutines=coroutines or InlineExecutor(self.clock),
                functions=functions or InlineExecutor(),
                alone=alone,
            ),
            self.settings,
            topics=TOPICS,
            tiers=TIERS,
            worker="w1",
        )
        self.stop = asyncio.Event()
        self.running: asyncio.Task[None] | None = None
        self._next: dict[TopicPartition, int] = {}
        self._forwarded = 0

    async def __aenter__(self) -> Bench:
        self.running = asyncio.ensure_future(self.engine.run(self.stop))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        assert self.running is not None
        self.stop.set()
        if kind is None:
            await self.running
        else:
            self.running.cancel()

    def assign(
        self, *partitions: int, priority: Priority = Priority.NORMAL, offset: int = 0, metadata: str = ""
    ) -> None:
        names = {
            self.name(partition, priority): Commit(offset=offset, metadata=metadata)
            for partition in partitions
        }
        for name in names:
            self._next[name] = offset
        self.intakes[priority].assign(names)

    def name(self, partition: int = 0, priority: Priority = Priority.NORMAL) -> TopicPartition:
        return TopicPartition(TOPICS.dispatch("default", priority), partition)

    def submission(self, task_type: str, payload: Any = None, **changes: Any) -> TaskSubmitted:
        task_id = new_task_id(self.clock.now_ms())
        task = self.registry.get(task_type)
        data, fingerprint = (orjson.dumps(payload), None) if task is None else task.type.encode(payload)
        values: dict[str, Any] = {
            "task_id": task_id,
            "tenant": "acme",
            "task_type": task_type,
            "queue": "default",
            "priority": Priority.NORMAL,
            "payload": data,
            "payload_fingerprint": fingerprint,
            "retain_until": self.clock.now_ms() + 86_400_000,
            "max_retries": 3,
            "root_id": task_id,
        }
        return TaskSubmitted(**(values | changes))

    def record(
        self,
        value: bytes | None,
        partition: int = 0,
        priority: Priority = Priority.NORMAL,
        offset: int | None = None,
        **headers: bytes,
    ) -> InRecord:
        name = self.name(partition, priority)
        at = self._next[name] if offset is None else offset
        self._next[name] = at + 1
        return InRecord(
            position=Position(topic=name.topic, partition=partition, offset=at),
            value=value,
            key=b"key",
            headers={key.replace("_", "-"): header for key, header in headers.items()},
            timestamp_ms=self.clock.now_ms(),
        )

    def push(
        self, *submissions: TaskSubmitted, partition: int = 0, priority: Priority = Priority.NORMAL
    ) -> None:
        self.receive(
            [self.record(self.codec.encode(each), partition, priority) for each in submissions], priority
        )

    async def forward(self) -> InRecord:
        """As the delay role does: the oldest record of the tiers, when it is due, on partition 0 of its target."""
        waiting = self.log.waiting()[self._forwarded]
        self._forwarded += 1
        due_ms = int(waiting.headers[HEADER_DUE])
        await asyncio.sleep(max(0.0, (due_ms - self.clock.now_ms()) / 1_000))
        headers = dict(waiting.headers)
        assert headers.pop(HEADER_TARGET).decode() == self.name().topic
        record = dataclasses.replace(self.record(waiting.value), key=waiting.key, headers=headers)
        self.receive([record])
        return record

    def receive(self, records: Sequence[InRecord], priority: Priority = Priority.NORMAL) -> None:
        sink = self.intakes[priority].sink
        assert sink is not None
        sink.received(records)

    def committed(self, partition: int = 0, priority: Priority = Priority.NORMAL) -> Commit | None:
        return self.intakes[priority].stored.get(self.name(partition, priority))

    def progress(self, partition: int = 0) -> tuple[int, tuple[tuple[int, int], ...]]:
        """What is done of a partition that began at 0: up to an offset, and above it."""
        commit = self.committed(partition) or Commit(offset=0)
        return commit.offset, decode_holes(commit.offset, commit.metadata)


@pytest.fixture
def bench() -> type[Bench]:
    return Bench


@pytest.fixture
def virtually() -> Iterator[Callable[[Awaitable[T]], T]]:
    """Runs a coroutine in virtual time."""

    def run(coroutine: Any) -> Any:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(coroutine)

    return run
