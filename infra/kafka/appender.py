"""One producer client: records in, acknowledgements out when it is served. Who serves it decides on which thread that is.

Invariant: after `try_send` returns True, `on_ack` is called exactly once, by a later `serve` or `close`, with the record's position
or with what is known about its failure. A position means that the record is in the log (acks=all); `DeliveryFailed` means that
it certainly is not; everything less certain is `DeliveryUnknown`. After `try_send` returns False or raises, the record is not
in the log and `on_ack` is not called.

Order: records of one partition are appended in the order of `try_send` (idempotent producer), also when one of them fails.
If the client fails fatally (the broker and it disagree about the sequence), all that is unacknowledged becomes
`DeliveryUnknown` and a new client takes over: what is sent from then on comes after everything that was acknowledged, but an
old record that was on its way to the broker may still land between new ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from taskline.errors import DeliveryError, DeliveryFailed, ProducerClosed
from taskline.infra.kafka.client import client_config, new_client, reason_of
from taskline.infra.kafka.delivery import DEFAULT_MAX_RECORD_BYTES, delivery_error, producer_config
from taskline.infra.kafka.metrics import AppendMetrics
from taskline.infra.log import OutRecord, Position
from taskline.settings import KafkaSettings, ProducerSettings

log = structlog.get_logger(__name__)

OnAck = Callable[[Position | DeliveryError], None]
ClientFactory = Callable[[dict[str, Any]], Any]

_ANY_PARTITION = -1
# A client that is given up reports all its records as purged at once; waiting longer would hide a fault of the client.
_PURGE_SECONDS = 5.0
_PURGE_POLL_SECONDS = 0.01


class Appender:
    """A producer client without a thread of its own. `try_send` from any thread, `serve` from one at a time."""

    def __init__(
        self,
        kafka: KafkaSettings,
        producer: ProducerSettings,
        *,
        client_id: str,
        max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES,
        client_factory: ClientFactory = Producer,
    ) -> None:
        """Start a client; it connects by itself, now or when the broker comes up.

        Args:
            kafka: how to reach the log.
            producer: buffer, linger, time-outs.
            client_id: a name for the broker's logs, and the label of the metrics.
            max_record_bytes: as topics.max_record_bytes.
            client_factory: makes the client from its configuration.

        Raises:
            InvalidSettings: the client refuses the configuration.
        """
        self._config = client_config(kafka, client_id=client_id) | producer_config(producer, max_record_bytes)
        self._config["error_cb"] = self._client_error
        self._client_factory = client_factory
        # Held while a record enters a client, so that none can slip into one that is being closed or replaced.
        self._entrance = threading.Lock()
        self._closed = False
        self._fatal: str | None = None
        self._metrics = AppendMetrics(client_id)
        self._client: Any = new_client(client_factory, self._config)

    def __len__(self) -> int:
        """Records (and reports about them) that `serve` has not dealt with yet."""
        return len(self._client)

    def try_send(self, record: OutRecord, on_ack: OnAck) -> bool:
        """Hand a record over.

        Args:
            record: what to append.
            on_ack: called once, by whoever serves; must be quick.

        Returns:
            False: there is no room now.

        Raises:
            ProducerClosed: `close` was called before.
            DeliveryFailed: refused at once (too large, unknown topic).
        """
        headers = list(record.headers.items()) if record.headers else None
        partition = _ANY_PARTITION if record.partition is None else record.partition
        with self._entrance:
            if self._closed:
                raise ProducerClosed("the producer is closed")
            try:
                self._client.produce(
                    record.topic,
                    record.value,
                    record.key,
                    partition,
                    partial(self._delivered, on_ack),
                    headers=headers,
                )
            except BufferError:
                return False
            except KafkaException as error:
                if error.args[0].code() == KafkaError._FATAL:
                    # The next `serve` replaces the client; then there is room.
                    return False
                raise DeliveryFailed(f"{record.topic}: {reason_of(error)}") from error
        return True

    def serve(self, timeout_seconds: float) -> int:
        """Wait for reports for up to `timeout_seconds` and call their `on_ack`; also writes librdkafka's log lines.

        Returns:
            0: nothing changed; otherwise there may be room again.
        """
        served: int = self._client.poll(timeout_seconds)
        if self._fatal is not None:
            self._replace()
            served += 1
        if served:
            self._metrics.publish(len(self._client))
        return served

    def refuse(self) -> bool:
        """Take no more records; False: that was so already."""
        with self._entrance:
            was_closed, self._closed = self._closed, True
        return not was_closed

    def close(self) -> int:
        """Take no more records, and report those that are unacknowledged as unknown before this returns.

        Returns:
            How many those were.
        """
        self.refuse()
        left = len(self._client)
        self._give_up(self._client)
        self._metrics.publish(0)
        return left

    def _delivered(self, on_ack: OnAck, error: KafkaError | None, message: Message) -> None:
        outcome: Position | DeliveryError
        if error is None:
            outcome = Position(topic=message.topic(), partition=message.partition(), offset=message.offset())
            self._metrics.appended += 1
            self._metrics.appended_bytes += len(message)
        else:
            outcome = delivery_error(message.topic(), error)
            self._metrics.failed(outcome)
        try:
            on_ack(outcome)
        except Exception:
            # An exception here would reach librdkafka's C code and take the reports of others with it.
            log.exception("acknowledgement callback failed", outcome=str(outcome))

    def _client_error(self, error: KafkaError) -> None:
        # Anything else that librdkafka reports here it also logs, and recovers from by itself.
        if error.fatal():
            self._fatal = reason_of(error)

    def _replace(self) -> None:
        """Fail what the broken client holds, and go on with a new one (same settings, new producer id)."""
        log.error(
            "producer client failed fatally; replacing it", reason=self._fatal, records=len(self._client)
        )
        with self._entrance:
            broken, self._client = self._client, new_client(self._client_factory, self._config)
        self._give_up(broken)
        self._fatal = None
        self._metrics.replaced()

    def _give_up(self, client: Any) -> None:  # noqa: ANN401 - a client or a test's double
        deadline = time.monotonic() + _PURGE_SECONDS
        while len(client):
            client.purge(in_queue=True, in_flight=True)
            client.poll(_PURGE_POLL_SECONDS)
            if time.monotonic() > deadline:
                log.error("a producer client kept records that it was told to give up", records=len(client))
                break
