"""Where the records of partitions begin and end, and deleting them from the front; about topics only, never about groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from taskline.errors import TasklineError
from taskline.infra.intake import TopicPartition
from taskline.infra.kafka.client import client_config, new_client
from taskline.infra.kafka.requests import ask
from taskline.settings import KafkaSettings


class LogEnds:
    """A client for such questions; any thread may ask, one at a time. All calls block for at most their time-out (seconds).

    They raise:
        Unavailable: no answer in time.
        TasklineError: the broker refused; chained.
    """

    def __init__(self, kafka: KafkaSettings, *, client_id: str) -> None:
        """Connect on the first question; `client_id` is for the broker's logs."""
        self._config = client_config(kafka, client_id=client_id)
        self._admin: AdminClient = new_client(AdminClient, self._config)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Writes the log lines that librdkafka has queued.
        self._admin.poll(0)

    def earliest(
        self, places: Collection[TopicPartition], timeout_seconds: float
    ) -> dict[TopicPartition, int]:
        """The offset of each partition's first record, or of the next one when there is none."""
        return self._offsets(places, OffsetSpec.earliest(), timeout_seconds)

    def latest(self, places: Collection[TopicPartition], timeout_seconds: float) -> dict[TopicPartition, int]:
        """The offset that each partition's next record gets."""
        return self._offsets(places, OffsetSpec.latest(), timeout_seconds)

    def at(
        self, places: Collection[TopicPartition], time_ms: int, timeout_seconds: float
    ) -> dict[TopicPartition, int]:
        """The offset of each partition's first record that was appended at `time_ms` (since the epoch) or later; its end when there is none."""
        found = self._offsets(places, OffsetSpec.for_timestamp(time_ms), timeout_seconds)
        without = [name for name, offset in found.items() if offset < 0]
        return found | (self.latest(without, timeout_seconds) if without else {})

    def delete_before(self, bounds: Mapping[TopicPartition, int], timeout_seconds: float) -> None:
        """Delete the records of each partition below an offset."""
        places = [KafkaPartition(name.topic, name.partition, offset) for name, offset in bounds.items()]
        self._ask(
            lambda admin, seconds: admin.delete_records(places, request_timeout=seconds),
            "deleting records",
            timeout_seconds,
        )

    def _offsets(
        self, places: Collection[TopicPartition], spec: OffsetSpec, timeout_seconds: float
    ) -> dict[TopicPartition, int]:
        wanted = {KafkaPartition(name.topic, name.partition): spec for name in places}
        answers = self._ask(
            lambda admin, seconds: admin.list_offsets(wanted, request_timeout=seconds),
            "reading topic offsets",
            timeout_seconds,
        )
        return {TopicPartition(place.topic, place.partition): each.offset for place, each in answers.items()}

    def _ask(
        self,
        request: Callable[[AdminClient, float], Mapping[Any, Future[Any]]],
        doing: str,
        timeout_seconds: float,
    ) -> dict[Any, Any]:
        admin = self._admin
        try:
            return ask(lambda seconds: request(admin, seconds), doing, timeout_seconds)
        except TasklineError:
            # After a broker's restart a client asks by the leader epochs that it knows, and is refused, for minutes.
            self._admin = new_client(AdminClient, self._config)
            raise
        finally:
            # Writes the log lines that librdkafka has queued.
            admin.poll(0)
