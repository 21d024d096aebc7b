"""`AsyncLog` on the broker in memory: acknowledgements come later than the call, and can be made to fail."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from collections.abc import Callable
from functools import partial

from taskline.errors import DeliveryError, DeliveryFailed, DeliveryUnknown, ProducerClosed, QueueFull
from taskline.infra.log import AsyncLog, OutRecord, Position
from taskline.testing.broker import Fault, MemoryBroker

# As `producer.delivery_timeout_seconds`.
DELIVERY_TIMEOUT_SECONDS = 30.0
# As `producer.max_buffered_records`.
MAX_BUFFERED_RECORDS = 20_000


class MemoryLog(AsyncLog):
    """One producer of a `MemoryBroker`.

    Appends keep their order, also across an absence of the broker: then they wait in the buffer, each for its delivery
    time-out at most.
    """

    def __init__(
        self,
        broker: MemoryBroker,
        *,
        delivery_timeout_seconds: float = DELIVERY_TIMEOUT_SECONDS,
        max_buffered_records: int = MAX_BUFFERED_RECORDS,
        ack_seconds: float = 0.0,
    ) -> None:
        """All durations are virtual seconds; `ack_seconds` passes between an append and its acknowledgement."""
        self._broker = broker
        self._delivery_timeout = delivery_timeout_seconds
        self._max_buffered = max_buffered_records
        self._ack_seconds = ack_seconds
        self._waiting: deque[tuple[OutRecord, Future[Position]]] = deque()
        self._unacknowledged: set[Future[Position]] = set()
        self._closed = False
        self._severed = False
        self._draining = False
        self._forget = broker.listen(self._drain)

    def append(self, record: OutRecord) -> Future[Position]:
        """As `AsyncLog.append`."""
        loop = asyncio.get_running_loop()
        future: Future[Position] = loop.create_future()
        if self._severed:
            return future
        if self._closed:
            future.set_exception(ProducerClosed("the log was closed"))
        elif len(self._unacknowledged) >= self._max_buffered:
            future.set_exception(QueueFull(f"{self._max_buffered} records wait for acknowledgement"))
        else:
            self._unacknowledged.add(future)
            future.add_done_callback(self._unacknowledged.discard)
            if self._waiting or not self._broker.available:
                self._waiting.append((record, future))
                loop.call_later(self._delivery_timeout, self._give_up, future)
            else:
                self._deliver(record, future)
        return future

    @property
    def unacknowledged(self) -> int:
        """Records whose acknowledgement is outstanding."""
        return len(self._unacknowledged)

    async def close(self, timeout_seconds: float | None = None) -> int:
        """Refuse further appends, and wait for what is unacknowledged.

        Args:
            timeout_seconds: how long to wait; None: the delivery time-out, after which nothing is left.

        Returns:
            How many records were given up.
        """
        self._closed = True
        given_up: set[Future[Position]] = set()
        if self._unacknowledged:
            patience = self._delivery_timeout if timeout_seconds is None else timeout_seconds
            _, given_up = await asyncio.wait(tuple(self._unacknowledged), timeout=patience)
        self._waiting.clear()
        for future in given_up:
            self._settle(future, DeliveryUnknown("no acknowledgement before the log was closed"))
        self._detach()
        return len(given_up)

    def sever(self) -> None:
        """The process that held this producer is dead: nothing more is appended and nobody hears of what was."""
        self._severed = True
        self._waiting.clear()
        self._detach()

    def _detach(self) -> None:
        forget, self._forget = self._forget, lambda: None
        forget()

    def _drain(self) -> None:
        # An append calls the listeners, so this is entered again from within.
        if self._draining:
            return
        self._draining = True
        try:
            while self._waiting and self._broker.available:
                record, future = self._waiting.popleft()
                if not future.done():
                    self._deliver(record, future)
        finally:
            self._draining = False

    def _deliver(self, record: OutRecord, future: Future[Position]) -> None:
        fault = self._broker.take_fault(record.topic)
        if fault is Fault.REFUSED:
            return self._later(future, DeliveryFailed(f"refused: an injected fault on {record.topic!r}"))
        if fault is Fault.RECORD_LOST:
            return self._later(
                future, DeliveryUnknown(f"no acknowledgement: an injected fault on {record.topic!r}")
            )
        try:
            position = self._broker.append(record)
        except DeliveryFailed as error:
            return self._later(future, error)
        if fault is Fault.ACK_LOST:
            return self._later(
                future, DeliveryUnknown(f"no acknowledgement: an injected fault on {record.topic!r}")
            )
        return self._later(future, position)

    def _later(self, future: Future[Position], outcome: Position | DeliveryError) -> None:
        settle: Callable[[], None] = partial(self._settle, future, outcome)
        loop = future.get_loop()
        if self._ack_seconds:
            loop.call_later(self._ack_seconds, settle)
        else:
            loop.call_soon(settle)

    def _settle(self, future: Future[Position], outcome: Position | DeliveryError) -> None:
        if future.done() or self._severed:
            return
        if isinstance(outcome, Position):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    def _give_up(self, future: Future[Position]) -> None:
        for entry in self._waiting:
            if entry[1] is future:
                self._waiting.remove(entry)
                self._settle(future, DeliveryUnknown(f"no acknowledgement in {self._delivery_timeout:g} s"))
                return
