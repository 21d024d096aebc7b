"""Where consumer groups begin: committed offsets are read, and missing ones are seeded.

Invariant: an offset that a group has committed is never changed here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from taskline.infra.kafka.client import client_config, new_client, translated
from taskline.infra.kafka.requests import RETRY_SECONDS, ask, is_not_ready
from taskline.settings import KafkaSettings

Seed = Literal["earliest", "latest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedAt:
    """Where a group without offsets begins."""

    topic: str
    # None: only if the topic is empty, so that there is nothing to choose.
    seed: Seed | None


def committed(
    kafka: KafkaSettings, groups: Mapping[str, str], partitions: Mapping[str, int], timeout_seconds: float
) -> dict[str, dict[int, int]]:
    """The committed offsets of each group on its topic; partitions without one are left out.

    Asked by a consumer of each group, which joins nothing: librdkafka's admin client crashes the process when the group's
    coordinator is not ready (librdkafka #5040), as on a cluster that has just started.

    Args:
        kafka: how to reach the log.
        groups: group → topic.
        partitions: topic → number of partitions.
        timeout_seconds: for all groups together.

    Raises:
        Unavailable: no answer in time.
        TasklineError: the broker refused; chained.
    """
    deadline = time.monotonic() + timeout_seconds
    with ExitStack() as consumers:
        # All first, so that they connect at the same time.
        asked = {group: consumers.enter_context(_outsider(kafka, group)) for group in groups}
        return {
            group: _committed(consumer, groups[group], partitions[groups[group]], deadline)
            for group, consumer in asked.items()
        }


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


def _committed(consumer: Consumer, topic: str, partitions: int, deadline: float) -> dict[int, int]:
    places = [TopicPartition(topic, number) for number in range(partitions)]
    while True:
        left = max(RETRY_SECONDS, deadline - time.monotonic())
        try:
            answers = _checked(consumer.committed(places, timeout=left))
        except KafkaException as error:
            if not is_not_ready(error) or time.monotonic() >= deadline:
                raise translated(error, f"reading group offsets on {topic}") from error
            time.sleep(RETRY_SECONDS)
        else:
            return {each.partition: each.offset for each in answers if each.offset >= 0}


def _checked(places: list[TopicPartition]) -> list[TopicPartition]:
    for place in places:
        if place.error is not None:
            raise KafkaException(place.error)
    return places


def seed_offsets(
    admin: AdminClient, seeds: Mapping[str, SeedAt], partitions: Mapping[str, int], timeout_seconds: float
) -> list[str]:
    """Commit a first offset on every partition for each group.

    Args:
        admin: the client to ask with.
        seeds: group → where it begins; none of them has an offset on its topic.
        partitions: topic → number of partitions.
        timeout_seconds: for each round of requests.

    Returns:
        The groups that would need a choice; if there is one, nothing was changed.
    """
    if not seeds:
        return []
    topics = sorted({at.topic for at in seeds.values()})
    earliest = _bounds(admin, topics, partitions, OffsetSpec.earliest(), timeout_seconds)
    latest = _bounds(admin, topics, partitions, OffsetSpec.latest(), timeout_seconds)
    refused = [
        group for group, at in seeds.items() if at.seed is None and earliest[at.topic] != latest[at.topic]
    ]
    if refused:
        return refused
    begins = {}
    for group, at in seeds.items():
        begin = (latest if at.seed == "latest" else earliest)[at.topic]
        places = [TopicPartition(at.topic, number, offset) for number, offset in begin.items()]
        begins[group] = ConsumerGroupTopicPartitions(group, places)
    ask(
        lambda seconds: {
            group: admin.alter_consumer_group_offsets([places], request_timeout=seconds)[group]
            for group, places in begins.items()
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
