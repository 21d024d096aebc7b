"""Where partitions end, asked of a client that has outlived its broker."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from taskline.errors import Unavailable
from taskline.infra.intake import TopicPartition
from taskline.infra.kafka import records
from taskline.infra.kafka.records import LogEnds
from taskline.settings import KafkaSettings

PLACE = TopicPartition("t", 0)
QUESTIONS: tuple[Callable[[LogEnds], object], ...] = (
    lambda ends: ends.latest([PLACE], 0.1),
    lambda ends: ends.delete_before({PLACE: 3}, 0.1),
)


class Stale:
    """An admin client that asks by a leader's old term."""

    def __init__(self) -> None:
        self.polls = 0

    def list_offsets(self, wanted: Any, *, request_timeout: float) -> dict[Any, Future[Any]]:
        return dict.fromkeys(wanted, _refused())

    def delete_records(self, places: Any, *, request_timeout: float) -> dict[Any, Future[Any]]:
        return dict.fromkeys(places, _refused())

    def poll(self, seconds: float) -> None:
        self.polls += 1


def _refused() -> Future[Any]:
    refused: Future[Any] = Future()
    refused.set_exception(KafkaException(KafkaError(KafkaError.FENCED_LEADER_EPOCH)))
    return refused


@pytest.mark.parametrize("question", QUESTIONS, ids=["latest", "delete_before"])
def test_a_client_that_was_refused_is_replaced_for_the_next_question(
    question: Callable[[LogEnds], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Stale] = []

    def make(*_: object) -> Stale:
        made.append(Stale())
        return made[-1]

    monkeypatch.setattr(records, "new_client", make)
    ends = LogEnds(KafkaSettings(), client_id="upkeep")
    for asked in (1, 2):
        with pytest.raises(Unavailable):
            question(ends)
        # Each was asked once, its lines were written, and the next one is at hand.
        assert [client.polls for client in made] == [1] * asked + [0]
