"""Where the tests' Kafka and Cassandra come from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass


class NoServers(Exception):
    """Servers can't be had here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Found:
    bootstrap_servers: str
    contact_points: tuple[str, ...]
    cassandra_port: int


@contextmanager
def provide() -> Iterator[Found]:
    """Servers for the length of the block: external, Docker's, or children on the JVM."""
    kafka, cassandra = os.environ.get("TASKLINE_TEST_KAFKA"), os.environ.get("TASKLINE_TEST_CASSANDRA")
    if kafka and cassandra:
        host, _, port = cassandra.rpartition(":")
        yield Found(bootstrap_servers=kafka, contact_points=(host,), cassandra_port=int(port))
    elif os.environ.get("TASKLINE_TEST_BACKEND") == "docker":
        with _docker() as found:
            yield found
    else:
        with _jvm() as found:
            yield found


@contextmanager
def _jvm() -> Iterator[Found]:
    from taskline.infra.local import LocalStack, LocalStackError, StackConfig

    with ExitStack() as cleanup:
        try:
            stack = cleanup.enter_context(LocalStack(StackConfig(ephemeral=True)).running())
        except LocalStackError as error:
            raise NoServers(str(error)) from error
        yield Found(
            bootstrap_servers=stack.bootstrap_servers,
            contact_points=tuple(stack.contact_points),
            cassandra_port=stack.cassandra_port,
        )


@contextmanager
def _docker() -> Iterator[Found]:
    from testcontainers.cassandra import CassandraContainer
    from testcontainers.kafka import KafkaContainer

    with ExitStack() as cleanup:
        try:
            kafka = cleanup.enter_context(KafkaContainer("confluentinc/cp-kafka:8.1.0").with_kraft())
            cassandra = cleanup.enter_context(CassandraContainer("cassandra:5.0"))
        except Exception as error:
            raise NoServers(f"Docker: {error}") from error
        host, port = cassandra.get_contact_points()[0]
        yield Found(
            bootstrap_servers=kafka.get_bootstrap_server(),
            contact_points=(str(host),),
            cassandra_port=int(port),
        )
