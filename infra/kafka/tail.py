"""Follows one partition from its beginning, for ever, on a thread of its own.

Invariant: each record is handed to the sink once and in order, and `position` is the offset after the last one that the
sink has finished; so `catch_up` returning means that everything that was in the log when it was called has been taken in. A
broker that goes away only makes it wait. The consumer has no group: it is assigned, and commits nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import OffsetSpec

from taskline.errors import Unavailable, WrongTopology
from taskline.infra.kafka.client import client_config, new_client, reason_of, translated
from taskline.infra.kafka.requests import admin_client, ask
from taskline.settings import KafkaSettings

log = structlog.get_logger(__name__)

# How long the thread waits for records: bounds how late it notices that it should stop.
_POLL_SECONDS = 0.1
_POLL_RECORDS = 500
# Between attempts while something that the sink needs is away.
_RETRY_SECONDS = 1.0
# A role should say soon that the log does not answer.
_REQUEST_SECONDS = 10.0


class Sink(Protocol):
    """Takes the records in, on the tail's thread."""

    def take(self, message: Message) -> None:
        """Take one record in. Raising Unavailable means: again later; anything else is logged and passed over."""
        ...

    def restart(self) -> None:
        """The log was made anew: forget everything, its first record comes next."""
        ...


class Tail:
    """A reader of partition 0 of a topic."""

    def __init__(self, kafka: KafkaSettings, topic: str, sink: Sink, *, client_id: str) -> None:
        """Prepare; nothing connects before `start`."""
        self._kafka = kafka
        self._topic = topic
        self._sink = sink
        self._client_id = client_id
        self._progress = threading.Condition()
        self._position = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def position(self) -> int:
        """The offset after the last record that was taken in."""
        return self._position

    def start(self, timeout_seconds: float) -> None:
        """Begin, and return when everything that is in the log now has been taken in.

        Raises:
            WrongTopology: there is no such topic.
            Unavailable: the log does not answer, or could not be read to its end, in time.
        """
        if self._thread is not None:
            raise RuntimeError("a tail is started once")
        deadline = time.monotonic() + timeout_seconds
        self._require_topic(min(timeout_seconds, _REQUEST_SECONDS))
        consumer = new_client(
            Consumer,
            client_config(self._kafka, client_id=self._client_id)
            | {
                # The client insists on a name; nothing joins or commits under it.
                "group.id": self._client_id,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
            },
        )
        self._thread = threading.Thread(target=self._run, args=(consumer,), name=self._client_id, daemon=True)
        self._thread.start()
        self.catch_up(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Stop; what was taken in stays. A second call does nothing."""
        self._stopping.set()
        with self._progress:
            self._progress.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def catch_up(self, timeout_seconds: float) -> None:
        """Return when everything that is in the log now has been taken in.

        Raises:
            Unavailable: not in time.
        """
        if self._thread is None:
            raise Unavailable(f"{self._topic} is not being read: call start() first")
        deadline = time.monotonic() + timeout_seconds
        end = self._end_offset(min(timeout_seconds, _REQUEST_SECONDS))
        self.wait_until(
            lambda: self._position >= end, deadline - time.monotonic(), f"offset {end} of {self._topic}"
        )

    def wait_until(self, reached: Callable[[], bool], timeout_seconds: float, what: str) -> None:
        """Wait for something that taking in records brings about.

        Raises:
            Unavailable: not in time, or the tail was closed.
        """
        with self._progress:
            self._progress.wait_for(lambda: reached() or self._stopping.is_set(), max(0.0, timeout_seconds))
            if reached():
                return
        why = "the reader was closed" if self._stopping.is_set() else f"waited {timeout_seconds:.1f} s"
        raise Unavailable(f"not read up to {what}: {why}")

    def _require_topic(self, timeout_seconds: float) -> None:
        try:
            with admin_client(self._kafka) as admin:
                topics = admin.list_topics(timeout=timeout_seconds).topics
        except KafkaException as error:
            raise translated(error, "listing topics") from error
        if self._topic not in topics:
            raise WrongTopology([f"topic {self._topic} is missing"], "taskline topics create")

    def _end_offset(self, timeout_seconds: float) -> int:
        # Not asked of the consumer: its connection is busy waiting for records, for up to half a second. And not of an admin
        # client that is kept: after a broker's restart it insists on the leader that it knew, for minutes.
        partition = TopicPartition(self._topic, 0)
        with admin_client(self._kafka) as admin:

            def bound(spec: OffsetSpec) -> int:
                answers = ask(
                    lambda seconds: admin.list_offsets({partition: spec}, request_timeout=seconds),
                    f"reading the bounds of {self._topic}",
                    timeout_seconds,
                )
                return int(next(iter(answers.values())).offset)

            # In this order: what is appended in between can't hide what was there.
            end = bound(OffsetSpec.latest())
            begin = bound(OffsetSpec.earliest())
        # A topic whose records were all deleted in time has an end, and nothing that leads up to it.
        return end if begin < end else 0

    def _run(self, consumer: Consumer) -> None:
        try:
            consumer.assign([TopicPartition(self._topic, 0, OFFSET_BEGINNING)])
            while not self._stopping.is_set():
                # `consume` alone would wait for a whole batch, and hand a lone record over late.
                first = consumer.poll(_POLL_SECONDS)
                if first is None:
                    continue
                for message in (first, *consumer.consume(_POLL_RECORDS, 0)):
                    self._handle(consumer, message)
        except Exception:
            # Without this thread nothing new would ever be seen again, and nobody would say so.
            log.exception("reader stopped", topic=self._topic, offset=self._position)
        finally:
            consumer.close()

    def _handle(self, consumer: Consumer, message: Message) -> None:
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._AUTO_OFFSET_RESET:
                self._restart(consumer, error)
            else:
                log.warning("reading", topic=self._topic, offset=self._position, error=reason_of(error))
            return
        while not self._stopping.is_set():
            try:
                self._sink.take(message)
                break
            except Unavailable as unavailable:
                log.warning("waiting", topic=self._topic, offset=message.offset(), error=str(unavailable))
                self._stopping.wait(_RETRY_SECONDS)
            except Exception:
                log.exception("record passed over", topic=self._topic, offset=message.offset())
                break
        self._advance(message.offset() + 1)

    def _restart(self, consumer: Consumer, error: KafkaError) -> None:
        log.error("log was made anew, reading it again", topic=self._topic, error=reason_of(error))
        self._sink.restart()
        self._advance(0)
        consumer.assign([TopicPartition(self._topic, 0, OFFSET_BEGINNING)])

    def _advance(self, position: int) -> None:
        with self._progress:
            self._position = position
            self._progress.notify_all()
