"""Kafka clients: topics, appends, type registrations."""

from __future__ import annotations

from taskline.infra.kafka.admin import check_topology, create_topics, describe_topics
from taskline.infra.kafka.asynclog import KafkaLog
from taskline.infra.kafka.client import client_config
from taskline.infra.kafka.lifecycle import LifecycleLog
from taskline.infra.kafka.publisher import Publisher

__all__ = [
    "KafkaLog",
    "LifecycleLog",
    "Publisher",
    "check_topology",
    "client_config",
    "create_topics",
    "describe_topics",
]
