"""Records for the delay role on a real Kafka, and what came out of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from confluent_kafka import Consumer, Message, Producer, TopicPartition

from taskline.infra.log import HEADER_DUE, HEADER_TARGET, OutRecord
from taskline.infra.tiers import Tiers, delayed
from taskline.infra.topics import Topics, waiting_topics
from taskline.schemas.events import Priority
from taskline.settings import Settings

_HEADER_NUMBER = "n"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def target(settings: Settings) -> str:
    return Topics(namespace=settings.kafka.namespace).dispatch("default", Priority.HIGH)


@dataclass(frozen=True)
class Delayed:
    """A record that is to arrive."""

    number: int
    delay_ms: int
    # Straight into a tier, as a retry; False: by way of tasks.scheduled.
    retry: bool = False
    value: bytes = b""

    def record(self, settings: Settings) -> OutRecord:
        topics = Topics(namespace=settings.kafka.namespace)
        now = now_ms()
        due = now + self.delay_ms
        headers = {
            _HEADER_NUMBER: b"%d" % self.number,
            "taskline-task-id": self.number.to_bytes(16),
            HEADER_DUE: b"%d" % due,
        }
        value = self.value or b"\x00value %d" % self.number
        record = OutRecord(topic=target(settings), key=b"key %d" % self.number, value=value, headers=headers)
        if self.retry:
            tiers = Tiers.of(settings.delay.tiers)
            return delayed(record, due_ms=due, now_ms=now, topics=topics, tiers=tiers)
        return OutRecord(
            topic=topics.scheduled,
            key=record.key,
            value=value,
            headers={**headers, HEADER_TARGET: record.topic.encode()},
        )


class Delivery:
    """Produces, and follows what arrives on the target."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        servers = settings.kafka.bootstrap_servers
        self.producer = Producer({"bootstrap.servers": servers, "linger.ms": 1, "acks": "all"})
        self.failed = 0
        self.arrived: list[Message] = []
        self._consumer = Consumer(
            {"bootstrap.servers": servers, "group.id": "unused", "enable.auto.commit": False}
        )
        topic = target(settings)
        self._consumer.assign(
            [TopicPartition(topic, number, 0) for number in range(settings.topics.dispatch_partitions)]
        )

    def close(self) -> None:
        self._consumer.close()

    def send(self, waiting: Iterable[Delayed]) -> None:
        for each in waiting:
            self.send_raw(each.record(self.settings))
        self.producer.flush(60)

    def send_raw(self, record: OutRecord, partition: int = -1) -> None:
        self.producer.produce(
            record.topic,
            record.value,
            record.key,
            partition,
            self._acknowledged,
            headers=list(record.headers.items()),
        )
        self.producer.poll(0)

    def _acknowledged(self, error: object, message: Message) -> None:
        self.failed += error is not None

    def follow(self, seconds: float) -> None:
        """Read what arrives for so long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            message = self._consumer.poll(min(left, 0.2))
            # Errors of a broker that restarts pass.
            if message is not None and message.error() is None:
                self.arrived.append(message)

    def follow_until(self, count: int, seconds: float) -> None:
        """Read until so many different records have arrived."""
        deadline = time.monotonic() + seconds
        while len(self.counts()) < count and time.monotonic() < deadline:
            self.follow(0.3)

    def counts(self) -> Counter[int]:
        return Counter(int(dict(message.headers())[_HEADER_NUMBER]) for message in self.arrived)

    def lateness_ms(self) -> list[int]:
        return [message.timestamp()[1] - int(dict(message.headers())[HEADER_DUE]) for message in self.arrived]


def bounds(settings: Settings, topic: str) -> dict[int, tuple[int, int]]:
    """Partition → first and next offset."""
    consumer = Consumer({"bootstrap.servers": settings.kafka.bootstrap_servers, "group.id": "unused"})
    try:
        partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        return {
            number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=10)
            for number in partitions
        }
    finally:
        consumer.close()


def committed(settings: Settings, topics: Iterable[str] | None = None) -> dict[tuple[str, int], int]:
    """How far the delay group is."""
    group = Topics(namespace=settings.kafka.namespace).delay_group
    consumer = Consumer({"bootstrap.servers": settings.kafka.bootstrap_servers, "group.id": group})
    try:
        places = [
            TopicPartition(topic, number)
            for topic in topics or waiting_topics(settings)
            for number in consumer.list_topics(topic, timeout=10).topics[topic].partitions
        ]
        return {(each.topic, each.partition): each.offset for each in consumer.committed(places, timeout=10)}
    finally:
        consumer.close()
