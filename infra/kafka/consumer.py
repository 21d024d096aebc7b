"""How the consumers of worker groups and of the delay group are configured, and what their errors mean."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from confluent_kafka import KafkaError

from taskline.infra.kafka.client import client_config
from taskline.settings import KafkaSettings

_MS = 1_000
# When the client's own queue is full it looks again after this; the default of 1 s would be a stall of 1 s.
_FETCH_QUEUE_BACKOFF_MS = 10
# Brokers take a member for dead after session.timeout.ms without a heartbeat; three chances within it, as Kafka advises.
_HEARTBEATS_PER_SESSION = 3
_MAX_HEARTBEAT_MS = 3_000
# A thread that hands partitions over polls nothing for up to the grace period and the calls around it; beyond
# max.poll.interval.ms the group would take the partitions away meanwhile.
_MIN_POLL_INTERVAL_MS = 300_000
_POLL_INTERVAL_MARGIN_MS = 60_000


@dataclass(frozen=True, kw_only=True, slots=True)
class IntakeOptions:
    """How one intake reads."""

    # Records that are handed over in one call, at most.
    batch: int
    # How long the sink may take to finish with partitions that move.
    grace_seconds: float
    # A broker answers a fetch as soon as there is a record, so this costs no latency. It bounds how long a partition that
    # was just assigned or resumed waits behind a fetch that was sent without it.
    fetch_wait_ms: int = 100
    # The client's own queue: records per partition that it keeps at hand, and the bytes of all of them together, which
    # bound the process's memory.
    queued_messages: int = 2_000
    queued_kbytes: int = 16 * 1_024
    # Most bytes that one fetch brings of one partition (a larger record still comes).
    fetch_bytes: int = 1_048_576
    # Topics that are read from their beginning when the group has no offset on them; on any other that is an error.
    unseeded: frozenset[str] = frozenset()


class ErrorKind(Enum):
    """What to do about an error that a consumer reports."""

    # The client goes on by itself.
    PASSING = auto()
    # The committed offset is not in the log: nobody but an operator can say where to go on.
    OFFSET_LOST = auto()
    # The topic does not exist, or not yet.
    NO_TOPIC = auto()
    # It will not get better by waiting.
    FATAL = auto()


_FATAL = frozenset(
    {
        KafkaError._FATAL,
        KafkaError._INVALID_ARG,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
        KafkaError.INVALID_SESSION_TIMEOUT,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.UNSUPPORTED_VERSION,
    }
)
_NO_TOPIC = frozenset(
    {KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART}
)


def kind_of(error: KafkaError) -> ErrorKind:
    """What to do about a consumer's error.

    Transport, time-outs, elections, a restarting coordinator, and max.poll.interval.ms exceeded (the partitions are lost, and the
    next poll joins again) pass by themselves.
    """
    code = error.code()
    if code == KafkaError._AUTO_OFFSET_RESET:
        return ErrorKind.OFFSET_LOST
    if code in _NO_TOPIC:
        return ErrorKind.NO_TOPIC
    return ErrorKind.FATAL if error.fatal() or code in _FATAL else ErrorKind.PASSING


def consumer_config(
    kafka: KafkaSettings, options: IntakeOptions, *, group: str, client_id: str
) -> dict[str, Any]:
    """The librdkafka settings of one intake.

    Offsets are committed by the intake only, and a group without one is an error, never a silent jump (`topics create` seeds
    them). Assignment is cooperative: what need not move keeps running through a rebalance.
    """
    return (
        client_config(kafka, client_id=client_id)
        | _membership(kafka)
        | {
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "allow.auto.create.topics": False,
            "max.poll.interval.ms": max(
                kafka.session_timeout_ms,
                _MIN_POLL_INTERVAL_MS,
                round(options.grace_seconds * _MS) + _POLL_INTERVAL_MARGIN_MS,
            ),
            "fetch.wait.max.ms": options.fetch_wait_ms,
            "fetch.queue.backoff.ms": _FETCH_QUEUE_BACKOFF_MS,
            "queued.min.messages": options.queued_messages,
            "queued.max.messages.kbytes": options.queued_kbytes,
            "max.partition.fetch.bytes": options.fetch_bytes,
        }
    )


def _membership(kafka: KafkaSettings) -> dict[str, Any]:
    """How a consumer belongs to its group: agreed upon by its members, or, with the protocol of KIP-848, told by the broker.

    That one takes the session time-out from the broker (group.consumer.session.timeout.ms), and moves partitions one by one without
    a pause for the others; librdkafka refuses the settings of the classic one beside it.
    """
    if kafka.group_protocol == "consumer":
        return {"group.protocol": "consumer"}
    session_ms = kafka.session_timeout_ms
    return {
        "group.protocol": "classic",
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": session_ms,
        "heartbeat.interval.ms": min(_MAX_HEARTBEAT_MS, session_ms // _HEARTBEATS_PER_SESSION),
    }
