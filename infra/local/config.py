"""What a local stack is to be: frozen values with their units, defaults and reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from taskline.infra.local.errors import InvalidStackConfig

ServiceName = Literal["kafka", "cassandra"]
SERVICES: tuple[ServiceName, ...] = get_args(ServiceName)

DEFAULT_DIRECTORY = Path(".taskline") / "local"

# The smallest heaps that carry the tests without long collections.
KAFKA_HEAP_MB = 512
CASSANDRA_HEAP_MB = 1024

# Cassandra alone needs 10 s on an idle machine; on a busy 2-core one ten times that is normal.
START_TIMEOUT_S = 180.0

# A clean stop takes 1 to 5 s, several times that on a busy machine; after this the process is killed. Its acknowledged
# data is in the kernel's hands by then.
STOP_GRACE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class KafkaConfig:
    """The Kafka broker of a stack."""

    # Client port on 127.0.0.1; None = any free one, kept over restarts.
    port: int | None = None
    # Java heap in MB.
    heap_mb: int = KAFKA_HEAP_MB
    # Broker properties to set beside or instead of those in kafka-server.properties.
    overrides: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CassandraConfig:
    """The Cassandra node of a stack."""

    # Native-protocol port on 127.0.0.1; None = any free one, kept over restarts.
    port: int | None = None
    # Java heap in MB.
    heap_mb: int = CASSANDRA_HEAP_MB
    # Top-level keys to set beside or instead of those in cassandra.yaml.
    overrides: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """A local stack."""

    # The stack's folder; None = `.taskline/local` here, or a temporary folder if the stack is ephemeral.
    directory: Path | None = None
    # Whether the stack ends, with its folder, at stop or when this process ends, however it ends.
    ephemeral: bool = False
    # Which servers belong to it.
    services: tuple[ServiceName, ...] = SERVICES
    kafka: KafkaConfig = field(default_factory=KafkaConfig)
    cassandra: CassandraConfig = field(default_factory=CassandraConfig)
    # How long all servers together may take until they answer, in seconds; downloads do not count.
    start_timeout_s: float = START_TIMEOUT_S
    # How long a server may take to stop before it is killed, in seconds.
    stop_grace_s: float = STOP_GRACE_S

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            InvalidStackConfig: An unknown server, the same port twice, an ephemeral stack in a given folder, …
        """
        if not self.services or len(set(self.services) & set(SERVICES)) != len(self.services):
            raise InvalidStackConfig(
                f"services must be some of {', '.join(SERVICES)}, each once; got {self.services!r}"
            )
        if self.ephemeral and self.directory is not None:
            raise InvalidStackConfig(
                "an ephemeral stack makes a folder of its own and removes it: give a directory or ephemeral, not both"
            )
        if self.kafka.port is not None and self.kafka.port == self.cassandra.port:
            raise InvalidStackConfig(f"Kafka and Cassandra cannot both listen on port {self.kafka.port}")
        if min(self.kafka.heap_mb, self.cassandra.heap_mb) <= 0:
            raise InvalidStackConfig("a heap must be above 0 MB")
        if self.start_timeout_s <= 0 or self.stop_grace_s < 0:
            raise InvalidStackConfig("the start time-out must be above 0 s, the stop's grace not below")
