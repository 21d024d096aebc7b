"""The delay engine on the log in memory and in virtual time: bounds, rebalances, outages, crashes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from taskline.errors import OffsetLost
from taskline.infra.holes import decode_holes
from taskline.infra.intake import Commit, TopicPartition
from taskline.infra.kafka.flow import Flow
from taskline.infra.log import HEADER_DUE, HEADER_TARGET, InRecord, OutRecord
from taskline.infra.tiers import SLACK_MS, Tiers, delayed
from taskline.infra.topics import Topics, topology, waiting_topics
from taskline.processors.delay_core import Router
from taskline.processors.delay_engine import HAND_OVER_SECONDS, DelayEngine
from taskline.processors.delay_progress import MAX_UNCOMMITTED
from taskline.settings import Settings
from taskline.testing.broker import Fault, MemoryBroker
from taskline.testing.clock import DEFAULT_START, VirtualClock
from taskline.testing.intake import MemoryIntake
from taskline.testing.log import MemoryLog
from taskline.testing.loop import VirtualLoop
from taskline.testing.process import VirtualProcess, track

T = TypeVar("T")
TOPICS = Topics()
TARGET = "tasks.high"


class Member:
    """One delay process."""

    def __init__(self, kit: Kit) -> None:
        self.process = VirtualProcess("delay")
        self.stop = asyncio.Event()
        settings = kit.settings
        self.log = MemoryLog(kit.broker, ack_seconds=kit.ack_seconds)
        self.intake = MemoryIntake(
            kit.broker, TOPICS.delay_group, waiting_topics(settings), session_seconds=6.0, batch_records=20
        )
        self.process.tie(self.log.sever)
        self.process.tie(self.intake.sever)
        tiers = Tiers.of(settings.delay.tiers)
        router = Router(TOPICS, tiers, settings.topics.queues)
        self.engine = DelayEngine(
            self.intake,
            self.log,
            router,
            stages=[router.scheduled(), *map(router.stage, tiers.tiers)],
            settings=settings.delay,
            clock=kit.clock,
        )
        self.task = self.process.spawn(self.engine.run(self.stop), name="delay")

    @property
    def held(self) -> int:
        return sum(map(len, self.engine.lanes))


class Kit:
    """A log in memory, and what the tests do with it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.ack_seconds = 0.001
        self.clock = VirtualClock(loop, DEFAULT_START)
        self.broker = MemoryBroker(self.clock)
        self.use()

    def use(self, **delay: object) -> None:
        self.settings = Settings.model_validate(
            {
                "topics": {"delay_partitions": 2, "dispatch_partitions": 1},
                "delay": {"tiers": ("500ms", "1s", "2s", "5s", "10s")} | delay,
            }
        )

    def create(self) -> None:
        self.broker.create_topics(topology(self.settings))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def advance(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        async def inside() -> None:
            function(*arguments)

        self.run(inside())

    def member(self) -> Member:
        async def start() -> Member:
            return Member(self)

        member = self.run(start())
        self.advance(0.01)
        return member

    def record(self, number: int, delay_ms: int) -> OutRecord:
        return OutRecord(
            topic=TARGET,
            key=b"%d" % number,
            value=b"value %d" % number,
            headers={"n": b"%d" % number, HEADER_DUE: b"%d" % (self.clock.now_ms() + delay_ms)},
        )

    def submit(self, number: int, delay_ms: int) -> None:
        """As a delayed submission."""
        record = self.record(number, delay_ms)
        headers = {**record.headers, HEADER_TARGET: TARGET.encode()}
        self.broker.append(
            OutRecord(topic=TOPICS.scheduled, key=record.key, value=record.value, headers=headers)
        )

    def retry(self, number: int, delay_ms: int) -> None:
        """Straight into a tier."""
        now = self.clock.now_ms()
        tiers = Tiers.of(self.settings.delay.tiers)
        record = self.record(number, delay_ms)
        self.broker.append(delayed(record, due_ms=now + delay_ms, now_ms=now, topics=TOPICS, tiers=tiers))

    def delivered(self) -> tuple[InRecord, ...]:
        return self.broker.records(TARGET)

    def lateness(self) -> list[int]:
        return [record.timestamp_ms - int(record.headers[HEADER_DUE]) for record in self.delivered()]

    def numbers(self) -> Counter[int]:
        return Counter(int(record.headers["n"]) for record in self.delivered())

    def lag(self) -> int:
        return sum(self.broker.lag(TOPICS.delay_group, topic) for topic in waiting_topics(self.settings))

    def stop(self, member: Member) -> None:
        member.stop.set()
        self.run(asyncio.wait_for(member.task, 60))


@pytest.fixture
def kit() -> Iterator[Kit]:
    loop = VirtualLoop()
    track(loop)
    yield Kit(loop)

    async def cancel() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop.run_until_complete(cancel())
    loop.close()


def test_everything_is_delivered_in_time_unchanged_once_and_never_early(kit: Kit) -> None:
    kit.create()
    member = kit.member()
    rng = random.Random(4)
    for number in range(300):
        (kit.submit if number % 2 else kit.retry)(number, rng.randint(100, 30_000))
    kit.advance(31)
    assert kit.numbers() == Counter(range(300))
    assert min(kit.lateness()) >= 0
    # A hop takes the acknowledgement's millisecond here.
    assert max(kit.lateness()) <= SLACK_MS + 5
    assert sorted(kit.lateness())[150] <= 2
    for record in kit.delivered():
        number = int(record.headers["n"])
        assert (record.key, record.value) == (b"%d" % number, b"value %d" % number)
        assert set(record.headers) == {"n", HEADER_DUE}
    assert kit.lag() == 0
    kit.stop(member)


def test_what_becomes_due_first_arrives_first_whatever_tier_it_is_in(kit: Kit) -> None:
    """spring-kafka #1766: the wrong tier; #1716: a back-off of 1 s delivered behind one of 10 s."""
    kit.create()
    kit.member()
    for number, delay_ms in enumerate((12_000, 1_000, 5_100, 700, 10_000, 1_050)):
        kit.retry(number, delay_ms)
    kit.advance(13)
    assert [int(record.headers["n"]) for record in kit.delivered()] == [3, 1, 5, 2, 4, 0]
    assert max(kit.lateness()) <= 5


def test_a_full_partition_is_paused_and_flows_again_while_others_go_on(kit: Kit) -> None:
    kit.use(buffer_records=10)
    kit.create()
    member = kit.member()
    for number in range(1_000):
        kit.retry(number, 15_000)
    kit.advance(1)
    # The room of each of the two partitions, and a batch that was on its way.
    assert member.held <= 2 * (10 + 20)
    assert all(lane.paused for lane in member.engine.lanes if len(lane))
    kit.retry(1_000, 600)
    kit.advance(0.7)
    assert kit.numbers() == Counter([1_000])
    kit.advance(15)
    assert kit.numbers() == Counter(range(1_001))
    assert not any(lane.paused for lane in member.engine.lanes)


def test_memory_is_bounded_in_bytes_too(kit: Kit) -> None:
    kit.use(buffer_bytes=1_024)
    kit.create()
    member = kit.member()
    for number in range(500):
        kit.retry(number, 15_000)
    kit.advance(1)
    size = sum(held.size for lane in member.engine.lanes for held in lane._fifo)
    assert size <= 2 * (1_024 + 20 * 20)
    kit.advance(15)
    assert kit.numbers() == Counter(range(500))


def test_nothing_happens_while_nothing_is_due(kit: Kit) -> None:
    kit.create()
    member = kit.member()
    kit.advance(1)
    timers = len(kit.loop._scheduled)  # type: ignore[attr-defined]
    assert timers == 0
    for number in range(100):
        kit.retry(number, 19_000)
    kit.advance(1)
    # One for the earliest of all.
    assert len(kit.loop._scheduled) == 1  # type: ignore[attr-defined]
    kit.stop(member)


@pytest.mark.parametrize("moves", [1, 2])
def test_a_partition_that_is_revoked_while_paused_flows_when_it_comes_back(kit: Kit, moves: int) -> None:
    """spring-kafka #2525 and #2569: left paused after a reassignment."""
    kit.use(buffer_records=10)
    kit.create()
    first = kit.member()
    for number in range(200):
        kit.retry(number, 15_000)
    kit.advance(1)
    assert all(lane.paused for lane in first.engine.lanes if len(lane))
    for _ in range(moves):
        second = kit.member()
        kit.advance(1)
        assert any(len(lane) for lane in second.engine.lanes)
        kit.stop(second)
        kit.advance(1)
    kit.advance(15)
    assert kit.numbers() == Counter(range(200))
    assert max(kit.lateness()) <= 5
    assert kit.lag() == 0


def test_the_flow_of_the_real_intake_takes_no_pause_into_the_next_assignment() -> None:
    flow = Flow()
    name = TopicPartition("tasks.delay.5s", 0)
    flow.assigned([name])
    flow.pause((name,))
    change = flow.change(flowing=True)
    assert change is not None
    assert change.pause == (name,)
    # What is paused is resumed before it is let go.
    assert flow.gone([name]) == (name,)
    flow.assigned([name])
    assert flow.change(flowing=True) is None


def test_a_rebalance_in_the_middle_loses_nothing_and_repeats_nothing(kit: Kit) -> None:
    kit.create()
    members = [kit.member()]
    rng = random.Random(5)
    for number in range(400):
        kit.submit(number, rng.randint(200, 20_000))
        if number % 50 == 49:
            if number % 100 == 99:
                kit.stop(members.pop())
            else:
                members.append(kit.member())
        kit.advance(0.05)
    kit.advance(25)
    assert kit.numbers() == Counter(range(400))
    assert min(kit.lateness()) >= 0
    assert kit.lag() == 0


def test_after_a_crash_only_what_was_not_committed_is_forwarded_again(kit: Kit) -> None:
    kit.create()
    rng = random.Random(6)
    member = kit.member()
    for number in range(600):
        kit.submit(number, rng.randint(200, 20_000))
        kit.advance(0.005)
    repeated_at_most = 0
    for _ in range(4):
        kit.advance(rng.uniform(0.5, 3))
        repeated_at_most += sum(lane.uncommitted for lane in member.engine.lanes)
        kit.run(member.process.kill())
        kit.advance(rng.uniform(0, 2))
        member = kit.member()
    kit.advance(40)
    counts = kit.numbers()
    assert set(counts) == set(range(600))
    assert sum(counts.values()) - 600 <= repeated_at_most
    assert min(kit.lateness()) >= 0
    assert kit.lag() == 0


def test_the_shortest_tier_commits_what_it_forwarded_out_of_order(kit: Kit) -> None:
    kit.use(commit_interval_seconds=0.1)
    kit.create()
    member = kit.member()
    for number in range(20):
        kit.broker.append(
            OutRecord(
                topic=TOPICS.delay("500ms"),
                partition=0,
                value=b"v",
                headers={
                    "n": b"%d" % number,
                    HEADER_DUE: b"%d" % (kit.clock.now_ms() + (900 if number % 2 else 100)),
                    HEADER_TARGET: TARGET.encode(),
                },
            )
        )
    kit.advance(0.4)
    commit = kit.broker.group(TOPICS.delay_group).committed(TopicPartition(TOPICS.delay("500ms"), 0))
    assert commit.offset == 1
    assert sum(stop - start for start, stop in decode_holes(1, commit.metadata)) == 9
    kit.run(member.process.kill())
    kit.advance(6.5)
    kit.member()
    kit.advance(1)
    assert kit.numbers() == Counter(range(20))


def test_while_the_log_is_away_everything_waits_and_then_goes_on(kit: Kit) -> None:
    kit.create()
    member = kit.member()
    for number in range(50):
        kit.submit(number, 200 + 300 * number)
    kit.advance(3)
    kit.broker.stop()
    # Longer than the client itself would try.
    kit.advance(100)
    before = kit.numbers()
    kit.broker.start()
    kit.advance(20)
    assert max(before.values()) == 1
    assert kit.numbers() == Counter(range(50))
    assert min(kit.lateness()) >= 0
    assert kit.lag() == 0
    kit.stop(member)


@pytest.mark.parametrize("fault", list(Fault))
def test_an_append_that_fails_is_made_again(kit: Kit, fault: Fault) -> None:
    kit.create()
    kit.member()
    kit.broker.fail_next(fault, times=3)
    kit.submit(1, 1_500)
    kit.advance(5)
    assert set(kit.numbers()) == {1}
    assert kit.numbers()[1] <= (4 if fault is Fault.ACK_LOST else 1)
    assert min(kit.lateness()) >= 0
    assert kit.lag() == 0


def test_what_is_forwarded_and_not_committed_is_bounded(kit: Kit) -> None:
    kit.use(near_records=100_000, commit_interval_seconds=100.0)
    kit.ack_seconds = 3.0
    kit.create()
    member = kit.member()
    for number in range(3 * MAX_UNCOMMITTED):
        kit.retry(number, 500)
    kit.advance(2)
    assert len(kit.delivered()) == MAX_UNCOMMITTED
    kit.advance(20)
    assert kit.numbers() == Counter(range(3 * MAX_UNCOMMITTED))
    kit.stop(member)
    assert kit.lag() == 0


def test_a_partition_that_moves_waits_for_its_acknowledgements_but_not_for_ever(kit: Kit) -> None:
    kit.ack_seconds = 1.0
    kit.create()
    member = kit.member()
    for number in range(10):
        kit.retry(number, 600)
    kit.advance(0.8)
    kit.stop(member)
    assert kit.lag() == 0
    kit.ack_seconds = 1_000.0
    member = kit.member()
    for number in range(10, 20):
        kit.retry(number, 600)
    kit.advance(0.8)
    began = kit.loop.time()
    kit.broker.stop()
    member.stop.set()
    kit.run(asyncio.wait_for(member.task, 60))
    assert kit.loop.time() - began <= HAND_OVER_SECONDS + 0.1


def test_garbage_goes_to_the_dead_letters_and_stops_nothing(kit: Kit) -> None:
    kit.create()
    kit.member()
    kit.retry(1, 9_000)
    for topic in waiting_topics(kit.settings):
        for partition in range(2):
            kit.broker.append(OutRecord(topic=topic, value=b"\x00" + topic.encode(), partition=partition))
    kit.advance(0.1)
    # Not even behind what waits.
    letters = kit.broker.records(TOPICS.dlq)
    assert len(letters) == 2 * len(waiting_topics(kit.settings))
    assert {letter.value for letter in letters} == {
        b"\x00" + topic.encode() for topic in waiting_topics(kit.settings)
    }
    kit.advance(10)
    assert kit.numbers() == Counter([1])
    assert kit.lag() == 0


def test_partitions_that_are_lost_are_neither_forwarded_nor_committed_any_more(kit: Kit) -> None:
    kit.create()
    member = kit.member()
    for number in range(10):
        kit.retry(number, 3_000)
    kit.advance(1)
    kit.call(member.engine.lost, [lane.name for lane in member.engine.lanes])
    kit.advance(10)
    assert not kit.delivered()
    assert member.held == 0


def test_a_process_that_stood_still_forwards_nothing_that_is_another_s_by_now(kit: Kit) -> None:
    kit.create()
    frozen = kit.member()
    for number in range(40):
        kit.retry(number, 3_000 + 100 * number)
    kit.advance(1)
    # Its group takes it for dead, and it does not know.
    kit.call(lambda: kit.broker.group(TOPICS.delay_group).abandon(frozen.intake, after_seconds=0))
    kit.advance(0.1)
    assert len(frozen.engine.lanes) == 12

    def stand_still() -> None:
        kit.loop._virtual_seconds += 4

    kit.call(stand_still)
    kit.advance(0.1)
    assert not kit.delivered()
    kit.member()
    kit.advance(10)
    assert kit.numbers() == Counter(range(40))


def test_a_process_that_stood_still_and_is_still_a_member_goes_on(kit: Kit) -> None:
    kit.create()
    kit.member()
    for number in range(40):
        kit.retry(number, 3_000 + 100 * number)
    kit.advance(1)

    def stand_still() -> None:
        kit.loop._virtual_seconds += 4

    kit.call(stand_still)
    kit.advance(4)
    assert kit.numbers() == Counter(range(40))


def test_metadata_of_another_offset_is_no_reason_to_skip(kit: Kit) -> None:
    kit.create()
    member = kit.member()
    name = member.engine.lanes[0].name
    kit.call(member.engine.lost, [name])
    kit.call(member.engine.assigned, {name: Commit(offset=0, metadata="garbage")})
    assert member.engine.lanes[-1].tracker.take(0)


def test_an_intake_that_can_not_go_on_ends_the_engine_with_its_reason(kit: Kit) -> None:
    kit.create()
    member = kit.member()
    member.engine.failed(OffsetLost("g", "t", 0, "gone"))
    with pytest.raises(OffsetLost):
        kit.run(asyncio.wait_for(member.task, 10))
