"""What every Kafka client of Taskline is configured with, and how librdkafka's errors become Taskline's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from taskline.errors import InvalidSettings, TasklineError, Unavailable
from taskline.infra.kafka.quiet import kafka_logger
from taskline.settings import KafkaSettings

# librdkafka's default waits up to 10 s between attempts; a broker that restarts is back in about 5.
_RECONNECT_BACKOFF_MS = 100
_RECONNECT_BACKOFF_MAX_MS = 1_000
# A host that swallows packets is given up after this, not after librdkafka's 30 s.
_CONNECT_TIMEOUT_MS = 10_000

T = TypeVar("T")

# A partition's leader or a group's coordinator is changing, or has changed and the client has not learnt of it yet.
MOVING = frozenset(
    {
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.UNKNOWN_LEADER_EPOCH,
    }
)
# The client can't reach, or can't keep, a working connection: somebody must look at the server, not at the input.
_UNAVAILABLE = MOVING | frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._ALL_BROKERS_DOWN,
        # "No leaders found": the broker that leads the partition is away.
        KafkaError._NOENT,
        KafkaError._RESOLVE,
        KafkaError._WAIT_COORD,
        KafkaError._SSL,
        KafkaError._AUTHENTICATION,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
    }
)


def client_config(kafka: KafkaSettings, *, client_id: str) -> dict[str, Any]:
    """The librdkafka settings that all clients share.

    Log lines are queued by librdkafka and written when the client is polled, on the polling thread.
    """
    config: dict[str, Any] = {
        "bootstrap.servers": kafka.bootstrap_servers,
        "client.id": client_id,
        "security.protocol": kafka.security_protocol,
        "reconnect.backoff.ms": _RECONNECT_BACKOFF_MS,
        "reconnect.backoff.max.ms": _RECONNECT_BACKOFF_MAX_MS,
        "socket.connection.setup.timeout.ms": _CONNECT_TIMEOUT_MS,
        "socket.keepalive.enable": True,
        # Brokers close idle connections; that is no news.
        "log.connection.close": False,
        # Taskline has its own metrics.
        "statistics.interval.ms": 0,
        "enable.metrics.push": False,
        "logger": kafka_logger(),
    }
    optional = {
        "sasl.mechanism": kafka.sasl_mechanism,
        "sasl.username": kafka.sasl_username,
        "sasl.password": kafka.sasl_password.get_secret_value() if kafka.sasl_password else None,
        "ssl.ca.location": kafka.ssl_ca_location,
    }
    return config | {name: value for name, value in optional.items() if value is not None}


def new_client(factory: Callable[[dict[str, Any]], T], config: dict[str, Any]) -> T:
    """Construct a client.

    Raises:
        InvalidSettings: librdkafka refuses the configuration (its message names the property).
    """
    try:
        return factory(config)
    except (KafkaException, ValueError, TypeError) as error:
        raise InvalidSettings(f"Kafka client: {reason_of(error)}") from error


def reason_of(error: BaseException | KafkaError) -> str:
    """An error of the client in words."""
    cause = kafka_error(error)
    return str(error) if cause is None else f"{cause.str()} ({cause.name()})"


def kafka_error(error: BaseException | KafkaError) -> KafkaError | None:
    """The KafkaError inside a KafkaException (or itself), None when there is none."""
    if isinstance(error, KafkaError):
        return error
    if isinstance(error, KafkaException) and error.args and isinstance(error.args[0], KafkaError):
        return error.args[0]
    return None


def translated(error: BaseException, doing: str) -> TasklineError:
    """The Taskline error for a failed request: Unavailable when the server does not answer.

    Args:
        error: what the client raised.
        doing: what was attempted, e.g. "listing topics".
    """
    cause = kafka_error(error)
    if isinstance(error, TimeoutError) or (cause is not None and cause.code() in _UNAVAILABLE):
        return Unavailable(f"Kafka did not answer while {doing}: {reason_of(error) or 'timed out'}")
    return TasklineError(f"{doing} failed: {reason_of(error)}")
