"""What the reader of a topic does with what it reads, and with what goes wrong meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import KafkaError

from taskline.errors import Unavailable
from taskline.infra.kafka import tail as module
from taskline.infra.kafka.tail import Tail
from taskline.settings import KafkaSettings


@dataclass
class Read:
    """A message, as far as the tail looks at it."""

    number: int = 0
    failure: KafkaError | None = None

    def error(self) -> KafkaError | None:
        return self.failure

    def offset(self) -> int:
        return self.number


@dataclass
class Recorder:
    """A sink that fails as it is told."""

    failures: list[Exception] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    restarts: int = 0

    def take(self, message: Any) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.taken.append(message.offset())

    def restart(self) -> None:
        self.restarts += 1


@dataclass
class Assigned:
    places: list[Any] = field(default_factory=list)

    def assign(self, partitions: list[Any]) -> None:
        self.places += partitions


@pytest.fixture
def sink() -> Recorder:
    return Recorder()


@pytest.fixture
def tail(sink: Recorder, monkeypatch: pytest.MonkeyPatch) -> Tail:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.0)
    return Tail(KafkaSettings(), "topic", sink, client_id="test")


def handle(tail: Tail, read: Read, consumer: Any = None) -> None:
    tail._handle(consumer, read)  # type: ignore[arg-type]


def test_a_record_waits_for_what_its_reading_needs(tail: Tail, sink: Recorder) -> None:
    sink.failures = [Unavailable("the registry is away"), Unavailable("still")]
    handle(tail, Read(0))
    assert sink.taken == [0]
    assert tail.position == 1


def test_a_record_that_breaks_the_sink_is_passed_over(tail: Tail, sink: Recorder) -> None:
    sink.failures = [RuntimeError("a fault")]
    handle(tail, Read(0))
    handle(tail, Read(1))
    assert sink.taken == [1]
    assert tail.position == 2


def test_errors_of_the_client_move_nothing(tail: Tail, sink: Recorder) -> None:
    handle(tail, Read(7))
    handle(tail, Read(failure=KafkaError(KafkaError._TRANSPORT)))
    assert tail.position == 8
    assert sink.restarts == 0


def test_a_log_that_is_gone_is_read_anew(tail: Tail, sink: Recorder) -> None:
    handle(tail, Read(7))
    consumer = Assigned()
    handle(tail, Read(failure=KafkaError(KafkaError._AUTO_OFFSET_RESET)), consumer)
    assert sink.restarts == 1
    assert tail.position == 0
    assert [(place.topic, place.partition) for place in consumer.places] == [("topic", 0)]


def test_a_tail_that_was_never_started_says_so(tail: Tail) -> None:
    with pytest.raises(Unavailable, match=r"start\(\)"):
        tail.catch_up(1)
    tail.close()
