"""What the rolling-restart and zombie tests look at: the ledger of effects, a group's progress, the view, and what stands on a topic."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as KafkaPartition
from effect_tasks import RELEASE_VARIABLE, WORKER_VARIABLE

from taskline import Settings
from taskline.errors import TaskNotFound
from taskline.infra.intake import Commit, TopicPartition
from taskline.infra.kafka.admin import create_topics
from taskline.infra.kafka.requests import admin_client
from taskline.infra.local.roles import Role
from taskline.infra.log import Position
from taskline.infra.role import SystemClock
from taskline.infra.topics import DEFAULT_QUEUE, Topics, topology
from taskline.infra.watermark import WatermarkTracker
from taskline.schemas.confluent import codec_for
from taskline.schemas.events import Priority
from taskline.schemas.ids import TaskId
from taskline.state.cassandra import CassandraStore
from taskline.state.fold import TaskHistory
from taskline.state.migrations import migrate
from taskline.state.reader import StatusReader

SUPPORT = Path(__file__).parent
# In a worker's log, once it takes tasks.
SERVES = b'"event": "serving"'
REQUEST_SECONDS = 15.0
# Reads of the view that are under way together.
_READS = 20
_LOOK_SECONDS = 0.3
START_SECONDS = 60.0
# The shortest that brokers allow.
SESSION_SECONDS = 6.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the ledger."""

    word: str
    attempt: int
    worker: str
    at_ns: int


class Ledger:
    """What handlers did, in the order of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def lines(self) -> dict[TaskId, list[Line]]:
        """By task."""
        found: defaultdict[TaskId, list[Line]] = defaultdict(list)
        for line in self.path.read_text().splitlines():
            word, task_id, attempt, worker, at = line.split()
            found[TaskId(task_id)].append(Line(word=word, attempt=int(attempt), worker=worker, at_ns=int(at)))
        return found

    def ended(self) -> int:
        """How many handlers have ended."""
        return self.path.read_bytes().count(b"end ")

    def begins(self, worker: str) -> int:
        """How many handlers have begun on a worker."""
        lines = self.path.read_bytes().splitlines()
        return sum(line.startswith(b"begin ") and f" {worker} ".encode() in line for line in lines)


class Worker(Role):
    """A worker whose handlers know its name."""

    def __init__(self, name: str, settings: Settings, scratch: Path, ledger: Ledger) -> None:
        self.name = name
        # Its handlers of the zombie test may end once this file is there, if it is unlucky.
        self.release = scratch / "release"
        super().__init__(
            ("worker", "effect_tasks:registry"),
            settings,
            log=scratch / f"{name}.log",
            cwd=SUPPORT,
            environ={
                "TEST_LEDGER": str(ledger.path),
                WORKER_VARIABLE: name,
                RELEASE_VARIABLE: str(self.release),
            },
        )

    def serve(self) -> Worker:
        """Start it, and return when it takes tasks."""
        begun = self.times(SERVES)
        self.start()
        self.wait_until(lambda: self.times(SERVES) > begun, seconds=START_SECONDS, what="serving")
        return self

    @contextmanager
    def serving(self) -> Iterator[Worker]:
        """Serve, and stop."""
        try:
            yield self.serve()
        finally:
            self.stop()

    def times(self, text: bytes) -> int:
        """How often its log says so."""
        return self.log.read_bytes().count(text) if self.log.exists() else 0


@dataclass(kw_only=True)
class Group:
    """The workers of a queue's normal priority, seen from outside."""

    settings: Settings
    consumer: Consumer
    topic: str
    # The group's progress as it was last looked at.
    seen: dict[int, Commit] = field(default_factory=dict)

    def look(self) -> Mapping[int, Commit]:
        """The committed offsets, and what is done above them."""
        numbers = range(self.settings.topics.dispatch_partitions)
        places = [KafkaPartition(self.topic, number) for number in numbers]
        answers = self.consumer.committed(places, timeout=REQUEST_SECONDS)
        assert all(each.error is None for each in answers), answers
        self.seen = {
            each.partition: Commit(offset=each.offset, metadata=each.metadata or "") for each in answers
        }
        return self.seen

    def undone(
        self, records: Iterable[tuple[TaskId, Position]], commits: Mapping[int, Commit] | None = None
    ) -> set[TaskId]:
        """Those whose records are not done by `commits`, or by what is committed now."""
        commits = self.look() if commits is None else commits
        found: set[TaskId] = set()
        trackers = {
            number: WatermarkTracker.resumed(TopicPartition(self.topic, number), commit)
            for number, commit in commits.items()
        }
        for task_id, place in sorted(records, key=lambda record: record[1].offset):
            tracker = trackers[place.partition]
            if place.offset >= tracker.next_offset and tracker.take(place.offset):
                found.add(task_id)
        return found


@contextmanager
def group_of(settings: Settings) -> Iterator[Group]:
    """Joins nothing."""
    topics = Topics(namespace=settings.kafka.namespace)
    consumer = Consumer(
        {
            "bootstrap.servers": settings.kafka.bootstrap_servers,
            "group.id": topics.worker_group(DEFAULT_QUEUE, Priority.NORMAL),
            "enable.auto.commit": False,
        }
    )
    try:
        yield Group(
            settings=settings, consumer=consumer, topic=topics.dispatch(DEFAULT_QUEUE, Priority.NORMAL)
        )
    finally:
        consumer.close()


@contextmanager
def own_settings(servers: Any, keyspace: str, **worker: object) -> Iterator[Settings]:
    """Settings with topics, made here, and a keyspace of the test's own; the topics go when it is over."""
    settings = Settings.model_validate(
        {
            "kafka": {
                "bootstrap_servers": servers.bootstrap_servers,
                "namespace": f"e{secrets.token_hex(4)}.",
                "session_timeout_ms": round(SESSION_SECONDS * 1_000),
            },
            "topics": {"dispatch_partitions": 8, "lanes": 3, "dlq_partitions": 1, "delay_partitions": 1},
            "delay": {"tiers": ("200ms", "1s", "5s")},
            "worker": worker,
            "cassandra": {
                "contact_points": servers.contact_points,
                "port": servers.cassandra_port,
                "keyspace": keyspace,
            },
        }
    )
    create_topics(settings)
    migrate(settings)
    yield settings
    with admin_client(settings.kafka) as admin:
        for deleted in admin.delete_topics([spec.name for spec in topology(settings)]).values():
            deleted.result(REQUEST_SECONDS)


def ends(settings: Settings, topic: str) -> int:
    """How many records were ever appended to a topic."""
    consumer = Consumer({"bootstrap.servers": settings.kafka.bootstrap_servers, "group.id": "unused"})
    try:
        numbers = consumer.list_topics(topic, timeout=REQUEST_SECONDS).topics[topic].partitions
        places = [KafkaPartition(topic, number) for number in numbers]
        return sum(consumer.get_watermark_offsets(each, timeout=REQUEST_SECONDS)[1] for each in places)
    finally:
        consumer.close()


def histories(
    settings: Settings,
    ids: Iterable[TaskId],
    *,
    seconds: float,
    until: Callable[[TaskHistory], bool] = lambda told: told.state.status.ended,
) -> dict[TaskId, TaskHistory]:
    """Each task's history once `until` holds of it; whoever does not get there in time is missing, or as it was last."""
    return asyncio.run(_histories(settings, list(ids), seconds, until))


async def _histories(
    settings: Settings, ids: list[TaskId], seconds: float, until: Callable[[TaskHistory], bool]
) -> dict[TaskId, TaskHistory]:
    store = await CassandraStore.connect(settings)
    impatient = settings.api.model_copy(update={"read_your_writes_seconds": 0.0})
    reader = StatusReader(store, codec_for(settings.schemas), impatient, SystemClock())
    found: dict[TaskId, TaskHistory] = {}
    room = asyncio.Semaphore(_READS)
    deadline = time.monotonic() + seconds

    async def read(task_id: TaskId) -> bool:
        async with room:
            try:
                found[task_id] = await reader.history(task_id, tenant="default")
            except TaskNotFound:
                return False
        return until(found[task_id])

    try:
        missing = ids
        while missing:
            there = await asyncio.gather(*map(read, missing))
            missing = [task_id for task_id, ready in zip(missing, there, strict=True) if not ready]
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_LOOK_SECONDS if missing else 0.0)
    finally:
        await store.close()
    return found
