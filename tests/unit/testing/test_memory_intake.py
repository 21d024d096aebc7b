from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskline.errors import Unavailable
from taskline.infra.intake import Commit, TopicPartition
from taskline.infra.log import OutRecord
from taskline.testing.broker import MemoryBroker
from taskline.testing.clock import VirtualClock
from taskline.testing.errors import FencedCommit
from taskline.testing.groups import assign
from taskline.testing.intake import MemoryIntake
from taskline.testing.loop import VirtualLoop
from taskline.testing.process import VirtualProcess, track

GROUP = "g"


class Reader:
    """A sink that finishes each record at once, and writes down what it is told."""

    def __init__(self, broker, **options):
        self.intake = MemoryIntake(broker, GROUP, ["t"], **options)
        self.process = VirtualProcess("reader")
        self.process.tie(self.intake.sever)
        self.calls = []
        self.offsets = {}
        self.revoking_seconds = 0
        self.seen = []

    async def start(self):
        await self.process.spawn(self.intake.start(self), name="start")
        return self

    def assigned(self, committed):
        self.calls.append(("assigned", tuple(sorted(committed))))
        self.offsets.update({key: commit.offset for key, commit in committed.items()})

    def received(self, records):
        for record in records:
            position = record.position
            key = TopicPartition(position.topic, position.partition)
            assert self.offsets[key] == position.offset, "in order, once, and only what is assigned"
            self.offsets[key] += 1
            self.seen.append(record.value)

    async def revoked(self, partitions):
        self.calls.append(("revoked", tuple(sorted(partitions))))
        await asyncio.sleep(self.revoking_seconds)
        return {key: Commit(offset=self.offsets.pop(key), metadata="holes") for key in partitions}

    def lost(self, partitions):
        self.calls.append(("lost", tuple(sorted(partitions))))
        for key in partitions:
            del self.offsets[key]

    def failed(self, error):
        raise AssertionError(error)


def fill(broker, count, start=0):
    for n in range(start, start + count):
        broker.append(OutRecord(topic="t", value=str(n).encode(), key=str(n).encode()))


def values(count):
    return {str(n).encode() for n in range(count)}


@pytest.fixture
def topic(broker):
    broker.create_topic("t", 4)
    return broker


def test_one_member_gets_everything_before_and_after_its_start(topic, run):
    async def main():
        fill(topic, 250)
        reader = await Reader(topic).start()
        await asyncio.sleep(1)
        fill(topic, 250, start=250)
        await asyncio.sleep(1)
        assert set(reader.seen) == values(500)
        assert len(reader.seen) == 500

    run(main())


def test_a_second_member_takes_half_after_a_hand_over_and_gives_it_back(topic, run):
    async def main():
        first = await Reader(topic).start()
        fill(topic, 100)
        await asyncio.sleep(1)
        first.revoking_seconds = 5
        second = await Reader(topic).start()
        await asyncio.sleep(4)
        assert second.calls == [], "the partitions are still being handed over"
        await asyncio.sleep(2)
        (_, moved) = first.calls[-1]
        assert first.calls[-1][0] == "revoked"
        assert second.calls == [("assigned", moved)]
        assert len(moved) == 2
        fill(topic, 100, start=100)
        await asyncio.sleep(1)
        assert Counter(first.seen + second.seen) == Counter(values(200)), "nothing twice, nothing lost"
        await second.intake.close()
        await second.intake.close()
        assert first.calls[-1] == ("assigned", moved)
        fill(topic, 100, start=200)
        await asyncio.sleep(1)
        assert Counter(first.seen + second.seen) == Counter(values(300))

    run(main())


def test_a_commit_is_where_the_next_owner_begins_with_its_metadata(topic, run):
    async def main():
        fill(topic, 10)
        first = await Reader(topic).start()
        await asyncio.sleep(0.1)
        key = TopicPartition("t", 0)
        await first.intake.commit({key: Commit(offset=1, metadata="x")})
        assert topic.group(GROUP).committed(key) == Commit(offset=1, metadata="x")
        await first.intake.close()
        second = Reader(topic)
        told = {}
        assigned = second.assigned
        second.assigned = lambda committed: (told.update(committed), assigned(committed))
        await second.start()
        await asyncio.sleep(0.1)
        assert told[key] == Commit(offset=topic.end_offset(key), metadata="holes")
        assert second.seen == []

    run(main())


def test_a_fenced_member_cannot_commit(topic, run):
    async def main():
        first, second = await Reader(topic).start(), await Reader(topic).start()
        await asyncio.sleep(0.1)
        theirs = {key: Commit(offset=0) for key in second.offsets}
        with pytest.raises(FencedCommit):
            await first.intake.commit(theirs)

    run(main())


def test_a_killed_member_is_noticed_when_its_session_is_over(topic, run):
    async def main():
        fill(topic, 50)
        first = await Reader(topic, session_seconds=10).start()
        await asyncio.sleep(1)
        second = await Reader(topic).start()
        await asyncio.sleep(1)
        await first.process.kill()
        fill(topic, 50, start=50)
        await asyncio.sleep(9)
        assert len(second.offsets) == 2
        await asyncio.sleep(2)
        assert len(second.offsets) == 4
        assert set(first.seen + second.seen) == values(100)

    run(main())


def test_a_member_killed_while_it_hands_over_does_not_hold_the_group_for_ever(topic, run):
    async def main():
        fill(topic, 50)
        first = await Reader(topic, session_seconds=10).start()
        await asyncio.sleep(1)
        first.revoking_seconds = 1_000
        second = await Reader(topic).start()
        await asyncio.sleep(1)
        await first.process.kill()
        await asyncio.sleep(25)
        assert len(second.offsets) == 4
        assert Counter(second.seen) == Counter(values(50)), "the first committed nothing"

    run(main())


def test_a_member_that_hands_over_for_too_long_is_fenced(topic, run):
    async def main():
        first = await Reader(topic).start()
        await asyncio.sleep(1)
        first.revoking_seconds = 10_000
        second = await Reader(topic).start()
        await asyncio.sleep(301)
        assert first.calls[-1][0] == "lost"
        assert len(second.offsets) == 2

    run(main())


def test_pause_and_resume_of_all_and_of_one_partition(topic, run):
    async def main():
        reader = await Reader(topic).start()
        await asyncio.sleep(0.1)
        reader.intake.pause()
        fill(topic, 40)
        await asyncio.sleep(1)
        assert reader.seen == []
        held = TopicPartition("t", 0)
        reader.intake.pause([held])
        reader.intake.resume()
        await asyncio.sleep(1)
        assert reader.offsets[held] == 0
        assert len(reader.seen) == 40 - topic.end_offset(held)
        reader.intake.resume([held])
        await asyncio.sleep(1)
        assert set(reader.seen) == values(40)

    run(main())


def test_while_the_broker_is_away_nothing_comes_and_nothing_is_committed(topic, run):
    async def main():
        reader = await Reader(topic).start()
        await asyncio.sleep(0.1)
        fill(topic, 1)
        topic.stop()
        await asyncio.sleep(1)
        assert reader.seen == []
        with pytest.raises(Unavailable):
            await reader.intake.commit({key: Commit(offset=0) for key in reader.offsets})
        topic.start()
        await asyncio.sleep(1)
        assert reader.seen == [b"0"]

    run(main())


def test_batches_are_bounded_so_that_a_pause_takes_effect(topic, run):
    async def main():
        fill(topic, 1_000)
        reader = Reader(topic, batch_records=50)
        received = reader.received
        reader.received = lambda records: (received(records), reader.intake.pause())
        await reader.start()
        await asyncio.sleep(1)
        assert len(reader.seen) == 50

    run(main())


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.integers(1, 12), st.data())
def test_shares_are_even_and_nothing_moves_without_need(members, count, data):
    partitions = [TopicPartition("t", number) for number in range(count)]
    current = {
        key: owner
        for key in partitions
        if (owner := data.draw(st.sampled_from([None, "gone", *members]))) is not None
    }
    target = assign(partitions, members, current)
    if not members:
        assert target == {}
        return
    shares = Counter(target.values())
    sizes = [shares[member] for member in members]
    assert set(target) == set(partitions)
    assert max(sizes) - min(sizes) <= 1
    held = Counter(owner for owner in current.values() if owner in members)
    kept = sum(1 for key, owner in target.items() if current.get(key) == owner)
    assert kept == sum(min(held[member], shares[member]) for member in members)
    assert assign(partitions, members, target) == target


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["join", "leave", "kill", "wait", "fill"]), max_size=14))
def test_whatever_happens_to_members_every_record_comes_and_nothing_finished_comes_again(steps):
    loop = VirtualLoop()
    track(loop)
    broker = MemoryBroker(VirtualClock(loop))
    broker.create_topic("t", 3)

    async def main():
        readers, everybody, written, killed = [], [], 0, False
        for step in [*steps, "join"]:
            if step == "join":
                readers.append(await Reader(broker, session_seconds=10).start())
                everybody.append(readers[-1])
            elif step == "fill":
                fill(broker, 7, start=written)
                written += 7
            elif step == "wait":
                await asyncio.sleep(3)
            elif readers:
                reader = readers.pop(0)
                if step == "kill":
                    killed = True
                    await reader.process.kill()
                else:
                    await reader.intake.close()
        await asyncio.sleep(60)
        seen = Counter(value for reader in everybody for value in reader.seen)
        assert set(seen) == values(written)
        if not killed:
            assert set(seen.values()) <= {1}
        owned = [key for reader in readers for key in reader.offsets]
        assert sorted(owned) == list(broker.partitions("t"))
        for reader in readers:
            await reader.intake.close()

    try:
        loop.run_until_complete(main())
    finally:
        loop.run_until_complete(_drained())
        loop.close()


async def _drained():
    for _ in range(50):
        await asyncio.sleep(1)
