"""Real servers for the tests that need them, and names of their own for each test.

Servers come, in this order, from an external address (TASKLINE_TEST_KAFKA, TASKLINE_TEST_CASSANDRA as host:port), from
Docker through testcontainers (TASKLINE_TEST_BACKEND=docker), or from the local JVM stack. Where none can be had, such tests are
skipped with the reason; with CI set they fail.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import hypothesis
import pytest

from taskline.settings import Settings

# A time-out of an example says how busy the machine is.
hypothesis.settings.register_profile("taskline", deadline=None)
hypothesis.settings.load_profile("taskline")


@dataclass(frozen=True, kw_only=True)
class Servers:
    bootstrap_servers: str
    contact_points: tuple[str, ...]
    cassandra_port: int


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    from backends import NoServers, provide

    try:
        with provide() as found:
            yield Servers(
                bootstrap_servers=found.bootstrap_servers,
                contact_points=found.contact_points,
                cassandra_port=found.cassandra_port,
            )
    except NoServers as reason:
        if os.environ.get("CI"):
            pytest.fail(f"CI needs real servers: {reason}")
        pytest.skip(f"no Kafka and Cassandra: {reason}")


@pytest.fixture(scope="session")
def keyspace() -> str:
    return f"test_{secrets.token_hex(4)}"


@pytest.fixture
def settings(servers: Servers, keyspace: str) -> Iterator[Settings]:
    """Settings on the real servers, with topics and groups of the test's own, which go when the test is over."""
    made = make_settings(servers, keyspace)
    yield made
    delete_topics(made)


def delete_topics(settings: Settings) -> None:
    """Delete whatever is in the settings' namespace: thousands of left-over partitions bring a small broker down."""
    from confluent_kafka import KafkaException

    from taskline.infra.kafka.requests import admin_client

    # A test may have stopped its broker.
    with suppress(KafkaException), admin_client(settings.kafka) as admin:
        listed = admin.list_topics(timeout=30).topics
        names = [name for name in listed if name.startswith(settings.kafka.namespace)]
        for deleted in admin.delete_topics(names).values() if names else ():
            deleted.result(30)


def make_settings(servers: Servers, keyspace: str, **sections: dict[str, object]) -> Settings:
    values: dict[str, dict[str, object]] = {
        "kafka": {
            "bootstrap_servers": servers.bootstrap_servers,
            "namespace": f"t{secrets.token_hex(4)}.",
            "session_timeout_ms": 6_000,
        },
        "topics": {"dispatch_partitions": 3, "lanes": 3, "dlq_partitions": 1, "delay_partitions": 1},
        "delay": {"tiers": ("200ms", "1s", "5s")},
        # Tests of keys turn it on.
        "api": {"auth": "off"},
        "cassandra": {
            "contact_points": servers.contact_points,
            "port": servers.cassandra_port,
            "keyspace": keyspace,
        },
    }
    for section, changes in sections.items():
        values.setdefault(section, {}).update(changes)
    return Settings.model_validate(values)


@pytest.fixture
def topics_created(settings: Settings) -> Settings:
    from taskline.infra.kafka.admin import create_topics

    create_topics(settings)
    return settings


@pytest.fixture(scope="session")
def view_ready(servers: Servers, keyspace: str) -> None:
    from taskline.state.migrations import migrate

    migrate(make_settings(servers, keyspace))
