"""The log in memory: topics with partitions, offsets, timestamps and headers, and the groups that read them.

It keeps what Taskline's guarantees rest on: a record has its place before it is acknowledged, the order of a partition
is the order of appends, a key decides its partition, a topic that was not created refuses. It can be made to
fail as Kafka does (`fail_next`, `stop`, `start`).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from taskline.errors import DeliveryFailed
from taskline.infra.intake import TopicPartition
from taskline.infra.log import InRecord, OutRecord, Position
from taskline.infra.role import Clock
from taskline.infra.topics import TopicSpec
from taskline.testing.groups import MemoryGroup

# Kafka's own default for max.message.bytes, for topics that are created without one.
DEFAULT_MAX_MESSAGE_BYTES = 1_048_588
# What Kafka counts besides key, value and headers (record batch v2: 61 bytes and a few varints).
_RECORD_OVERHEAD_BYTES = 70


class Fault(Enum):
    """How an append goes wrong."""

    # The broker says no: the record is certainly not in the log (DeliveryFailed).
    REFUSED = "refused"
    # The record is in the log, its acknowledgement is lost (DeliveryUnknown).
    ACK_LOST = "ack lost"
    # The record never arrived, which the producer can't tell from a lost acknowledgement (DeliveryUnknown).
    RECORD_LOST = "record lost"


@dataclass(kw_only=True, slots=True)
class _Topic:
    max_message_bytes: int
    partitions: list[list[InRecord]]
    # Where the next record without a key goes.
    next_keyless: int = 0


@dataclass(kw_only=True, slots=True)
class _Pending:
    fault: Fault
    topic: str | None
    times: int = field(default=1)


class MemoryBroker:
    """Topics and groups of one cluster, in this process."""

    def __init__(self, clock: Clock) -> None:
        """Stamp records by `clock`."""
        self._clock = clock
        self._topics: dict[str, _Topic] = {}
        self._groups: dict[str, MemoryGroup] = {}
        self._listeners: list[Callable[[], None]] = []
        self._faults: deque[_Pending] = deque()
        self._journal: list[InRecord] = []
        self._available = True

    # ---- topics ------------------------------------------------------------------------------------------

    def create_topic(
        self, name: str, partitions: int = 1, *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    ) -> None:
        """Create a topic.

        Raises:
            ValueError: there is one of that name.
        """
        if name in self._topics:
            raise ValueError(f"topic {name!r} exists")
        self._topics[name] = _Topic(
            max_message_bytes=max_message_bytes, partitions=[[] for _ in range(partitions)]
        )

    def create_topics(self, specs: Iterable[TopicSpec]) -> None:
        """Create topics as `taskline.infra.topics.topology` declares them."""
        for spec in specs:
            limit = int(spec.config.get("max.message.bytes", DEFAULT_MAX_MESSAGE_BYTES))
            self.create_topic(spec.name, spec.partitions, max_message_bytes=limit)

    def topics(self) -> tuple[str, ...]:
        """The names of the topics, sorted."""
        return tuple(sorted(self._topics))

    def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """The partitions of a topic.

        Raises:
            KeyError: no such topic.
        """
        return tuple(TopicPartition(topic, number) for number in range(len(self._topics[topic].partitions)))

    # ---- records -----------------------------------------------------------------------------------------

    def append(self, record: OutRecord) -> Position:
        """Put a record into the log at once, past all injected faults (`MemoryLog` is what suffers those).

        Raises:
            DeliveryFailed: no such topic or partition, or the record is too large for the topic.
        """
        topic = self._topics.get(record.topic)
        if topic is None:
            raise DeliveryFailed(f"unknown topic {record.topic!r}")
        size = _size_of(record)
        if size > topic.max_message_bytes:
            raise DeliveryFailed(
                f"{size} bytes are too many for {record.topic!r} ({topic.max_message_bytes})"
            )
        number = self._partition_for(record, topic)
        if not 0 <= number < len(topic.partitions):
            raise DeliveryFailed(f"{record.topic!r} has no partition {number}")
        partition = topic.partitions[number]
        position = Position(topic=record.topic, partition=number, offset=len(partition))
        stored = InRecord(
            position=position,
            value=record.value,
            key=record.key,
            headers=dict(record.headers),
            timestamp_ms=self._clock.now_ms(),
        )
        partition.append(stored)
        self._journal.append(stored)
        self._notify()
        return position

    def read(self, partition: TopicPartition, offset: int, limit: int) -> Sequence[InRecord]:
        """Up to `limit` records of a partition from `offset` on."""
        name, number = partition
        return self._topics[name].partitions[number][offset : offset + limit]

    def end_offset(self, partition: TopicPartition) -> int:
        """The offset that the partition's next record gets."""
        name, number = partition
        return len(self._topics[name].partitions[number])

    def records(self, topic: str | None = None) -> tuple[InRecord, ...]:
        """The records of a topic, or of all, in the order of their appends.

        Raises:
            KeyError: no such topic.
        """
        if topic is None:
            return tuple(self._journal)
        if topic not in self._topics:
            raise KeyError(topic)
        return tuple(record for record in self._journal if record.position.topic == topic)

    def _partition_for(self, record: OutRecord, topic: _Topic) -> int:
        if record.partition is not None:
            return record.partition
        count = len(topic.partitions)
        if record.key is None:
            topic.next_keyless = (topic.next_keyless + 1) % count
            return topic.next_keyless
        # librdkafka's "consistent" partitioner.
        return zlib.crc32(record.key) % count

    # ---- readers -----------------------------------------------------------------------------------------

    def group(self, name: str) -> MemoryGroup:
        """The consumer group of that name; made on first use."""
        if name not in self._groups:
            self._groups[name] = MemoryGroup(name, self.partitions)
        return self._groups[name]

    def partition_lag(self, group: str, partition: TopicPartition) -> int:
        """How many records of a partition a group has not committed."""
        return self.end_offset(partition) - self.group(group).committed(partition).offset

    def lag(self, group: str, topic: str) -> int:
        """How many records of a topic a group has not committed."""
        return sum(self.partition_lag(group, partition) for partition in self.partitions(topic))

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each append and when the broker comes back; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _notify(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    # ---- faults ------------------------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """False between `stop` and `start`."""
        return self._available

    def stop(self) -> None:
        """Go away: nothing is appended, read or committed until `start`; what is in the log stays."""
        self._available = False

    def start(self) -> None:
        """Come back."""
        self._available = True
        self._notify()

    def fail_next(self, fault: Fault, *, topic: str | None = None, times: int = 1) -> None:
        """Let the next `times` appends (to `topic`, if given) through a `MemoryLog` go wrong."""
        self._faults.append(_Pending(fault=fault, topic=topic, times=times))

    def take_fault(self, topic: str) -> Fault | None:
        """The fault that an append to `topic` suffers now, used up by asking."""
        for pending in self._faults:
            if pending.topic in (None, topic):
                pending.times -= 1
                if pending.times == 0:
                    self._faults.remove(pending)
                return pending.fault
        return None


def _size_of(record: OutRecord) -> int:
    headers = sum(len(name) + len(value) for name, value in record.headers.items())
    return len(record.value or b"") + len(record.key or b"") + headers + _RECORD_OVERHEAD_BYTES
