"""A queue's cancel notices on Kafka: a tail that reads them, and a look-up of how far it must have read.

Invariant: all that is known of notices is changed on the event loop, in the order of the topic; `position` is the offset up to which they
are known there.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from collections.abc import Callable
from functools import partial

from confluent_kafka import Message

from taskline.infra.cancels import CancelNotices, NoticeBook, read_notice
from taskline.infra.kafka.cancel_lookup import Bounds, EndLookup
from taskline.infra.kafka.tail import Tail
from taskline.infra.role import Clock, SystemClock
from taskline.schemas.codec import Codec
from taskline.schemas.events import CancelNotice
from taskline.schemas.ids import TaskId
from taskline.settings import KafkaSettings

# A day's notices, at some ten thousand a second.
_START_SECONDS = 60.0


class KafkaNotices(CancelNotices):
    """Follows one topic of notices, for the loop in which it was made."""

    def __init__(
        self, kafka: KafkaSettings, topic: str, codec: Codec, *, client_id: str, clock: Clock | None = None
    ) -> None:
        """Follow `topic`; ages are by `clock`."""
        self._loop = asyncio.get_running_loop()
        self._codec = codec
        self._clock = clock or SystemClock()
        self._book = NoticeBook()
        self._on_abort: Callable[[TaskId], None] | None = None
        self._position = 0
        # What the tail's thread has read and the loop has not seen: (offset, notice, when it was appended); None: the log is a new one.
        self._read: deque[tuple[int, CancelNotice | None, int] | None] = deque()
        self._woken = False
        # Who waits until the notices up to an offset are known, in the order of the offsets.
        self._waiting: deque[tuple[int, list[Future[None]]]] = deque()
        self._tail = Tail(kafka, topic, self, client_id=f"{client_id}-cancels")
        self._lookup = EndLookup(
            kafka,
            topic,
            client_id=f"{client_id}-cancels-end",
            known=lambda: self._position,
            answered=self._answered,
        )

    # ---- CancelNotices -----------------------------------------------------------------------------------------

    async def start(self, on_abort: Callable[[TaskId], None]) -> None:
        """See `CancelNotices`."""
        await asyncio.to_thread(self._tail.start, _START_SECONDS)
        self._lookup.start()
        await self.catch_up()
        # What was asked before this process began is not about anything that runs here.
        self._on_abort = on_abort

    async def catch_up(self) -> None:
        """See `CancelNotices`."""
        await self._lookup.ask()

    def names(self, task_id: TaskId) -> bool:
        """See `CancelNotices`."""
        return self._book.names(task_id, self._clock.now_ms())

    def aborts(self, task_id: TaskId) -> bool:
        """See `CancelNotices`."""
        return self._book.aborts(task_id)

    async def close(self) -> None:
        """See `CancelNotices`."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._lookup.close()
        self._tail.close()

    # ---- the tail's calls, on its thread (Sink) ------------------------------------------------------------------

    def take(self, message: Message) -> None:
        """See `Sink`."""
        notice = read_notice(message.key(), message.value(), self._codec)
        self._hand_over((message.offset(), notice, message.timestamp()[1]))

    def restart(self) -> None:
        """See `Sink`."""
        self._hand_over(None)

    def _hand_over(self, read: tuple[int, CancelNotice | None, int] | None) -> None:
        self._read.append(read)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._take_in)

    # ---- on the loop -------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        # Cleared before the queue is emptied: what comes in between wakes the loop once more.
        self._woken = False
        aborts: list[TaskId] = []
        while self._read:
            read = self._read.popleft()
            if read is None:
                self._book.restart(self._clock.now_ms())
                self._position = 0
                # Where the old one ended says nothing about this one.
                while self._waiting:
                    self._lookup.ask_for(self._waiting.popleft()[1])
                continue
            offset, notice, at_ms = read
            self._position = offset + 1
            if notice is not None:
                self._book.take(notice, at_ms)
                if notice.abort:
                    aborts.append(notice.task_id)
        while self._waiting and self._waiting[0][0] <= self._position:
            _resolve(self._waiting.popleft()[1])
        if self._on_abort is not None:
            for task_id in aborts:
                self._loop.call_soon(partial(self._on_abort, task_id))

    def _answered(self, bounds: Bounds, asked: list[Future[None]]) -> None:
        if bounds.end <= self._position or bounds.empty:
            _resolve(asked)
        else:
            self._waiting.append((bounds.end, asked))


def _resolve(futures: list[Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
