"""Asks the broker how far the projectors' group has come, through a client that has nothing in common with the one that consumes.

Not through librdkafka's admin client: its requests about groups abort the process when the broker goes away under
them (librdkafka #4605). A consumer that never subscribes asks the same over other paths, and is no member of the group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from confluent_kafka import Consumer, KafkaException, TopicPartition

from taskline.infra.kafka.client import client_config, new_client
from taskline.infra.topics import Topics, projected_topics
from taskline.processors.projection import Partition
from taskline.settings import Settings

# For each request; a look that takes longer is no look, and the next one comes soon.
_TIMEOUT_SECONDS = 5.0


class GroupWatch:
    """A look at the offsets of the projectors' group."""

    def __init__(self, settings: Settings, *, client_id: str) -> None:
        """Connect on the first look; `client_id` is for the broker's logs."""
        self._topics = projected_topics(settings)
        group = Topics(namespace=settings.kafka.namespace).projector_group
        config = client_config(settings.kafka, client_id=client_id)
        self._consumer = new_client(Consumer, config | {"group.id": group, "enable.auto.commit": False})

    def look(self, partitions: Collection[Partition] = ()) -> Mapping[Partition, tuple[int, int]] | None:
        """Committed offset (0: none) and end of each of these partitions, of all that are projected when none are named.

        None if the broker does not answer. Blocks for seconds at most.
        """
        try:
            return self._look(partitions)
        except KafkaException:
            return None
        finally:
            # Writes the log lines that librdkafka has queued.
            self._consumer.poll(0)

    def _look(self, partitions: Collection[Partition]) -> Mapping[Partition, tuple[int, int]]:
        places = [TopicPartition(*partition) for partition in partitions or self._all()]
        if not places:
            return {}
        committed = self._consumer.committed(places, timeout=_TIMEOUT_SECONDS)
        return {
            (each.topic, each.partition): (
                max(each.offset, 0),
                self._consumer.get_watermark_offsets(each, timeout=_TIMEOUT_SECONDS)[1],
            )
            for each in committed
        }

    def _all(self) -> list[Partition]:
        return [
            (topic, number)
            for topic in self._topics
            for number in self._consumer.list_topics(topic, timeout=_TIMEOUT_SECONDS).topics[topic].partitions
        ]
