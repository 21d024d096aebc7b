"""A consumer's offsets: where assigned partitions begin, and commits that never go back.

Invariant: only a partition that is owned is committed, and within one ownership never an older offset after a newer one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from taskline.errors import WrongTopology
from taskline.infra.kafka.client import reason_of, translated
from taskline.workers.intake import Commit, TopicPartition

log = structlog.get_logger(__name__)

# One request about offsets. Several attempts fit into the patience below.
_REQUEST_SECONDS = 10.0
# How long the offsets of an assignment are asked for, before the worker gives up loudly instead of owning partitions that it does not
# read; well below max.poll.interval.ms.
PATIENCE_SECONDS = 120.0
_PAUSE_SECONDS = 0.5
_SEED_COMMAND = "taskline topics create"


class Offsets:
    """The offsets of one consumer; used on its thread only."""

    def __init__(self, consumer: Consumer, group: str, topic: str) -> None:
        """Serve `consumer`, which reads `topic` for `group`."""
        self._consumer = consumer
        self._group = group
        self._topic = topic
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

    def commit(self, commits: Mapping[TopicPartition, Commit]) -> None:
        """Store progress, and wait for the broker's word; what is not owned, or older than what was stored, is left out.

        Raises:
            KafkaException: not stored.
        """
        owned = self._owned
        current = {
            name: each for name, each in commits.items() if each.offset >= owned.get(name, each.offset + 1)
        }
        if not current:
            return
        answers = self._consumer.commit(
            offsets=[
                KafkaPartition(name.topic, name.partition, each.offset, each.metadata)
                for name, each in current.items()
            ],
            asynchronous=False,
        )
        for answer in answers:
            if answer.error is not None:
                raise KafkaException(answer.error)
        owned.update((name, each.offset) for name, each in current.items())

    def forget(self, partitions: Collection[TopicPartition]) -> None:
        """Own these partitions no longer."""
        for name in partitions:
            self._owned.pop(name, None)

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
        """Partitions that were added to a topic which the group knows are read from their beginning."""
        metadata = self._consumer.list_topics(self._topic, timeout=_REQUEST_SECONDS).topics[self._topic]
        siblings = [TopicPartition(self._topic, number) for number in metadata.partitions]
        if not self._committed(siblings):
            raise WrongTopology(
                (f"group {self._group} has no offsets on topic {self._topic}",), _SEED_COMMAND
            )
        begin: dict[TopicPartition, Commit] = {}
        for name in missing:
            low, _ = self._consumer.get_watermark_offsets(
                KafkaPartition(name.topic, name.partition, OFFSET_BEGINNING), timeout=_REQUEST_SECONDS
            )
            log.info("new partition is read from its beginning", topic=name.topic, partition=name.partition)
            begin[name] = Commit(offset=low)
        return begin
