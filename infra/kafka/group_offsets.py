"""A consumer's offsets: where assigned partitions begin, and commits that never go back.

Invariant: only a partition that is owned is committed, and within one ownership never an older offset after a newer one.

Progress is committed asynchronously. While a rebalance is under way the broker holds the member's JoinGroup back until all have joined, and
with it every later request on that connection: a commit then waits for seconds, and fails because its
generation is over. A thread that waited for it would read nothing meanwhile, although cooperative assignment lets it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from taskline.errors import WrongTopology
from taskline.infra.intake import Commit, TopicPartition
from taskline.infra.kafka.client import kafka_error, reason_of, translated

log = structlog.get_logger(__name__)

# One request about offsets. Several attempts fit into the patience below.
_REQUEST_SECONDS = 10.0
# How long the offsets of an assignment are asked for, before the worker gives up loudly instead of owning partitions that it does not
# read; well below max.poll.interval.ms.
PATIENCE_SECONDS = 120.0
_PAUSE_SECONDS = 0.5
# A group that is just joining answers a commit with these, and takes it a moment later.
_MOVING = frozenset(
    {
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.NOT_COORDINATOR,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.STALE_MEMBER_EPOCH,
    }
)
_MOVING_PAUSE_SECONDS = 0.2
FINAL_ATTEMPTS = 5
_SEED_COMMAND = "taskline topics create"


class Offsets:
    """The offsets of one consumer; used on its thread only."""

    def __init__(self, consumer: Consumer, group: str, *, unseeded: Collection[str] = ()) -> None:
        """Serve `consumer`, a member of `group`; topics that are `unseeded` begin at their beginning."""
        self._consumer = consumer
        self._unseeded = frozenset(unseeded)
        self._group = group
        # Commits that were sent and not answered, oldest first; the broker handles them in this order.
        self._under_way: deque[tuple[Mapping[TopicPartition, Commit], Callable[[Exception | None], None]]] = (
            deque()
        )
        # Owned partitions, with the highest offset that was committed since they are owned.
        self._owned: dict[TopicPartition, int] = {}

    def begin(
        self, partitions: Collection[TopicPartition], giving_up: Callable[[], bool]
    ) -> dict[TopicPartition, Commit]:
        """Own partitions; where each begins.

        Args:
            partitions: newly assigned ones.
            giving_up: asked between attempts; True ends them.

        Raises:
            Unavailable: Kafka gave no answer for PATIENCE_SECONDS.
            WrongTopology: the group has no offset on any partition of the topic.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                found = self._committed(partitions)
                missing = [name for name in partitions if name not in found]
                if missing:
                    found |= self._new_partitions(missing)
                break
            except KafkaException as error:
                if giving_up() or time.monotonic() > deadline:
                    raise translated(error, f"reading the offsets of group {self._group}") from error
                log.warning("offsets can't be read; trying again", group=self._group, error=reason_of(error))
                time.sleep(_PAUSE_SECONDS)
        self._owned.update((name, commit.offset) for name, commit in found.items())
        return found

    def send(
        self, commits: Mapping[TopicPartition, Commit], done: Callable[[Exception | None], None]
    ) -> None:
        """Begin to store progress; what is not owned, or older than what was stored, is left out.

        Args:
            commits: the progress.
            done: called while polling, with None or the reason why it was not stored.
        """
        current = self._newer(commits)
        if not current:
            done(None)
            return
        try:
            self._consumer.commit(offsets=_kafka(current), asynchronous=True)
        except KafkaException as error:
            done(error)
        else:
            self._under_way.append((current, done))

    def answered(self, error: KafkaError | None, partitions: Sequence[KafkaPartition]) -> None:
        """The client's answer to the oldest `send` (its on_commit)."""
        if not self._under_way:
            return
        current, done = self._under_way.popleft()
        failure = error or next((each.error for each in partitions if each.error is not None), None)
        if failure is None:
            self._stored(current)
            done(None)
        else:
            done(KafkaException(failure))

    def store(self, commits: Mapping[TopicPartition, Commit], *, attempts: int = FINAL_ATTEMPTS) -> None:
        """Store final commits, before their partitions go; waits for the broker.

        Raises:
            KafkaException: not stored.
        """
        current = self._newer(commits)
        for attempt in range(1, attempts + 1):
            if not current:
                return
            try:
                self._store(current)
                if self._under_way and self._behind(current):
                    # The client sent an earlier commit again, after a broken connection.
                    self._store(current)
            except KafkaException as error:
                cause = kafka_error(error)
                if cause is None or cause.code() not in _MOVING or attempt == attempts:
                    raise
                time.sleep(_MOVING_PAUSE_SECONDS)
            else:
                self._stored(current)
                return

    def forget(self, partitions: Collection[TopicPartition]) -> None:
        """Own these partitions no longer."""
        for name in partitions:
            self._owned.pop(name, None)

    def _newer(self, commits: Mapping[TopicPartition, Commit]) -> dict[TopicPartition, Commit]:
        owned = self._owned
        return {
            name: each for name, each in commits.items() if each.offset >= owned.get(name, each.offset + 1)
        }

    def _stored(self, commits: Mapping[TopicPartition, Commit]) -> None:
        for name, each in commits.items():
            if name in self._owned:
                self._owned[name] = max(self._owned[name], each.offset)

    def _store(self, commits: Mapping[TopicPartition, Commit]) -> None:
        for answer in self._consumer.commit(offsets=_kafka(commits), asynchronous=False):
            if answer.error is not None:
                raise KafkaException(answer.error)

    def _behind(self, commits: Mapping[TopicPartition, Commit]) -> bool:
        found = self._committed(commits)
        return any(name not in found or found[name].offset < each.offset for name, each in commits.items())

    def _committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Commit]:
        answers = self._consumer.committed(
            [KafkaPartition(name.topic, name.partition) for name in partitions], timeout=_REQUEST_SECONDS
        )
        found: dict[TopicPartition, Commit] = {}
        for answer in answers:
            if answer.error is not None:
                raise KafkaException(answer.error)
            if answer.offset >= 0:
                name = TopicPartition(answer.topic, answer.partition)
                found[name] = Commit(offset=answer.offset, metadata=answer.metadata or "")
        return found

    def _new_partitions(self, missing: Collection[TopicPartition]) -> dict[TopicPartition, Commit]:
        """Partitions that were added to a topic which the group knows are read from their beginning, and so is a topic without seeds."""
        for topic in sorted({name.topic for name in missing} - self._unseeded):
            metadata = self._consumer.list_topics(topic, timeout=_REQUEST_SECONDS).topics[topic]
            if not self._committed([TopicPartition(topic, number) for number in metadata.partitions]):
                raise WrongTopology((f"group {self._group} has no offsets on topic {topic}",), _SEED_COMMAND)
        begin: dict[TopicPartition, Commit] = {}
        for name in missing:
            low, _ = self._consumer.get_watermark_offsets(
                KafkaPartition(name.topic, name.partition, OFFSET_BEGINNING), timeout=_REQUEST_SECONDS
            )
            log.info("new partition is read from its beginning", topic=name.topic, partition=name.partition)
            begin[name] = Commit(offset=low)
        return begin


def _kafka(commits: Mapping[TopicPartition, Commit]) -> list[KafkaPartition]:
    return [
        KafkaPartition(name.topic, name.partition, each.offset, each.metadata)
        for name, each in commits.items()
    ]
