from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskline.errors import DeliveryFailed, DeliveryUnknown, ProducerClosed, QueueFull
from taskline.infra.log import OutRecord, Position
from taskline.infra.topics import Topics, topology
from taskline.schemas.events import Priority
from taskline.settings import Settings
from taskline.testing.broker import Fault, MemoryBroker
from taskline.testing.clock import DEFAULT_START
from taskline.testing.log import MemoryLog

START_MS = round(DEFAULT_START.timestamp() * 1000)


class StoppedClock:
    def now_ms(self):
        return START_MS


def to(topic, value=b"v", **fields):
    return OutRecord(topic=topic, value=value, **fields)


# ---- the broker ----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.binary(max_size=4), st.binary(max_size=4))))
def test_a_key_has_one_partition_and_a_partition_keeps_the_order(pairs):
    broker = MemoryBroker(StoppedClock())
    broker.create_topic("t", 3)
    positions = [broker.append(to("t", value, key=key)) for key, value in pairs]
    homes = {}
    for (key, value), position in zip(pairs, positions, strict=True):
        assert homes.setdefault(key, position.partition) == position.partition
        stored = broker.read(("t", position.partition), position.offset, 1)[0]
        assert (stored.key, stored.value, stored.position) == (key, value, position)
    for partition in broker.partitions("t"):
        assert [record.position.offset for record in broker.read(partition, 0, 1_000)] == list(
            range(broker.end_offset(partition))
        )
    assert [record.value for record in broker.records("t")] == [value for _, value in pairs]


def test_a_record_keeps_everything_and_gets_the_brokers_time(broker, loop, run):
    broker.create_topic("t", 2)
    run(asyncio.sleep(1.5))
    position = broker.append(to("t", None, key=None, headers={"h": b"\x00"}, partition=1))
    assert position == Position(topic="t", partition=1, offset=0)
    (record,) = broker.records("t")
    assert (record.value, record.key, record.headers) == (None, None, {"h": b"\x00"})
    assert record.timestamp_ms == START_MS + 1_500


def test_keyless_records_are_spread(broker):
    broker.create_topic("t", 3)
    assert {broker.append(to("t")).partition for _ in range(3)} == {0, 1, 2}


@pytest.mark.parametrize(
    "record", [to("nowhere"), to("t", b"x" * 2_000), to("t", partition=5), to("t", partition=-1)]
)
def test_what_kafka_refuses_is_refused(broker, record):
    broker.create_topic("t", 2, max_message_bytes=1_000)
    with pytest.raises(DeliveryFailed):
        broker.append(record)
    assert broker.records() == ()


def test_the_declared_topology_can_be_made(broker):
    settings = Settings.model_validate({"kafka": {"namespace": "n."}, "topics": {"lanes": 4}})
    broker.create_topics(topology(settings))
    names = Topics(namespace="n.")
    assert len(broker.partitions(names.lifecycle)) == 4
    assert names.dispatch("default", Priority.LOW) in broker.topics()
    with pytest.raises(ValueError, match="exists"):
        broker.create_topic(names.dlq)


# ---- the log on it -------------------------------------------------------------------------------------------


def test_the_acknowledgement_comes_later_than_the_call(broker, run):
    broker.create_topic("t")

    async def main():
        future = MemoryLog(broker, ack_seconds=0.25).append(to("t"))
        assert not future.done()
        started = asyncio.get_running_loop().time()
        assert (await future).offset == 0
        assert asyncio.get_running_loop().time() - started == 0.25

    run(main())


@pytest.mark.parametrize(
    ("fault", "error", "stored"),
    [
        (Fault.REFUSED, DeliveryFailed, 0),
        (Fault.ACK_LOST, DeliveryUnknown, 1),
        (Fault.RECORD_LOST, DeliveryUnknown, 0),
    ],
)
def test_injected_faults(broker, run, fault, error, stored):
    broker.create_topic("t")
    broker.create_topic("other")

    async def main():
        log = MemoryLog(broker)
        broker.fail_next(fault, topic="t")
        await log.append(to("other"))
        with pytest.raises(error):
            await log.append(to("t"))
        assert len(broker.records("t")) == stored
        await log.append(to("t"))

    run(main())


def test_faults_are_used_up_in_turn(broker, run):
    broker.create_topic("t")

    async def main():
        log = MemoryLog(broker)
        broker.fail_next(Fault.REFUSED, times=2)
        broker.fail_next(Fault.ACK_LOST)
        errors = [type(await _outcome(log.append(to("t")))) for _ in range(4)]
        assert errors == [DeliveryFailed, DeliveryFailed, DeliveryUnknown, Position]

    run(main())


def test_while_the_broker_is_away_records_wait_in_order(broker, run):
    broker.create_topic("t")

    async def main():
        log = MemoryLog(broker)
        broker.stop()
        futures = [log.append(to("t", n.to_bytes(2, "big"))) for n in range(2_000)]
        await asyncio.sleep(29)
        assert broker.records("t") == ()
        broker.start()
        futures.append(log.append(to("t", b"last")))
        await asyncio.gather(*futures)

    run(main())
    values = [record.value for record in broker.records("t")]
    assert values == [n.to_bytes(2, "big") for n in range(2_000)] + [b"last"]


def test_a_record_that_waited_too_long_is_unknown_and_is_not_appended_later(broker, run):
    broker.create_topic("t")

    async def main():
        log = MemoryLog(broker, delivery_timeout_seconds=30)
        broker.stop()
        future = log.append(to("t"))
        await asyncio.sleep(29.9)
        assert not future.done()
        with pytest.raises(DeliveryUnknown):
            await future
        broker.start()
        await asyncio.sleep(0)
        assert broker.records("t") == ()

    run(main())


def test_the_buffer_is_bounded(broker, run):
    broker.create_topic("t")

    async def main():
        log = MemoryLog(broker, max_buffered_records=2)
        outcomes = await asyncio.gather(*(log.append(to("t")) for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in outcomes] == [Position, Position, QueueFull]

    run(main())


def test_close_waits_and_then_refuses(broker, run):
    broker.create_topic("t")

    async def main():
        log = MemoryLog(broker, ack_seconds=3)
        future = log.append(to("t"))
        assert await log.close() == 0
        assert future.done()
        with pytest.raises(ProducerClosed):
            await log.append(to("t"))

    run(main())


def test_a_severed_log_appends_nothing_and_tells_nothing(broker, run):
    broker.create_topic("t")

    async def main():
        log = MemoryLog(broker, ack_seconds=1)
        before = log.append(to("t"))
        log.sever()
        after = log.append(to("t"))
        await asyncio.sleep(100)
        assert not before.done()
        assert not after.done()
        assert len(broker.records("t")) == 1

    run(main())


async def _outcome(future):
    (outcome,) = await asyncio.gather(future, return_exceptions=True)
    return outcome
