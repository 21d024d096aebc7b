from __future__ import annotations

import asyncio
from asyncio import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskline.errors import DeliveryFailed
from taskline.infra.kafka.lifecycle import LaneBatcher, LifecycleLog
from taskline.infra.log import OutRecord, Position
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import (
    MAX_BATCH_EVENTS,
    LifecycleBatch,
    LifecycleEntry,
    LifecycleEvent,
    Started,
    Succeeded,
)
from taskline.schemas.ids import TaskId, lane_of, new_task_id

NOW_MS = 1_750_000_000_000
TASK = new_task_id(NOW_MS)
# What an entry counts for, over its event's bytes.
OVERHEAD = 36


def entry(number: int, size: int = 0) -> LifecycleEntry:
    return LifecycleEntry(task_id=TASK, retain_until=0, event=number.to_bytes(4, "big") + bytes(size))


class Lane:
    """Drives a batcher as the shell does, on a clock of its own; records what leaves and when."""

    def __init__(self, batcher: LaneBatcher) -> None:
        self.batcher = batcher
        self.now = 0.0
        self.left: list[tuple[float, tuple[LifecycleEntry, ...]]] = []
        self.added_at: dict[bytes, float] = {}

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.batcher.due()) is not None and max(due, self.now) <= end:
            self.now = max(due, self.now)
            self.left.append((self.now, self.batcher.take(self.now)))
        self.now = end

    def add(self, item: LifecycleEntry) -> None:
        self.added_at[item.event] = self.now
        full = self.batcher.add(item, self.now)
        if full:
            self.left.append((self.now, full))


steps = st.lists(
    st.tuples(st.floats(0, 30), st.lists(st.integers(0, 400), max_size=8)),
    max_size=40,
)


@given(steps=steps, linger=st.floats(0, 20), max_events=st.integers(1, 6), max_bytes=st.integers(50, 900))
def test_order_is_kept_nothing_is_lost_and_nobody_waits_too_long(
    steps: list[tuple[float, list[int]]], linger: float, max_events: int, max_bytes: int
) -> None:
    lane = Lane(LaneBatcher(linger=linger, max_events=max_events, max_bytes=max_bytes))
    added: list[LifecycleEntry] = []
    for pause, sizes in steps:
        lane.advance(pause)
        for size in sizes:
            item = entry(len(added), size)
            added.append(item)
            lane.add(item)
    lane.advance(linger)

    assert [item for _, batch in lane.left for item in batch] == added
    assert len(lane.batcher) == 0
    for at, batch in lane.left:
        assert batch
        assert len(batch) <= max_events
        assert len(batch) == 1 or sum(len(item.event) + OVERHEAD for item in batch) <= max_bytes
        for item in batch:
            assert at - lane.added_at[item.event] <= linger + 1e-6


@given(gaps=st.lists(st.floats(5, 50), min_size=1, max_size=30))
def test_an_idle_lane_never_waits(gaps: list[float]) -> None:
    lane = Lane(LaneBatcher(linger=5))
    for number, gap in enumerate(gaps):
        lane.advance(gap + 0.001)
        lane.add(entry(number))
        due = lane.batcher.due()
        assert due is not None
        assert due <= lane.now
        lane.advance(0)
    assert [len(batch) for _, batch in lane.left] == [1] * len(gaps)


def test_under_load_batches_leave_once_per_linger() -> None:
    lane = Lane(LaneBatcher(linger=5))
    for number in range(100):
        lane.add(entry(number))
        lane.advance(1)
    lane.advance(5)
    # The first leaves at once, then a batch every five ms.
    assert [len(batch) for _, batch in lane.left] == [1, 4] + [5] * 19


def test_an_event_over_the_limit_goes_alone() -> None:
    lane = Lane(LaneBatcher(linger=5, max_bytes=100))
    for number, size in enumerate([1, 500, 1]):
        lane.add(entry(number, size))
    lane.advance(5)
    assert [len(batch) for _, batch in lane.left] == [1, 1, 1]


# ---- the shell -------------------------------------------------------------------------------------------------------


class FakeLog:
    def __init__(self) -> None:
        self.records: list[OutRecord] = []
        self.futures: list[Future[Position]] = []
        self.codec = Codec()
        self.arrived = asyncio.Event()

    def append(self, record: OutRecord) -> Future[Position]:
        self.records.append(record)
        self.arrived.set()
        self.futures.append(asyncio.get_running_loop().create_future())
        return self.futures[-1]

    def settle(self, number: int, error: Exception | None = None) -> None:
        if error:
            self.futures[number].set_exception(error)
        else:
            partition = self.records[number].partition or 0
            self.futures[number].set_result(Position(topic="x", partition=partition, offset=number))

    def events(self, number: int) -> list[LifecycleEvent]:
        batch = self.codec.decode(self.records[number].value, LifecycleBatch)
        return [self.codec.decode(item.event, LifecycleEvent) for item in batch.events]


def started(task_id: TaskId, attempt: int = 1) -> Started:
    return Started(
        task_id=task_id,
        tenant="t",
        attempt=attempt,
        worker="w",
        at=NOW_MS,
        retain_until=NOW_MS,
        execution=task_id,
        source_topic="tasks.high",
        source_partition=0,
        source_offset=7,
    )


def succeeded(task_id: TaskId, result: bytes = b"1") -> Succeeded:
    return Succeeded(
        task_id=task_id,
        tenant="t",
        attempt=1,
        worker="w",
        at=NOW_MS,
        retain_until=NOW_MS,
        execution=task_id,
        result=result,
    )


def tasks_of_lane(lane: int, lanes: int, count: int) -> list[TaskId]:
    found: list[TaskId] = []
    while len(found) < count:
        task_id = new_task_id(NOW_MS)
        if lane_of(task_id, lanes) == lane:
            found.append(task_id)
    return found


def lifecycle(log: FakeLog, linger_ms: float = 10_000, **options: int) -> LifecycleLog:
    return LifecycleLog(log, Codec(), Topics(), 4, linger_ms, **options)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_one_event_on_an_idle_lane_leaves_within_the_turn_of_the_loop() -> None:
    async def main() -> None:
        log = FakeLog()
        task_id = tasks_of_lane(2, 4, 1)[0]
        future = lifecycle(log).append(started(task_id))
        await turns()
        (record,) = log.records
        assert (record.topic, record.partition, record.key) == ("tasks.lifecycle", 2, None)
        assert log.events(0) == [started(task_id)]
        assert not future.done()
        log.settle(0)
        assert (await future).partition == 2

    asyncio.run(main())


def test_what_comes_in_one_turn_shares_a_batch_and_lanes_do_not_mix() -> None:
    async def main() -> None:
        log = FakeLog()
        ours = lifecycle(log)
        events = [started(task_id) for lane in range(4) for task_id in tasks_of_lane(lane, 4, 5)]
        for event in events:
            ours.append(event)
        await turns()
        assert [record.partition for record in log.records] == [0, 1, 2, 3]
        assert [event for number in range(4) for event in log.events(number)] == events

    asyncio.run(main())


def test_a_busy_lane_gathers_until_flush() -> None:
    async def main() -> None:
        log = FakeLog()
        ours = lifecycle(log)
        task_id, *others = tasks_of_lane(1, 4, 20)
        first = ours.append(started(task_id))
        await turns()
        futures = [ours.append(started(other)) for other in others]
        await turns()
        assert len(log.records) == 1
        flushing = asyncio.create_task(ours.flush())
        await turns()
        assert len(log.records) == 2
        assert log.events(1) == [started(other) for other in others]
        assert not flushing.done()
        log.settle(0)
        log.settle(1)
        await flushing
        assert first.done()
        assert all(future.done() for future in futures)

    asyncio.run(main())


def test_the_linger_ends() -> None:
    async def main() -> None:
        log = FakeLog()
        ours = lifecycle(log, linger_ms=1)
        first, second = tasks_of_lane(0, 4, 2)
        ours.append(started(first))
        await turns()
        log.arrived.clear()
        ours.append(started(second))
        async with asyncio.timeout(10):
            await log.arrived.wait()
        assert log.events(1) == [started(second)]

    asyncio.run(main())


def test_a_full_batch_leaves_at_once() -> None:
    async def main() -> None:
        log = FakeLog()
        ours = lifecycle(log, max_batch_bytes=2_000)
        task_ids = tasks_of_lane(0, 4, 10)
        for task_id in task_ids:
            ours.append(succeeded(task_id, result=b"x" * 700))
        await turns()
        sizes = [len(log.events(number)) for number in range(len(log.records))]
        # The last two may still get company.
        assert sizes == [2] * 4
        assert [event.task_id for number in range(4) for event in log.events(number)] == task_ids[:8]

    asyncio.run(main())


def test_a_batch_never_has_more_events_than_a_sequence_number_can_tell_apart() -> None:
    async def main() -> None:
        log = FakeLog()
        ours = lifecycle(log)
        task_id = tasks_of_lane(3, 4, 1)[0]
        for _ in range(MAX_BATCH_EVENTS + 1):
            ours.append(started(task_id))
        await turns()
        assert len(log.events(0)) == MAX_BATCH_EVENTS

    asyncio.run(main())


def test_a_failed_batch_fails_its_own_events_only() -> None:
    async def main() -> None:
        log = FakeLog()
        ours = lifecycle(log, linger_ms=0)
        a, b, c = tasks_of_lane(0, 4, 3)
        first = [ours.append(started(a)), ours.append(started(b))]
        await turns()
        second = ours.append(started(c))
        await turns()
        log.settle(0, DeliveryFailed("too large"))
        log.settle(1)
        for future in first:
            with pytest.raises(DeliveryFailed):
                await future
        assert (await second).offset == 1

    asyncio.run(main())


def test_a_cancelled_event_does_not_disturb_its_batch() -> None:
    async def main() -> None:
        log = FakeLog()
        ours = lifecycle(log)
        a, b = tasks_of_lane(0, 4, 2)
        cancelled, kept = ours.append(started(a)), ours.append(started(b))
        cancelled.cancel()
        await turns()
        log.settle(0)
        await kept

    asyncio.run(main())
