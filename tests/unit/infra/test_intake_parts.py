"""The parts of the Kafka intake that need no Kafka: flow, configuration, the meaning of errors, commits in order."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from hypothesis import given
from hypothesis import strategies as st

from taskline.errors import Unavailable, WrongTopology
from taskline.infra.intake import Commit, TopicPartition
from taskline.infra.kafka.consumer import ErrorKind, IntakeOptions, consumer_config, kind_of
from taskline.infra.kafka.flow import Flow, Gate
from taskline.infra.kafka.group_offsets import Offsets
from taskline.settings import KafkaSettings

ALL = tuple(TopicPartition("t", number) for number in range(4))


# ---- flow -------------------------------------------------------------------------------------------------------


class Actual:
    """What librdkafka would have paused."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.assigned: set[TopicPartition] = set()
        self.paused: set[TopicPartition] = set()

    def apply(self, *, flowing: bool) -> None:
        change = self.flow.change(flowing=flowing)
        if change is not None:
            assert set(change.pause) <= self.assigned - self.paused
            assert set(change.resume) <= self.paused
            self.paused = (self.paused | set(change.pause)) - set(change.resume)

    def gone(self, names: set[TopicPartition]) -> None:
        resumed = self.flow.gone(names)
        assert set(resumed) == self.paused & names
        self.paused -= names
        self.assigned -= names


@given(st.data())
def test_what_is_paused_is_what_is_wanted_of_what_is_assigned(data: st.DataObject) -> None:
    flow = Flow()
    actual = Actual(flow)
    held: set[TopicPartition] = set()
    some = st.sets(st.sampled_from(ALL), min_size=1)
    for step in data.draw(st.lists(st.sampled_from(["assign", "gone", "hold", "release"]), max_size=25)):
        names = data.draw(some)
        if step == "assign":
            flow.assigned(names - actual.assigned)
            actual.assigned |= names
        elif step == "gone":
            actual.gone(names & actual.assigned)
            held -= names
        elif step == "hold":
            flow.pause(names & actual.assigned)
            held |= names & actual.assigned
        else:
            flow.resume(names)
            held -= names
        flowing = data.draw(st.booleans())
        actual.apply(flowing=flowing)
        assert actual.paused == (held if flowing else actual.assigned)
        actual.apply(flowing=flowing)


def test_a_short_stall_waits_a_long_one_closes_and_a_resume_wakes() -> None:
    flow = Flow()
    assert flow.wait() is Gate.OPEN
    flow.pause(None)
    threading.Timer(0.05, flow.wake).start()
    assert flow.wait() is Gate.WAITING
    threading.Timer(0.05, flow.resume, (None,)).start()
    assert flow.wait() is Gate.OPEN
    flow.pause(None)
    while (gate := flow.wait()) is Gate.WAITING:
        pass
    assert gate is Gate.CLOSED
    assert flow.wait() is Gate.CLOSED
    flow.resume(None)
    assert flow.wait() is Gate.OPEN


def test_many_short_stalls_are_no_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("taskline.infra.kafka.flow.time.monotonic", lambda: now[0])
    flow = Flow()
    for _ in range(10):
        now[0] += 0.4
        flow.delivering()
        threading.Timer(0.01, flow.delivered).start()
        while (gate := flow.wait()) is Gate.WAITING:
            pass
        assert gate is Gate.OPEN


def test_one_batch_is_on_its_way_at_a_time() -> None:
    flow = Flow()
    flow.delivering()
    threading.Timer(0.05, flow.delivered).start()
    assert flow.wait() is Gate.OPEN


# ---- configuration and errors --------------------------------------------------------------------------------------


def test_the_poll_interval_leaves_room_for_the_grace() -> None:
    kafka = KafkaSettings()
    config = consumer_config(kafka, IntakeOptions(batch=64, grace_seconds=1_000), group="g", client_id="c")
    assert config["max.poll.interval.ms"] >= 1_030_000
    assert config["enable.auto.commit"] is False
    assert config["auto.offset.reset"] == "error"
    assert 3 * config["heartbeat.interval.ms"] <= config["session.timeout.ms"]
    short = consumer_config(
        KafkaSettings(session_timeout_ms=1_000),
        IntakeOptions(batch=64, grace_seconds=30),
        group="g",
        client_id="c",
    )
    assert 3 * short["heartbeat.interval.ms"] <= short["session.timeout.ms"] <= short["max.poll.interval.ms"]


def test_the_broker_s_protocol_is_asked_for_without_what_the_client_refuses_beside_it() -> None:
    config = consumer_config(
        KafkaSettings(group_protocol="consumer"),
        IntakeOptions(batch=1, grace_seconds=1),
        group="g",
        client_id="c",
    )
    assert config["group.protocol"] == "consumer"
    # The client itself says so.
    Consumer(config).close()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError._ALL_BROKERS_DOWN, ErrorKind.PASSING),
        (KafkaError._TRANSPORT, ErrorKind.PASSING),
        (KafkaError._MAX_POLL_EXCEEDED, ErrorKind.PASSING),
        (KafkaError.REBALANCE_IN_PROGRESS, ErrorKind.PASSING),
        (KafkaError._AUTO_OFFSET_RESET, ErrorKind.OFFSET_LOST),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, ErrorKind.NO_TOPIC),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, ErrorKind.FATAL),
    ],
)
def test_each_error_has_its_meaning(code: int, kind: ErrorKind) -> None:
    assert kind_of(KafkaError(code)) is kind


# ---- offsets ------------------------------------------------------------------------------------------------------------


class FakeConsumer:
    """Just the calls about offsets."""

    def __init__(self, stored: dict[int, tuple[int, str]], partitions: int = 4) -> None:
        self.stored = stored
        self.partitions = partitions
        self.failures: list[Exception] = []
        self.sent: list[list[KafkaPartition]] = []

    def committed(self, partitions: list[KafkaPartition], timeout: float) -> list[KafkaPartition]:
        if self.failures:
            raise self.failures.pop(0)
        return [
            KafkaPartition(each.topic, each.partition, *self.stored.get(each.partition, (-1001,)))
            for each in partitions
        ]

    def commit(self, offsets: list[KafkaPartition], asynchronous: bool) -> list[KafkaPartition] | None:
        if asynchronous:
            self.sent.append(offsets)
            return None
        if self.failures:
            raise self.failures.pop(0)
        self.stored |= {each.partition: (each.offset, each.metadata) for each in offsets}
        return offsets

    def answer(self, offsets: Offsets, error: KafkaError | None = None) -> None:
        """The broker takes, or refuses, the oldest asynchronous commit."""
        sent = self.sent.pop(0)
        if error is None:
            self.stored |= {each.partition: (each.offset, each.metadata) for each in sent}
        offsets.answered(error, sent)

    def list_topics(self, topic: str, timeout: float) -> Any:
        return SimpleNamespace(
            topics={topic: SimpleNamespace(partitions=dict.fromkeys(range(self.partitions)))}
        )

    def get_watermark_offsets(self, partition: KafkaPartition, timeout: float) -> tuple[int, int]:
        return 5, 9


def never() -> bool:
    return False


def test_partitions_begin_where_the_group_is_and_new_ones_at_their_beginning() -> None:
    consumer = FakeConsumer({0: (7, "meta"), 1: (0, "")})
    begin = Offsets(consumer, "g").begin(ALL, never)  # type: ignore[arg-type]
    assert begin == {
        ALL[0]: Commit(offset=7, metadata="meta"),
        ALL[1]: Commit(offset=0),
        ALL[2]: Commit(offset=5),
        ALL[3]: Commit(offset=5),
    }


def test_a_group_without_any_offset_is_refused() -> None:
    with pytest.raises(WrongTopology, match="taskline topics create"):
        Offsets(FakeConsumer({}), "g").begin(ALL[:1], never)  # type: ignore[arg-type]


def test_an_absent_coordinator_is_asked_again_until_giving_up() -> None:
    consumer = FakeConsumer({0: (7, "")})
    consumer.failures = [KafkaException(KafkaError(KafkaError._TIMED_OUT))]
    assert Offsets(consumer, "g").begin(ALL[:1], never)[ALL[0]].offset == 7  # type: ignore[arg-type]
    consumer.failures = [KafkaException(KafkaError(KafkaError._TIMED_OUT))]
    with pytest.raises(Unavailable):
        Offsets(consumer, "g").begin(ALL[:1], lambda: True)  # type: ignore[arg-type]


def test_an_older_commit_never_follows_a_newer_one_and_what_is_not_owned_is_left_alone() -> None:
    consumer = FakeConsumer({0: (7, ""), 1: (3, "")})
    offsets = Offsets(consumer, "g")  # type: ignore[arg-type]
    offsets.begin(ALL[:1], never)
    answers: list[Exception | None] = []
    offsets.send({ALL[0]: Commit(offset=9), ALL[1]: Commit(offset=9)}, answers.append)
    assert answers == []
    consumer.answer(offsets)
    assert answers == [None]
    assert consumer.stored == {0: (9, ""), 1: (3, "")}
    offsets.send({ALL[0]: Commit(offset=8)}, answers.append)
    offsets.store({ALL[0]: Commit(offset=8)})
    assert answers == [None, None]
    assert (consumer.sent, consumer.stored[0]) == ([], (9, ""))
    offsets.send({ALL[0]: Commit(offset=9, metadata="more")}, answers.append)
    consumer.answer(offsets, KafkaError(KafkaError.REBALANCE_IN_PROGRESS))
    assert isinstance(answers[-1], KafkaException)
    offsets.send({ALL[0]: Commit(offset=9, metadata="more")}, answers.append)
    consumer.answer(offsets)
    assert consumer.stored[0] == (9, "more")
    offsets.forget(ALL[:1])
    offsets.store({ALL[0]: Commit(offset=20)})
    assert consumer.stored[0] == (9, "more")


def test_a_final_commit_is_made_again_while_the_group_is_moving_and_over_an_earlier_one() -> None:
    consumer = FakeConsumer({0: (7, "")})
    offsets = Offsets(consumer, "g")  # type: ignore[arg-type]
    offsets.begin(ALL[:1], never)
    consumer.failures = [KafkaException(KafkaError(KafkaError.ILLEGAL_GENERATION))]
    offsets.store({ALL[0]: Commit(offset=9)})
    assert consumer.stored[0] == (9, "")
    consumer.failures = [KafkaException(KafkaError(KafkaError.UNKNOWN_MEMBER_ID))]
    with pytest.raises(KafkaException):
        offsets.store({ALL[0]: Commit(offset=10)})
    consumer.failures = [KafkaException(KafkaError(KafkaError.ILLEGAL_GENERATION)) for _ in range(9)]
    with pytest.raises(KafkaException):
        offsets.store({ALL[0]: Commit(offset=10)})
    consumer.failures = []
    offsets.send({ALL[0]: Commit(offset=10)}, lambda _: None)
    offsets.store({ALL[0]: Commit(offset=12)})
    assert consumer.stored[0] == (12, "")
    # An answer for what nobody asked, or after the partition went, is no fault.
    offsets.forget(ALL[:1])
    consumer.answer(offsets)
    offsets.answered(None, [])
