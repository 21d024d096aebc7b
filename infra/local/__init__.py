"""Kafka and Cassandra on this machine, without Docker: `taskline local up`, and the same as a library for tests."""

from __future__ import annotations

from taskline.infra.local.config import CassandraConfig, KafkaConfig, ServiceName, StackConfig
from taskline.infra.local.errors import LocalStackError, NotAvailable
from taskline.infra.local.registry import RegistryConfig, SchemaRegistry
from taskline.infra.local.stack import LocalStack
from taskline.infra.local.status import ServiceStatus, StackStatus

__all__ = [
    "CassandraConfig",
    "KafkaConfig",
    "LocalStack",
    "LocalStackError",
    "NotAvailable",
    "RegistryConfig",
    "SchemaRegistry",
    "ServiceName",
    "ServiceStatus",
    "StackConfig",
    "StackStatus",
]
