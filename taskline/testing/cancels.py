"""A queue's cancel notices on the broker in memory, known as late as it is allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from taskline.infra.cancels import NOTICE_FRESH_SECONDS, CancelNotices, NoticeBook, read_notice
from taskline.infra.intake import TopicPartition
from taskline.infra.role import Clock
from taskline.schemas.codec import Codec
from taskline.schemas.ids import TaskId
from taskline.testing.broker import MemoryBroker

# More than any test appends.
_ALL = 1_000_000


class MemoryNotices(CancelNotices):
    """Hears of aborts as they are appended; reads the rest when it must not know less any more."""

    def __init__(self, broker: MemoryBroker, topic: str, codec: Codec, clock: Clock) -> None:
        """Follow `topic`; ages are by `clock`."""
        self._broker = broker
        self._partition = TopicPartition(topic, 0)
        self._codec = codec
        self._clock = clock
        self._book = NoticeBook()
        # Up to where all notices are known, and as of when; up to where aborts were heard.
        self._position = 0
        self._as_of = float("-inf")
        self._heard_to = 0
        self._on_abort: Callable[[TaskId], None] | None = None
        self._back = asyncio.Event()
        self._forget = broker.listen(self._appended)

    async def start(self, on_abort: Callable[[TaskId], None]) -> None:
        """See `CancelNotices`."""
        await self.catch_up()
        self._heard_to = self._position
        self._on_abort = on_abort

    def expect(self) -> None:
        """See `CancelNotices`."""

    async def catch_up(self) -> None:
        """See `CancelNotices`; while the broker is away it waits."""
        loop = asyncio.get_running_loop()
        if self._as_of >= loop.time() - NOTICE_FRESH_SECONDS:
            return
        await asyncio.sleep(0)
        while not self._broker.available:
            self._back.clear()
            await self._back.wait()
        self._as_of = loop.time()
        for record in self._broker.read(self._partition, self._position, _ALL):
            self._position = record.position.offset + 1
            if notice := read_notice(record.key, record.value, self._codec):
                self._book.take(notice, record.timestamp_ms)

    def names(self, task_id: TaskId) -> bool:
        """See `CancelNotices`."""
        return self._book.names(task_id, self._clock.now_ms())

    def aborts(self, task_id: TaskId) -> bool:
        """See `CancelNotices`."""
        return self._book.aborts(task_id)

    async def close(self) -> None:
        """See `CancelNotices`."""
        self.sever()

    def sever(self) -> None:
        """The process that held this is dead: it hears nothing more."""
        self._on_abort = None
        forget, self._forget = self._forget, lambda: None
        forget()

    def _appended(self) -> None:
        """Something was appended, or the broker is back."""
        self._back.set()
        if self._on_abort is None or not self._broker.available:
            return
        if self._broker.end_offset(self._partition) <= self._heard_to:
            return
        for record in self._broker.read(self._partition, self._heard_to, _ALL):
            self._heard_to = record.position.offset + 1
            notice = read_notice(record.key, record.value, self._codec)
            if notice is not None and notice.abort:
                self._book.take(notice, record.timestamp_ms)
                asyncio.get_running_loop().call_soon(partial(self._on_abort, notice.task_id))
