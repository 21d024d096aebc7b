"""What a producer client is told about durability, and what its delivery reports mean."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError

from taskline.errors import DeliveryError, DeliveryFailed, DeliveryUnknown
from taskline.infra.kafka.client import reason_of
from taskline.settings import ProducerSettings, TopicSettings

DEFAULT_MAX_RECORD_BYTES: int = TopicSettings.model_fields["max_record_bytes"].default

# How long a topic may be missing from the metadata before its records fail: it may have been created a moment ago.
_TOPIC_PROPAGATION_MS = 5_000
# Bounds the memory of waiting records, whose number alone says little.
_BUFFER_KBYTES = 64 * 1024
# librdkafka's own bound of a request; the broker refuses a whole batch that is over the topic's record limit.
_MAX_BATCH_BYTES = 1_000_000
# What a batch has around its records (Kafka protocol: 61 bytes), rounded up.
_BATCH_OVERHEAD_BYTES = 128
# The dead-letter topic takes records of twice the size of the others (taskline.infra.topics).
_LARGEST_RECORD_FACTOR = 2

# The broker or the client refused the record itself, so no attempt of it was appended. Left out on purpose: time-outs and
# purges (librdkafka knows whether such a record ever left, but its Python client does not say), and
# NOT_ENOUGH_REPLICAS_AFTER_APPEND.
_REFUSED = frozenset(
    {
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.POLICY_VIOLATION,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    }
)


def producer_config(producer: ProducerSettings, max_record_bytes: int) -> dict[str, Any]:
    """The librdkafka settings of a producer.

    Idempotence implies acks=all, retries without end (within the delivery time-out), and at most five requests in flight,
    which the broker keeps in order.

    Args:
        producer: linger, compression, time-outs, buffer.
        max_record_bytes: as topics.max_record_bytes.
    """
    return {
        "enable.idempotence": True,
        "acks": "all",
        "delivery.timeout.ms": max(1, round(producer.delivery_timeout_seconds * 1000)),
        "linger.ms": producer.linger_ms,
        "compression.type": producer.compression,
        "queue.buffering.max.messages": producer.max_buffered_records,
        "queue.buffering.max.kbytes": max(
            _BUFFER_KBYTES, 2 * _LARGEST_RECORD_FACTOR * max_record_bytes // 1024
        ),
        "message.max.bytes": _LARGEST_RECORD_FACTOR * max_record_bytes,
        "batch.size": min(_MAX_BATCH_BYTES, max_record_bytes - _BATCH_OVERHEAD_BYTES),
        "topic.metadata.propagation.max.ms": _TOPIC_PROPAGATION_MS,
        # The same record key goes to the same partition as with the Java client.
        "partitioner": "murmur2_random",
    }


def delivery_error(topic: str | None, error: KafkaError) -> DeliveryError:
    """What is known about a record whose delivery report is an error."""
    kind = DeliveryFailed if error.code() in _REFUSED else DeliveryUnknown
    return kind(f"{topic}: {reason_of(error)}")
