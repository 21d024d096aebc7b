"""Single records by their places in the log, through a consumer that joins no group and commits nothing.

Invariant: a place is either read, or known not to be in the log any more (its offset lies below the log's beginning), or the call raises.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from taskline.errors import RecordGone, Unavailable
from taskline.infra.kafka.client import client_config, new_client, reason_of, translated
from taskline.infra.kafka.messages import in_record
from taskline.infra.log import InRecord, Position
from taskline.settings import KafkaSettings, Settings

# A healthy broker answers in milliseconds; a person waits for this.
DEFAULT_TIMEOUT_SECONDS = 15.0
# A broker holds a fetch open for so long when there is nothing; questions about offsets wait behind it.
_FETCH_WAIT_MS = 10
# Bytes that the client may fetch ahead of what is asked for: the wanted places are usually close together.
_QUEUED_KBYTES = 8 * 1_024
# Between two wanted places of a partition: this many records are read over, more are jumped over.
_MAX_READ_OVER = 500
_POLL_SECONDS = 0.1
_POLL_RECORDS = 100
# A look at the ends of a partition.
_REQUEST_SECONDS = 5.0

Place = tuple[str, int]


class RecordSource(Protocol):
    """Where single records are read from; `taskline.testing` has one in memory."""

    async def fetch(self, places: Sequence[Position]) -> Mapping[Position, InRecord]:
        """The records at these places; those that are not in the log any more are left out.

        Raises:
            Unavailable: the log does not answer in time.
        """
        ...


class RecordFetcher:
    """A consumer for reading by place. From any thread, one call at a time; close it, or use it as a context manager."""

    def __init__(self, kafka: KafkaSettings, *, client_id: str) -> None:
        """Connect in the background.

        Raises:
            InvalidSettings: the client refuses the configuration.
        """
        self._lock = threading.Lock()
        self._consumer = new_client(
            Consumer,
            client_config(kafka, client_id=client_id)
            | {
                # The client insists on a name; nothing joins or commits under it.
                "group.id": client_id,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "allow.auto.create.topics": False,
                "fetch.wait.max.ms": _FETCH_WAIT_MS,
                "queued.max.messages.kbytes": _QUEUED_KBYTES,
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect."""
        with self._lock:
            self._consumer.close()

    def fetch(
        self, places: Sequence[Position], timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> dict[Position, InRecord]:
        """The records at these places; those that are not in the log any more are left out. Blocks.

        Raises:
            Unavailable: the log does not answer in time.
            TasklineError: the broker refused; chained.
        """
        with self._lock:
            deadline = time.monotonic() + timeout_seconds
            try:
                reading = _Reading(places, self._consumer, deadline)
                reading.run()
            except KafkaException as error:
                raise translated(error, "reading single records") from error
            finally:
                # Nothing is fetched between calls.
                self._consumer.unassign()
            return reading.found


class KafkaRecords:
    """A `RecordSource` on Kafka."""

    def __init__(self, fetcher: RecordFetcher, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """Read through `fetcher`, which its owner closes."""
        self._fetcher = fetcher
        self._timeout = timeout_seconds

    async def fetch(self, places: Sequence[Position]) -> Mapping[Position, InRecord]:
        """As `RecordSource.fetch`."""
        return await asyncio.to_thread(self._fetcher.fetch, places, self._timeout) if places else {}


def fetch_record(
    settings: Settings, position: Position, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
) -> InRecord:
    """The record at one place. Blocks.

    Raises:
        RecordGone: retention has deleted it, or the topic was made anew.
        Unavailable: the log does not answer in time.
    """
    with RecordFetcher(settings.kafka, client_id="taskline-fetch") as fetcher:
        found = fetcher.fetch([position], timeout_seconds)
    if position not in found:
        raise RecordGone(position)
    return found[position]


class _Reading:
    """One call of `fetch`."""

    def __init__(self, places: Sequence[Position], consumer: Consumer, deadline: float) -> None:
        self._consumer = consumer
        self._deadline = deadline
        # Wanted offsets of each partition, the last one first.
        self._wanted: dict[Place, list[int]] = {}
        for place in sorted(set(places), key=lambda each: -each.offset):
            self._wanted.setdefault((place.topic, place.partition), []).append(place.offset)
        self.found: dict[Position, InRecord] = {}

    def run(self) -> None:
        self._begin()
        while self._wanted:
            if time.monotonic() > self._deadline:
                topic, number = next(iter(self._wanted))
                raise Unavailable(f"Kafka did not give the wanted records of {topic}/{number} in time")
            for message in self._consumer.consume(_POLL_RECORDS, _POLL_SECONDS):
                self._take(message)

    def _begin(self) -> None:
        """Leave out what is not there, and read from the first place that is."""
        for place in list(self._wanted):
            # Asked while nothing is fetched: a connection that waits for records answers late.
            seconds = max(0.1, min(_REQUEST_SECONDS, self._deadline - time.monotonic()))
            low, high = self._consumer.get_watermark_offsets(TopicPartition(*place), timeout=seconds)
            self._keep(place, [offset for offset in self._wanted[place] if low <= offset < high])
        self._consumer.assign(
            [TopicPartition(*place, offsets[-1]) for place, offsets in self._wanted.items()]
        )

    def _take(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._AUTO_OFFSET_RESET:
                # What was there a moment ago was deleted meanwhile.
                self._consumer.unassign()
                self._begin()
            elif error.fatal():
                raise Unavailable(f"reading single records: {reason_of(error)}")
            return
        place, offset = (message.topic(), message.partition()), message.offset()
        offsets = self._wanted.get(place)
        if offsets is None or offset < offsets[-1]:
            return
        if offset == offsets[-1]:
            record = in_record(message)
            self.found[record.position] = record
        # A place that was passed holds no record: the broker keeps marks of its own in a log.
        left = [each for each in offsets if each > offset]
        self._keep(place, left)
        if left and left[-1] - offset > _MAX_READ_OVER:
            self._consumer.seek(TopicPartition(*place, left[-1]))

    def _keep(self, place: Place, offsets: list[int]) -> None:
        if offsets:
            self._wanted[place] = offsets
        else:
            del self._wanted[place]
