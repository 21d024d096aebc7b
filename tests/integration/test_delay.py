"""The delay role as a process on a real Kafka."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from delay_kit import Delayed, Delivery, bounds, committed, now_ms
from worker_kit import eventually, read_all

from taskline.infra.kafka.admin import create_topics
from taskline.infra.kafka.requests import admin_client
from taskline.infra.local.roles import Role
from taskline.infra.log import HEADER_DUE, HEADER_TARGET, OutRecord
from taskline.infra.topics import Topics
from taskline.settings import Settings

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

Start = Callable[[Settings], Role]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts delay processes; they end cleanly after the test."""
    roles: list[Role] = []
    with ExitStack() as running:

        def run(settings: Settings) -> Role:
            role = Role(("delay",), settings, log=tmp_path / f"delay-{len(roles)}.log")
            roles.append(role)
            running.enter_context(role)
            return role

        yield run
        exits = [role.stop() for role in roles]
        for role in roles:
            print("---", role.log.name, "\n", role.log.read_text()[-4_000:])
        assert exits == [0] * len(roles)


@pytest.fixture
def delivery(topics_created: Settings) -> Iterator[Delivery]:
    made = Delivery(topics_created)
    yield made
    made.close()


def with_delay(settings: Settings, **changes: object) -> Settings:
    return settings.model_copy(update={"delay": settings.delay.model_copy(update=changes)})


def test_records_arrive_in_time_verbatim_and_never_early(
    topics_created: Settings, delivery: Delivery, start: Start
) -> None:
    role = start(topics_created)
    rng = random.Random(7)
    # The first ones are late by the start of the process, so they are not timed.
    delivery.send([Delayed(number=0, delay_ms=100)])
    delivery.follow_until(1, 30)
    assert delivery.counts() == Counter([0])
    waiting = [
        Delayed(number=number, delay_ms=rng.randint(100, 12_000), retry=number % 2 == 0)
        for number in range(1, 80)
    ]
    delivery.send(waiting)
    delivery.follow_until(80, 20)
    role.check()
    assert delivery.counts() == Counter(range(80))
    late = delivery.lateness_ms()
    assert min(late) >= 0
    assert sorted(late[1:])[len(late) // 2] < 100
    for message in delivery.arrived:
        headers = dict(message.headers())
        number = int(headers["n"])
        assert message.key() == b"key %d" % number
        assert message.value() == b"\x00value %d" % number
        assert headers["taskline-task-id"] == number.to_bytes(16)
        assert set(headers) == {"n", "taskline-task-id", HEADER_DUE}
    # All is committed when the role has left.
    assert role.stop() == 0
    tiers = Topics(namespace=topics_created.kafka.namespace)
    for topic in (tiers.scheduled, *(tiers.delay(name) for name in topics_created.delay.tiers)):
        for number, (_, end) in bounds(topics_created, topic).items():
            assert committed(topics_created, [topic])[topic, number] == end


def test_a_second_process_takes_its_share_and_both_leave_cleanly(settings: Settings, start: Start) -> None:
    settings = settings.model_copy(
        update={"topics": settings.topics.model_copy(update={"delay_partitions": 2})}
    )
    create_topics(settings)
    delivery = Delivery(settings)
    first = start(settings)
    delivery.send([Delayed(number=n, delay_ms=500 + 150 * n) for n in range(60)])
    delivery.follow_until(5, 30)
    second = start(settings)
    delivery.follow_until(30, 30)
    assert first.stop() == 0
    delivery.follow_until(60, 30)
    second.check()
    assert delivery.counts() == Counter(range(60))
    assert min(delivery.lateness_ms()) >= 0
    delivery.close()


def test_what_is_forwarded_is_deleted_but_not_what_waits_nor_young_submissions(
    topics_created: Settings, delivery: Delivery, start: Start
) -> None:
    topics = Topics(namespace=topics_created.kafka.namespace)
    start(with_delay(topics_created, purge_interval_seconds=0.5, commit_interval_seconds=0.1))
    delivery.send(
        [
            *(Delayed(number=number, delay_ms=4_000) for number in range(20)),
            Delayed(number=20, delay_ms=60_000),
        ]
    )
    delivery.follow_until(20, 30)

    def purged() -> bool:
        first, end = bounds(topics_created, topics.delay("1s"))[0]
        return first == end >= 20

    eventually(purged, "the tier is purged", 20)
    assert bounds(topics_created, topics.scheduled)[0] == (0, 21)
    first, end = bounds(topics_created, topics.delay("5s"))[0]
    assert end - first >= 1
    delivery.follow(1)
    assert set(delivery.counts()) == set(range(20))


def test_a_retired_tier_is_emptied_into_the_declared_ones(
    topics_created: Settings, delivery: Delivery, start: Start
) -> None:
    topics = Topics(namespace=topics_created.kafka.namespace)
    # One that the group knows, and one that it has never read.
    with admin_client(topics_created.kafka) as admin:
        from confluent_kafka.admin import NewTopic

        made = NewTopic(topics.delay("3s"), 1, 1, config={"message.timestamp.type": "LogAppendTime"})
        for future in admin.create_topics([made]).values():
            future.result(30)
    fewer = with_delay(topics_created, tiers=("200ms", "1s"))
    due = now_ms() + 6_000
    for number, tier in enumerate(("5s", "3s", "5s", "3s")):
        record = Delayed(number=number, delay_ms=6_000).record(topics_created)
        headers = {**record.headers, HEADER_DUE: b"%d" % due}
        delivery.send_raw(
            OutRecord(topic=topics.delay(tier), key=record.key, value=record.value, headers=headers)
        )
    delivery.producer.flush(30)
    role = start(fewer)
    delivery.follow_until(4, 30)
    assert delivery.counts() == Counter(range(4))
    assert min(delivery.lateness_ms()) >= 0
    for tier in ("3s", "5s"):
        topic = topics.delay(tier)
        eventually(
            lambda topic=topic: committed(fewer, [topic])[topic, 0] == 2, "the retired tier is committed", 10
        )
    # Its topic may be deleted under the running role.
    with admin_client(topics_created.kafka) as admin:
        for future in admin.delete_topics([topics.delay("3s")]).values():
            future.result(30)
    delivery.follow(1)
    delivery.send([Delayed(number=4, delay_ms=2_000)])
    delivery.follow_until(5, 30)
    role.check()
    assert delivery.counts() == Counter(range(5))


def test_garbage_is_a_dead_letter_with_its_own_bytes(
    topics_created: Settings, delivery: Delivery, start: Start
) -> None:
    topics = Topics(namespace=topics_created.kafka.namespace)
    start(topics_created)
    good = Delayed(number=1, delay_ms=1_500)
    delivery.send([good])
    places = (topics.scheduled, topics.delay("200ms"), topics.delay("5s"))
    for topic in places:
        delivery.send_raw(
            OutRecord(
                topic=topic, value=b"\xff" + topic.encode(), headers={HEADER_DUE: b"tomorrow", "x": b"y"}
            )
        )
        delivery.send_raw(
            OutRecord(
                topic=topic,
                value=None,
                headers={HEADER_DUE: b"1", HEADER_TARGET: topics.dlq.encode()},
            )
        )
    delivery.producer.flush(30)
    delivery.follow_until(1, 30)
    eventually(lambda: len(read_all(topics_created, topics.dlq)) == 2 * len(places), "dead letters", 20)
    letters = read_all(topics_created, topics.dlq)
    assert Counter(letter.value() for letter in letters) == Counter(
        {None: len(places)} | {b"\xff" + topic.encode(): 1 for topic in places}
    )
    for letter in letters:
        headers = dict(letter.headers())
        assert headers["taskline-source"].decode().startswith(topics.namespace)
        assert headers["taskline-cause"]
        assert (headers[HEADER_DUE], headers.get("x")) in {(b"tomorrow", b"y"), (b"1", None)}
    assert delivery.counts() == Counter([1])
