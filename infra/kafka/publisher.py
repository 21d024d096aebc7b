"""Appends to the log from any thread, with acknowledgements on a thread of the publisher's own.

Invariant: after `send` returns, `on_ack` is called exactly once, on the publisher's thread (what its outcome means, and what order is
kept: `taskline.infra.kafka.appender`). After `send` raises, the record is not in the log and `on_ack` is not called.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from confluent_kafka import Producer

from taskline.errors import QueueFull
from taskline.infra.kafka.appender import Appender, ClientFactory, OnAck
from taskline.infra.kafka.delivery import DEFAULT_MAX_RECORD_BYTES
from taskline.infra.log import OutRecord
from taskline.settings import KafkaSettings, ProducerSettings

log = structlog.get_logger(__name__)

# How long the thread waits for reports: bounds how late it notices that it should stop.
_SERVE_SECONDS = 0.1


class Publisher:
    """A producer client that a thread serves."""

    def __init__(
        self,
        kafka: KafkaSettings,
        producer: ProducerSettings,
        *,
        client_id: str,
        max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES,
        client_factory: ClientFactory = Producer,
    ) -> None:
        """Start a client and its thread; arguments and errors as `Appender`'s."""
        self._appender = Appender(
            kafka,
            producer,
            client_id=client_id,
            max_record_bytes=max_record_bytes,
            client_factory=client_factory,
        )
        self._max_block_seconds = producer.max_block_seconds
        self._changed = threading.Condition()
        # Waiting threads; the publisher's notifies only when there are some.
        self._waiters = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"{client_id}-publisher", daemon=True)
        self._thread.start()

    def send(self, record: OutRecord, on_ack: OnAck, *, block_seconds: float | None = None) -> None:
        """Hand a record over.

        Args:
            record: what to append.
            on_ack: called once, on the publisher's thread; must be quick.
            block_seconds: how long to wait for room in the buffer; None: as set (producer.max_block_seconds).

        Raises:
            QueueFull: the buffer stayed full.
            ProducerClosed: `close` was called before.
            DeliveryFailed: refused at once (too large, unknown topic).
        """
        if self._appender.try_send(record, on_ack):
            return
        patience = self._max_block_seconds if block_seconds is None else block_seconds
        deadline = time.monotonic() + patience
        with self._waiting():
            while not self._appender.try_send(record, on_ack):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise QueueFull(
                        f"{len(self._appender)} records wait for their acknowledgement, and none left within {patience:g} s"
                    )
                self._changed.wait(left)

    def flush(self, timeout_seconds: float) -> int:
        """Wait until everything sent so far, and meanwhile, is acknowledged or has failed.

        Returns:
            Records that are still unacknowledged after `timeout_seconds`.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._waiting():
            while (left := deadline - time.monotonic()) > 0 and len(self._appender):
                self._changed.wait(min(left, _SERVE_SECONDS))
        return len(self._appender)

    def close(self, timeout_seconds: float) -> int:
        """Take no more records, wait for the acknowledgements, stop. A second call does nothing.

        Records that are still unacknowledged then are given up: their `on_ack` gets DeliveryUnknown before this returns.

        Returns:
            How many those were.
        """
        if not self._appender.refuse():
            return 0
        self.flush(timeout_seconds)
        self._stopping = True
        self._thread.join()
        return self._appender.close()

    def _run(self) -> None:
        while not self._stopping:
            try:
                served = self._appender.serve(_SERVE_SECONDS)
            except Exception:
                # Without this thread nothing would ever be acknowledged again.
                log.exception("publisher thread")
                time.sleep(_SERVE_SECONDS)
                continue
            if served and self._waiters:
                with self._changed:
                    self._changed.notify_all()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with self._changed:
            self._waiters += 1
            try:
                yield
            finally:
                self._waiters -= 1
