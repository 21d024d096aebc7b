"""Where consumer groups begin: committed offsets are read, and missing ones are seeded.

Invariant: an offset that a group has committed is never changed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from taskline.infra.kafka.requests import ask

Seed = Literal["earliest", "latest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedAt:
    """Where a group without offsets begins."""

    topic: str
    # None: only if the topic is empty, so that there is nothing to choose.
    seed: Seed | None


def committed(
    admin: AdminClient, groups: Mapping[str, str], partitions: Mapping[str, int], timeout_seconds: float
) -> dict[str, dict[int, int]]:
    """The committed offsets of each group on its topic; partitions without one are left out.

    Args:
        admin: the client to ask with.
        groups: group → topic.
        partitions: topic → number of partitions.
        timeout_seconds: for all requests together.
    """
    wanted = {
        group: ConsumerGroupTopicPartitions(
            group, [TopicPartition(topic, number) for number in range(partitions[topic])]
        )
        for group, topic in groups.items()
    }
    answers = ask(
        # The client takes one group a call.
        lambda seconds: {
            group: admin.list_consumer_group_offsets([places], request_timeout=seconds)[group]
            for group, places in wanted.items()
        },
        "reading group offsets",
        timeout_seconds,
    )
    return {
        group: {each.partition: each.offset for each in answer.topic_partitions if each.offset >= 0}
        for group, answer in answers.items()
    }


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
