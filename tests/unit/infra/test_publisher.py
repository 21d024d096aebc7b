"""The publisher against a double of the client: what a broker can hardly be made to do on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from confluent_kafka import KafkaError, KafkaException

from taskline.errors import (
    DeliveryError,
    DeliveryFailed,
    DeliveryUnknown,
    InvalidSettings,
    ProducerClosed,
    QueueFull,
)
from taskline.infra.kafka.delivery import delivery_error
from taskline.infra.kafka.publisher import Publisher
from taskline.infra.log import OutRecord, Position
from taskline.settings import KafkaSettings, ProducerSettings

RECORD = OutRecord(topic="t", value=b"v", key=b"k", partition=0)
PATIENCE = 10.0


class FakeMessage:
    def __init__(self, topic: str, offset: int, value: bytes) -> None:
        self._topic, self._offset, self._value = topic, offset, value

    def topic(self) -> str:
        return self._topic

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def __len__(self) -> int:
        return len(self._value)


class FakeClient:
    """A client with room for `room` records, which acknowledges when it is told to."""

    made: ClassVar[list[FakeClient]] = []
    room = 3

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.queued: list[tuple[str, bytes, Callable[..., None]]] = []
        self.reports: list[Callable[[], None]] = []
        self.fatal = False
        self.offset = 0
        self.ready = threading.Event()
        FakeClient.made.append(self)

    def __len__(self) -> int:
        return len(self.queued) + len(self.reports)

    def produce(
        self,
        topic: str,
        value: bytes,
        key: bytes,
        partition: int,
        callback: Callable[..., None],
        headers: Any,
    ) -> None:
        if self.fatal:
            raise KafkaException(KafkaError(KafkaError._FATAL))
        if topic == "missing":
            raise KafkaException(KafkaError(KafkaError._UNKNOWN_TOPIC))
        if len(self) >= self.room:
            raise BufferError
        self.queued.append((topic, value, callback))

    def settle(self, error: KafkaError | None = None, count: int | None = None) -> None:
        taken, self.queued = self.queued[:count], self.queued[count:] if count else []
        for topic, value, callback in taken:
            message = FakeMessage(topic, self.offset, value)
            self.offset += 1
            self.reports.append(lambda callback=callback, message=message: callback(error, message))
        self.ready.set()

    def poll(self, timeout: float) -> int:
        self.ready.wait(min(timeout, 0.01))
        self.ready.clear()
        served = len(self.reports)
        for _ in range(served):
            self.reports[0]()
            self.reports.pop(0)
        return served

    def purge(self, *, in_queue: bool, in_flight: bool) -> None:
        self.settle(KafkaError(KafkaError._PURGE_INFLIGHT))

    def fail_fatally(self) -> None:
        self.fatal = True
        self.config["error_cb"](KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, fatal=True))


class Acks:
    def __init__(self) -> None:
        self.seen: list[Position | DeliveryError] = []
        self._changed = threading.Condition()

    def __call__(self, outcome: Position | DeliveryError) -> None:
        with self._changed:
            self.seen.append(outcome)
            self._changed.notify_all()

    def wait(self, count: int) -> list[Position | DeliveryError]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= count, PATIENCE)
        return self.seen


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    FakeClient.made.clear()
    made = Publisher(KafkaSettings(), ProducerSettings(), client_id="test", client_factory=FakeClient)
    yield made
    made.close(0)


def client() -> FakeClient:
    return FakeClient.made[-1]


def test_every_record_is_acknowledged_once_with_its_position(publisher: Publisher) -> None:
    acks = Acks()
    for _ in range(3):
        publisher.send(RECORD, acks)
    client().settle()
    assert acks.wait(3) == [Position(topic="t", partition=0, offset=offset) for offset in range(3)]


def test_a_full_buffer_waits_for_room(publisher: Publisher) -> None:
    acks = Acks()
    for _ in range(3):
        publisher.send(RECORD, acks)
    with pytest.raises(QueueFull):
        publisher.send(RECORD, acks, block_seconds=0)
    sender = threading.Thread(target=lambda: publisher.send(RECORD, acks, block_seconds=PATIENCE))
    sender.start()
    client().settle(count=1)
    sender.join(PATIENCE)
    assert not sender.is_alive()
    client().settle()
    acks.wait(4)


def test_a_record_refused_at_once_raises_and_is_not_acknowledged(publisher: Publisher) -> None:
    acks = Acks()
    with pytest.raises(DeliveryFailed, match="missing"):
        publisher.send(OutRecord(topic="missing", value=b""), acks)
    assert publisher.flush(PATIENCE) == 0
    assert acks.seen == []


def test_flush_counts_what_is_left(publisher: Publisher) -> None:
    publisher.send(RECORD, Acks())
    assert publisher.flush(0.01) == 1
    client().settle()
    assert publisher.flush(PATIENCE) == 0


def test_close_gives_up_what_is_left_as_unknown(publisher: Publisher) -> None:
    acks = Acks()
    publisher.send(RECORD, acks)
    assert publisher.close(0.01) == 1
    assert [type(each) for each in acks.seen] == [DeliveryUnknown]
    with pytest.raises(ProducerClosed):
        publisher.send(RECORD, acks)
    assert publisher.close(0.01) == 0


def test_a_fatal_error_replaces_the_client_and_nothing_is_lost_silently(publisher: Publisher) -> None:
    acks = Acks()
    broken = client()
    publisher.send(RECORD, acks)
    broken.fail_fatally()
    publisher.send(RECORD, acks, block_seconds=PATIENCE)
    assert client() is not broken
    client().settle()
    unknown, position = acks.wait(2)
    assert isinstance(unknown, DeliveryUnknown)
    assert isinstance(position, Position)


def test_a_callback_that_raises_does_not_take_others_with_it(publisher: Publisher) -> None:
    acks = Acks()

    def broken(_: object) -> None:
        raise RuntimeError("mine")

    publisher.send(RECORD, broken)
    publisher.send(RECORD, acks)
    client().settle()
    acks.wait(1)
    assert publisher.flush(PATIENCE) == 0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError.MSG_SIZE_TOO_LARGE, DeliveryFailed),
        (KafkaError._UNKNOWN_TOPIC, DeliveryFailed),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, DeliveryFailed),
        (KafkaError._MSG_TIMED_OUT, DeliveryUnknown),
        (KafkaError._PURGE_QUEUE, DeliveryUnknown),
        (KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND, DeliveryUnknown),
        (KafkaError.UNKNOWN, DeliveryUnknown),
    ],
)
def test_only_a_refusal_is_certain(code: int, kind: type[DeliveryError]) -> None:
    assert type(delivery_error("t", KafkaError(code))) is kind


@pytest.mark.parametrize(
    ("kafka", "producer"),
    [
        ({"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN"}, {}),
        ({"ssl_ca_location": "/nowhere/ca.pem", "security_protocol": "SSL"}, {}),
        ({}, {"linger_ms": 10_000, "delivery_timeout_seconds": 1}),
    ],
)
def test_a_configuration_that_the_client_refuses(kafka: dict[str, Any], producer: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings, match="Kafka client"):
        Publisher(KafkaSettings(**kafka), ProducerSettings(**producer), client_id="test")
