"""Topics are asked for again while there is no answer, for so long and no longer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import NewTopic

from taskline.errors import TasklineError, Unavailable
from taskline.infra.kafka import requests
from taskline.infra.kafka.requests import TopicRequests
from taskline.infra.topics import TopicSpec

SPECS = [TopicSpec(name=name, partitions=1, replication_factor=1, config={}) for name in ("a", "b", "c")]


class Broker:
    """Gives the answers that it is told to: per request, per topic; what is not named is answered well."""

    def __init__(self, *answers: dict[str, int | None]) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []

    def create_topics(self, topics: Sequence[NewTopic], **times: Any) -> dict[str, Future[None]]:
        self.asked.append([topic.topic for topic in topics])
        answers = self.answers.pop(0) if self.answers else {}
        futures: dict[str, Future[None]] = {}
        for topic in topics:
            futures[topic.topic] = future = Future()
            if topic.topic not in answers:
                future.set_result(None)
            elif (code := answers[topic.topic]) is not None:
                future.set_exception(KafkaException(KafkaError(code)))
        return futures


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_CREATE_ATTEMPT_SECONDS", 0.1)


def create(broker: Broker, seconds: float = 5.0) -> list[str]:
    return sorted(TopicRequests(broker, seconds).create(SPECS))  # type: ignore[arg-type]


def test_who_gets_no_answer_asks_again_for_that_alone() -> None:
    # Of the two that were not answered, one was made all the same.
    broker = Broker({"a": None, "b": KafkaError._TIMED_OUT}, {"a": KafkaError.TOPIC_ALREADY_EXISTS})
    assert create(broker) == ["a", "b", "c"]
    assert broker.asked == [["a", "b", "c"], ["a", "b"]]


def test_what_somebody_else_made_is_theirs() -> None:
    broker = Broker({"b": KafkaError.TOPIC_ALREADY_EXISTS})
    assert create(broker) == ["a", "c"]
    assert len(broker.asked) == 1


def test_a_refusal_is_told_at_once() -> None:
    broker = Broker({"b": KafkaError.INVALID_REPLICATION_FACTOR})
    with pytest.raises(TasklineError, match="b"):
        create(broker)
    assert len(broker.asked) == 1


def test_a_broker_that_never_answers_is_unavailable_in_time() -> None:
    broker = Broker(*({"a": None} for _ in range(1_000)))
    began = time.monotonic()
    with pytest.raises(Unavailable, match="a"):
        create(broker, 1.0)
    assert 2 <= len(broker.asked) <= 12
    assert time.monotonic() - began < 60


def test_nothing_to_make_asks_nobody() -> None:
    broker = Broker()
    assert TopicRequests(broker, 1.0).create([]) == []  # type: ignore[arg-type]
    assert broker.asked == []
