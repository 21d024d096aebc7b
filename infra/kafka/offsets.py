"""Where consumer groups begin: committed offsets are read, and missing ones are seeded.

Invariant: an offset that a group has committed is never changed here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Literal, NamedTuple

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from taskline.infra.kafka.client import client_config, new_client, translated
from taskline.infra.kafka.requests import RETRY_SECONDS, ask, is_not_ready
from taskline.settings import KafkaSettings

Seed = Literal["earliest", "latest"]


class GroupTopic(NamedTuple):
    """A consumer group and a topic that it reads."""

    group: str
    topic: str


def committed(
    kafka: KafkaSettings,
    readers: Iterable[GroupTopic],
    partitions: Mapping[str, int],
    timeout_seconds: float,
) -> dict[GroupTopic, dict[int, int]]:
    """The committed offsets of each group on each of its topics; partitions without one are left out.

    Asked by a consumer of each group, which joins nothing: librdkafka's admin client crashes the process when the group's
    coordinator is not ready (librdkafka #5040), as on a cluster that has just started.

    Args:
        kafka: how to reach the log.
        readers: which group reads which topic.
        partitions: topic → number of partitions.
        timeout_seconds: for all groups together.

    Raises:
        Unavailable: no answer in time.
        TasklineError: the broker refused; chained.
    """
    deadline = time.monotonic() + timeout_seconds
    asked = tuple(readers)
    with ExitStack() as consumers:
        # All first, so that they connect at the same time.
        outsiders = {
            group: consumers.enter_context(_outsider(kafka, group))
            for group in dict.fromkeys(reader.group for reader in asked)
        }
        found: dict[GroupTopic, dict[int, int]] = {reader: {} for reader in asked}
        for group, consumer in outsiders.items():
            topics = [reader.topic for reader in asked if reader.group == group]
            for place in _committed(consumer, topics, partitions, deadline):
                found[GroupTopic(group, place.topic)][place.partition] = place.offset
        return found


@contextmanager
def _outsider(kafka: KafkaSettings, group: str) -> Iterator[Consumer]:
    """A consumer that knows its group and never joins it."""
    config = client_config(kafka, client_id="taskline-admin") | {
        "group.id": group,
        "enable.auto.commit": False,
    }
    consumer = new_client(Consumer, config)
    try:
        yield consumer
    finally:
        consumer.close()


def _committed(
    consumer: Consumer, topics: Iterable[str], partitions: Mapping[str, int], deadline: float
) -> list[TopicPartition]:
    places = [TopicPartition(topic, number) for topic in topics for number in range(partitions[topic])]
    while True:
        left = max(RETRY_SECONDS, deadline - time.monotonic())
        try:
            answers = _checked(consumer.committed(places, timeout=left))
        except KafkaException as error:
            if not is_not_ready(error) or time.monotonic() >= deadline:
                raise translated(error, f"reading group offsets on {places[0].topic}") from error
            time.sleep(RETRY_SECONDS)
        else:
            return [each for each in answers if each.offset >= 0]


def _checked(places: list[TopicPartition]) -> list[TopicPartition]:
    for place in places:
        if place.error is not None:
            raise KafkaException(place.error)
    return places


def seed_offsets(
    admin: AdminClient,
    seeds: Mapping[GroupTopic, Seed | None],
    partitions: Mapping[str, int],
    timeout_seconds: float,
) -> list[GroupTopic]:
    """Commit a first offset on every partition for each reader.

    Args:
        admin: the client to ask with.
        seeds: where each begins; none of them has an offset. None: only if its topic is empty, so that there is nothing
            to choose.
        partitions: topic → number of partitions.
        timeout_seconds: for each round of requests.

    Returns:
        Those that would need a choice; if there is one, nothing was changed.
    """
    if not seeds:
        return []
    topics = sorted({reader.topic for reader in seeds})
    earliest = _bounds(admin, topics, partitions, OffsetSpec.earliest(), timeout_seconds)
    latest = _bounds(admin, topics, partitions, OffsetSpec.latest(), timeout_seconds)
    refused = [
        reader
        for reader, seed in seeds.items()
        if seed is None and earliest[reader.topic] != latest[reader.topic]
    ]
    if refused:
        return refused
    places: dict[str, list[TopicPartition]] = {}
    for reader, seed in seeds.items():
        begin = (latest if seed == "latest" else earliest)[reader.topic]
        places.setdefault(reader.group, []).extend(
            TopicPartition(reader.topic, number, offset) for number, offset in begin.items()
        )
    begins = {group: ConsumerGroupTopicPartitions(group, each) for group, each in places.items()}
    ask(
        lambda seconds: {
            group: admin.alter_consumer_group_offsets([begin], request_timeout=seconds)[group]
            for group, begin in begins.items()
        },
        "seeding group offsets",
        timeout_seconds,
    )
    return []


def _bounds(
    admin: AdminClient,
    topics: list[str],
    partitions: Mapping[str, int],
    spec: OffsetSpec,
    timeout_seconds: float,
) -> dict[str, dict[int, int]]:
    """Topic → partition → its first (or end) offset."""
    wanted = {TopicPartition(topic, number): spec for topic in topics for number in range(partitions[topic])}
    answers = ask(
        lambda seconds: admin.list_offsets(wanted, request_timeout=seconds),
        "reading topic offsets",
        timeout_seconds,
    )
    found: dict[str, dict[int, int]] = {topic: {} for topic in topics}
    for place, answer in answers.items():
        found[place.topic][place.partition] = answer.offset
    return found
