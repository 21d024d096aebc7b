from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from taskline.errors import (
    DeliveryUnknown,
    InvalidPayload,
    ProducerClosed,
    Undelivered,
    UnknownTaskType,
)
from taskline.infra.log import OutRecord, Position
from taskline.producers import AsyncTaskProducer, Submission, TaskFailure, TaskHandle
from taskline.settings import Settings

Body = Callable[[AsyncTaskProducer, "FakeLog"], Awaitable[None]]


class FakeLog:
    """Acknowledges in the next turn of the loop, unless told to hold."""

    def __init__(self) -> None:
        self.hold = False
        self.records: list[OutRecord] = []
        self.futures: list[Future[Position]] = []
        self.most_open = 0

    def append(self, record: OutRecord) -> Future[Position]:
        loop = asyncio.get_running_loop()
        future: Future[Position] = loop.create_future()
        self.records.append(record)
        self.futures.append(future)
        self.most_open = max(self.most_open, sum(not each.done() for each in self.futures))
        if not self.hold:
            loop.call_soon(self.settle)
        return future

    def settle(self) -> None:
        for offset, future in enumerate(self.futures):
            if not future.done():
                future.set_result(Position(topic="t", partition=0, offset=offset))


@pytest.fixture
def run(types: Any) -> Callable[..., None]:
    def _run(body: Body, **producer: object) -> None:
        async def main() -> None:
            log = FakeLog()
            await body(AsyncTaskProducer(log, Settings.model_validate({"producer": producer}), types), log)

        asyncio.run(main())

    return _run


def items(count: int) -> list[Submission]:
    return [Submission(task_type="any.json", payload=number) for number in range(count)]


def test_submit_waits_for_the_acknowledgement(run: Callable[..., None]) -> None:
    async def body(tasks: AsyncTaskProducer, log: FakeLog) -> None:
        log.hold = True
        submitting = asyncio.create_task(tasks.submit("any.json", 1, priority="low"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not submitting.done()
        log.settle()
        handle = await submitting
        assert log.records[0].topic == "tasks.low"
        assert log.records[0].key == handle.task_id.bytes

    run(body)


def test_wrong_input_is_refused(run: Callable[..., None]) -> None:
    async def body(tasks: AsyncTaskProducer, log: FakeLog) -> None:
        with pytest.raises(UnknownTaskType):
            await tasks.submit("nobody", 1)
        with pytest.raises(InvalidPayload):
            await tasks.submit("geo.nearest", {"lat": 1.0})
        assert log.records == []

    run(body)


def test_a_failed_delivery_names_its_task(run: Callable[..., None]) -> None:
    async def body(tasks: AsyncTaskProducer, log: FakeLog) -> None:
        log.hold = True
        submitting = asyncio.create_task(tasks.submit("any.json", 1))
        await asyncio.sleep(0)
        log.futures[0].set_exception(DeliveryUnknown("late"))
        with pytest.raises(DeliveryUnknown) as caught:
            await submitting
        assert caught.value.task_id is not None
        await tasks.close()

    run(body)


@pytest.mark.parametrize("as_async", [False, True])
def test_submit_many_keeps_the_order_and_goes_on_past_bad_items(
    run: Callable[..., None], as_async: bool
) -> None:
    mixed: list[Any] = [
        *items(3),
        Submission(task_type="nobody.knows", payload=0),
        "not a submission",
        *items(1),
    ]

    async def slowly() -> AsyncIterator[Any]:
        for item in mixed:
            await asyncio.sleep(0)
            yield item

    async def body(tasks: AsyncTaskProducer, log: FakeLog) -> None:
        results = [result async for result in tasks.submit_many(slowly() if as_async else mixed)]
        assert [isinstance(result, TaskHandle) for result in results] == [True] * 3 + [False] * 2 + [True]
        assert [result.index for result in results if isinstance(result, TaskFailure)] == [3, 4]
        handles = [result for result in results if isinstance(result, TaskHandle)]
        assert [handle.position.offset for handle in handles] == list(range(4))

    run(body)


def test_submit_many_is_bounded(run: Callable[..., None]) -> None:
    async def body(tasks: AsyncTaskProducer, log: FakeLog) -> None:
        count = 0
        async for result in tasks.submit_many(items(100)):
            assert isinstance(result, TaskHandle)
            count += 1
        assert count == 100
        assert log.most_open <= 8

    run(body, max_buffered_records=8)


def test_many_submits_at_once(run: Callable[..., None]) -> None:
    async def body(tasks: AsyncTaskProducer, log: FakeLog) -> None:
        handles = await asyncio.gather(*(tasks.submit("any.json", number) for number in range(1_000)))
        assert len({handle.task_id for handle in handles}) == 1_000

    run(body)


def test_close_names_what_was_not_acknowledged(run: Callable[..., None]) -> None:
    async def body(tasks: AsyncTaskProducer, log: FakeLog) -> None:
        log.hold = True
        submitting = [asyncio.create_task(tasks.submit("any.json", number)) for number in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Undelivered) as caught:
            await tasks.close(0.001)
        assert len(caught.value.task_ids) == 3
        # They wait on; whoever owns the log ends it.
        log.settle()
        await asyncio.gather(*submitting)
        with pytest.raises(ProducerClosed):
            await tasks.submit("any.json", 1)
        await tasks.close()

    run(body)


def test_close_waits_for_acknowledgements(run: Callable[..., None]) -> None:
    async def body(tasks: AsyncTaskProducer, log: FakeLog) -> None:
        log.hold = True
        submitting = asyncio.create_task(tasks.submit("any.json", 1))
        await asyncio.sleep(0)
        closing = asyncio.create_task(tasks.close(10))
        await asyncio.sleep(0)
        log.settle()
        await closing
        assert (await submitting).position.offset == 0

    run(body)


def test_a_cancelled_submit_is_not_undelivered(run: Callable[..., None]) -> None:
    async def body(tasks: AsyncTaskProducer, log: FakeLog) -> None:
        log.hold = True
        submitting = asyncio.create_task(tasks.submit("any.json", 1))
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        await tasks.close(0)

    run(body)


def test_closing_right_after_the_last_acknowledgement(run: Callable[..., None]) -> None:
    """The future is done, and its callbacks have not run yet."""

    async def body(tasks: AsyncTaskProducer, log: FakeLog) -> None:
        def one() -> Iterator[Submission]:
            yield from items(1)
            log.settle()

        log.hold = True
        assert isinstance(await anext(tasks.submit_many(one())), TaskHandle)
        await tasks.close(0)

    run(body)
