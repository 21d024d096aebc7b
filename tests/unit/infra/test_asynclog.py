"""The bridge to asyncio against a double of the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from taskline.errors import DeliveryError, DeliveryFailed, DeliveryUnknown, ProducerClosed, QueueFull
from taskline.infra.kafka import asynclog
from taskline.infra.kafka.asynclog import KafkaLog
from taskline.infra.log import OutRecord, Position
from taskline.settings import Settings


class FakeAppender:
    """A client whose room and reports the test decides."""

    def __init__(self, *_: object, **__: object) -> None:
        self.room = 100
        self.sent: list[tuple[OutRecord, Callable[[Any], None]]] = []
        self.reports: list[Callable[[], None]] = []
        self.order: list[bytes | None] = []
        self.closed = False
        self.broken = False

    def __len__(self) -> int:
        return len(self.sent) + len(self.reports)

    def try_send(self, record: OutRecord, on_ack: Callable[[Any], None]) -> bool:
        assert not self.closed
        if record.topic == "missing":
            raise DeliveryFailed("missing")
        if len(self) >= self.room:
            return False
        self.sent.append((record, on_ack))
        self.order.append(record.value)
        return True

    def settle(self, outcome: DeliveryError | None = None, count: int | None = None) -> None:
        """What the log hears when it next looks."""
        taken, self.sent = self.sent[:count], self.sent[count:] if count else []
        for offset, (record, on_ack) in enumerate(taken):
            told = outcome or Position(topic=record.topic, partition=0, offset=offset)
            self.reports.append(partial(on_ack, told))

    def serve(self, timeout_seconds: float) -> int:
        assert timeout_seconds == 0, "the loop must never be blocked"
        if self.broken:
            self.broken = False
            raise RuntimeError("once")
        reports, self.reports = self.reports, []
        for report in reports:
            report()
        return len(reports)

    def close(self) -> int:
        self.closed = True
        left = len(self.sent)
        self.settle(DeliveryUnknown("given up"))
        self.serve(0)
        return left


def run(
    monkeypatch: pytest.MonkeyPatch,
    body: Callable[[KafkaLog, FakeAppender], Coroutine[Any, Any, None]],
    **producer: object,
) -> None:
    made: list[FakeAppender] = []

    def make(*args: object, **kwargs: Any) -> FakeAppender:
        made.append(FakeAppender(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(asynclog, "Appender", make)

    async def main() -> None:
        log = KafkaLog(Settings.model_validate({"producer": producer}), client_id="test")
        await body(log, made[0])

    asyncio.run(main())


def record(number: int, topic: str = "t") -> OutRecord:
    return OutRecord(topic=topic, value=str(number).encode())


def test_futures_resolve_with_their_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(log: KafkaLog, appender: FakeAppender) -> None:
        futures = [log.append(record(number)) for number in range(5)]
        appender.settle()
        assert [position.offset for position in await asyncio.gather(*futures)] == list(range(5))

    run(monkeypatch, body)


def test_failures_reach_their_futures_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(log: KafkaLog, appender: FakeAppender) -> None:
        refused = log.append(record(0, "missing"))
        unknown = log.append(record(1))
        appender.settle(DeliveryUnknown("late"))
        fine = log.append(record(2))
        appender.settle()
        with pytest.raises(DeliveryFailed):
            await refused
        with pytest.raises(DeliveryUnknown):
            await unknown
        await fine

    run(monkeypatch, body)


def test_a_full_buffer_keeps_the_order_and_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(log: KafkaLog, appender: FakeAppender) -> None:
        appender.room = 2
        futures = [log.append(record(number)) for number in range(9)]
        while not all(future.done() for future in futures):
            appender.settle(count=1)
            await asyncio.sleep(0.001)
        assert appender.order == [str(number).encode() for number in range(9)]

    run(monkeypatch, body)


def test_waiting_for_room_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(log: KafkaLog, appender: FakeAppender) -> None:
        appender.room = 1
        first, *others = [log.append(record(number)) for number in range(3)]
        for other in others:
            with pytest.raises(QueueFull):
                await other
        appender.settle()
        await first
        assert appender.order == [b"0"]

    run(monkeypatch, body, max_block_seconds=0.01)


def test_a_cancelled_future_that_waits_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(log: KafkaLog, appender: FakeAppender) -> None:
        appender.room = 1
        futures = [log.append(record(number)) for number in range(3)]
        futures[1].cancel()
        appender.settle()
        await futures[0]
        appender.settle()
        await futures[2]
        assert appender.order == [b"0", b"2"]

    run(monkeypatch, body)


def test_a_cancelled_future_ignores_its_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(log: KafkaLog, appender: FakeAppender) -> None:
        future, other = log.append(record(0)), log.append(record(1))
        future.cancel()
        appender.settle()
        await other
        assert future.cancelled()

    run(monkeypatch, body)


def test_close_says_how_many_were_given_up_and_resolves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(log: KafkaLog, appender: FakeAppender) -> None:
        appender.room = 2
        futures = [log.append(record(number)) for number in range(5)]
        assert await log.close(0.01) == 5
        kinds = [type(each) for each in await asyncio.gather(*futures, return_exceptions=True)]
        assert kinds == [DeliveryUnknown] * 2 + [QueueFull] * 3
        with pytest.raises(ProducerClosed):
            await log.append(record(9))
        assert await log.close() == 0

    run(monkeypatch, body)


def test_close_lets_the_waiting_ones_through(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(log: KafkaLog, appender: FakeAppender) -> None:
        appender.room = 1
        futures = [log.append(record(number)) for number in range(4)]
        closing = asyncio.create_task(log.close(10))
        while not closing.done():
            appender.settle(count=1)
            await asyncio.sleep(0.001)
        assert await closing == 0
        await asyncio.gather(*futures)

    run(monkeypatch, body)


def test_a_fault_while_looking_does_not_end_the_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(log: KafkaLog, appender: FakeAppender) -> None:
        appender.broken = True
        future = log.append(record(0))
        appender.settle()
        await future

    run(monkeypatch, body)


def test_an_idle_log_is_woken_by_the_next_append(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(log: KafkaLog, appender: FakeAppender) -> None:
        for number in range(3):
            future = log.append(record(number))
            appender.settle()
            async with asyncio.timeout(0.9):
                await future
            # Long enough to be idle again.
            await asyncio.sleep(0.01)

    run(monkeypatch, body)
