"""The behaviour suite's system on real servers: the worker and the projector are `taskline …` processes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import behaviour_tasks
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from systems import COMMON_SETTINGS, SESSION_TIMEOUT_MS, System, What, said

from taskline import Settings, Submission, TaskFailure, TaskHandle, TaskProducer
from taskline.infra.kafka import offsets
from taskline.infra.kafka.admin import create_topics
from taskline.infra.kafka.messages import in_record
from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.local.roles import Role
from taskline.infra.log import InRecord, Position
from taskline.infra.role import SystemClock
from taskline.infra.topics import projected_topics, waiting_topics
from taskline.schemas.events import Priority
from taskline.schemas.ids import TaskId
from taskline.state.cassandra import CassandraStore
from taskline.state.fold import TaskHistory
from taskline.state.reader import StatusReader
from taskline.state.status import TaskState

SUPPORT = Path(__file__).parent
POLL_SECONDS = 0.02
REQUEST_SECONDS = 10.0


class RealSystem(System):
    """On the servers of `settings`; topics and groups are made here, the keyspace is there already."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(folder / "ledger")
        self.settings = settings
        environ = {behaviour_tasks.LEDGER_VARIABLE: str(self._ledger)}
        self._worker = Role(
            ("worker", "behaviour_tasks:registry"),
            settings,
            log=folder / "worker.log",
            cwd=SUPPORT,
            environ=environ,
        )
        self._delay = Role(("delay",), settings, log=folder / "delay.log", cwd=SUPPORT)
        self._projector = Role(("projector",), settings, log=folder / "projector.log", cwd=SUPPORT)
        bootstrap = {"bootstrap.servers": settings.kafka.bootstrap_servers}
        self._raw = Producer({**bootstrap, "acks": "all", "linger.ms": 0})
        self._runner = asyncio.Runner()

    def __enter__(self) -> RealSystem:
        create_topics(self.settings)
        self._directory = TypeDirectory(self.settings)
        self._directory.start()
        self._directory.register(behaviour_tasks.submitted.types)
        self._producer = TaskProducer(self.settings, self._directory)
        self.early = self.submit("behave.evolves", {"name": "Ada"})
        self._store = self._runner.run(CassandraStore.connect(self.settings))
        self._reader = StatusReader(self._store, self.codec, self.settings.api, clock=SystemClock())
        self.start_projector()
        self.start_delay()
        self.start_worker()
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.stop()
        self._delay.stop()
        self._projector.stop()
        self._producer.close()
        self._directory.close()
        self._runner.run(self._store.close())
        self._runner.close()

    # ---- tasks -------------------------------------------------------------------------------------------

    def submit(self, task_type: str, payload: Any, **options: Any) -> TaskHandle:
        return self._producer.submit(task_type, payload, **options)

    def submit_many(self, items: Iterable[Submission]) -> list[TaskHandle | TaskFailure]:
        return list(self._producer.submit_many(items))

    def status(self, task_id: TaskId, *, tenant: str = "default") -> TaskState:
        return self._runner.run(self._reader.get(task_id, tenant=tenant))

    def history(self, task_id: TaskId, *, tenant: str = "default") -> TaskHistory:
        return self._runner.run(self._reader.history(task_id, tenant=tenant))

    # ---- the log -----------------------------------------------------------------------------------------

    def inject(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        partition: int | None = None,
    ) -> Position:
        reports: list[tuple[object, Message]] = []
        place = {} if partition is None else {"partition": partition}
        self._raw.produce(
            topic,
            value=value,
            key=key,
            headers=dict(headers or {}),
            on_delivery=lambda error, message: reports.append((error, message)),
            **place,
        )
        self._raw.flush(REQUEST_SECONDS)
        ((error, message),) = reports
        assert error is None, error
        return Position(topic=topic, partition=message.partition(), offset=message.offset())

    def records(self, topic: str) -> tuple[InRecord, ...]:
        consumer = Consumer(
            {
                "bootstrap.servers": self.settings.kafka.bootstrap_servers,
                "group.id": f"{self.settings.kafka.namespace}reader",
                "enable.auto.commit": False,
                "enable.partition.eof": False,
            }
        )
        try:
            ends = self._ends(consumer, topic)
            consumer.assign([TopicPartition(topic, number, 0) for number in ends])
            found: list[InRecord] = []
            deadline = time.monotonic() + REQUEST_SECONDS
            while any(end > 0 for end in ends.values()):
                assert time.monotonic() < deadline, f"{topic} could not be read"
                message = consumer.poll(REQUEST_SECONDS)
                if message is None or message.error():
                    continue
                found.append(in_record(message))
                if message.offset() + 1 >= ends[message.partition()]:
                    ends[message.partition()] = 0
            return tuple(found)
        finally:
            consumer.close()

    @staticmethod
    def _ends(consumer: Consumer, topic: str) -> dict[int, int]:
        partitions = consumer.list_topics(topic, timeout=REQUEST_SECONDS).topics[topic].partitions
        return {
            number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=REQUEST_SECONDS)[1]
            for number in partitions
        }

    # ---- waiting -----------------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], bool], what: What, *, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            for role in (self._worker, self._delay, self._projector):
                if role.exit_code not in (None, 0, -9):
                    role.check()
            assert time.monotonic() < deadline, (
                f"not {said(what)} after {seconds} s\n{self._worker.tail()}\n{self._delay.tail()}\n{self._projector.tail()}"
            )
            time.sleep(POLL_SECONDS)

    def settle(self) -> None:
        consumer = Consumer(
            {"bootstrap.servers": self.settings.kafka.bootstrap_servers, "group.id": "unused"}
        )
        dispatch = {self.topics.dispatch("default", priority): priority for priority in Priority}
        readers = {
            self.topics.worker_group("default", priority): (topic,) for topic, priority in dispatch.items()
        }
        readers[self.topics.projector_group] = projected_topics(self.settings)
        readers[self.topics.delay_group] = waiting_topics(self.settings)
        read = {topic for topics in readers.values() for topic in topics}
        behind: list[str] = []

        def committed() -> bool:
            ends = {topic: self._ends(consumer, topic) for topic in sorted(read)}
            behind[:] = [
                f"{group} at {done} of {end} in {topic}/{number}"
                for group, topics in readers.items()
                for topic in topics
                for number, end in ends[topic].items()
                if (done := self._committed(group, (topic, number))) < end and end > 0
            ]
            return not behind

        try:
            self.wait_until(committed, lambda: f"settled: {'; '.join(behind)}")
        finally:
            consumer.close()

    def _committed(self, group: str, place: tuple[str, int]) -> int:
        topic, number = place
        reader = offsets.GroupTopic(group, topic)
        found = offsets.committed(self.settings.kafka, [reader], {topic: number + 1}, REQUEST_SECONDS)
        return found[reader].get(number, -1)

    # ---- roles -------------------------------------------------------------------------------------------

    def start_worker(self) -> None:
        self._worker.start()

    def stop_worker(self) -> None:
        assert self._worker.stop() == 0, self._worker.tail()

    def kill_worker(self) -> None:
        self._worker.kill()

    def start_delay(self) -> None:
        self._delay.start()

    def kill_delay(self) -> None:
        self._delay.kill()

    def start_projector(self) -> None:
        self._projector.start()

    def kill_projector(self) -> None:
        self._projector.kill()


def real_settings(servers: Any, keyspace: str) -> Settings:
    """Settings on the test servers, with topics and groups of their own."""
    return Settings.model_validate(
        {
            **COMMON_SETTINGS,
            "kafka": {
                "bootstrap_servers": servers.bootstrap_servers,
                "namespace": f"b{secrets.token_hex(4)}.",
                "session_timeout_ms": SESSION_TIMEOUT_MS,
            },
            "cassandra": {
                "contact_points": servers.contact_points,
                "port": servers.cassandra_port,
                "keyspace": keyspace,
            },
        }
    )
