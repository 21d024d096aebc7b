"""A queue's cancel notices on Kafka: a tail that reads them, and a look-up of how far it must have read.

Invariant: all that is known of notices is changed on the event loop, in the order of the topic. `position` is the offset up to which they are
known there, and `as_of` a moment before which no notice was acknowledged that is not known.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from collections.abc import Callable
from functools import partial

from confluent_kafka import Message

from taskline.infra.cancels import NOTICE_FRESH_SECONDS, CancelNotices, NoticeBook, read_notice
from taskline.infra.kafka.cancel_lookup import Bounds, EndLookup
from taskline.infra.kafka.tail import Tail
from taskline.infra.role import Clock, SystemClock, elapsed_seconds
from taskline.schemas.codec import Codec
from taskline.schemas.events import CancelNotice
from taskline.schemas.ids import TaskId
from taskline.settings import KafkaSettings

# A day's notices, at some ten thousand a second.
_START_SECONDS = 60.0
# What is known is renewed at this age, while it still serves: under load nobody waits for it.
_RENEW_SECONDS = NOTICE_FRESH_SECONDS / 2
_NEVER = float("-inf")


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
        self._as_of = _NEVER
        # Answers that hold once the notices up to an offset are known: (offset, as of when), both ascending.
        self._ahead: deque[tuple[int, float]] = deque()
        # Who waits until it is known what was acknowledged before a moment, in the order of the moments.
        self._waiting: deque[tuple[float, Future[None]]] = deque()
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

    def expect(self) -> None:
        """See `CancelNotices`."""
        if elapsed_seconds() - self._as_of > _RENEW_SECONDS:
            self._lookup.ask()

    async def catch_up(self) -> None:
        """See `CancelNotices`."""
        horizon = elapsed_seconds() - NOTICE_FRESH_SECONDS
        if self._as_of < horizon:
            known: Future[None] = self._loop.create_future()
            self._waiting.append((horizon, known))
            self._lookup.ask()
            await known

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
                # Where the old one ended says nothing about this one.
                self._book.restart(self._clock.now_ms())
                self._position, self._as_of = 0, _NEVER
                self._ahead.clear()
                continue
            offset, notice, at_ms = read
            self._position = offset + 1
            if notice is not None:
                self._book.take(notice, at_ms)
                if notice.abort:
                    aborts.append(notice.task_id)
        self._advance()
        if self._on_abort is not None:
            for task_id in aborts:
                self._loop.call_soon(partial(self._on_abort, task_id))

    def _answered(self, bounds: Bounds, as_of: float) -> None:
        end = self._position if bounds.empty else bounds.end
        while self._ahead and self._ahead[-1][0] > end:
            # Of an older topic of this name: an end never moves back. Nobody would ever read so far.
            self._ahead.pop()
        self._ahead.append((end, as_of))
        self._advance()

    def _advance(self) -> None:
        while self._ahead and self._ahead[0][0] <= self._position:
            self._as_of = self._ahead.popleft()[1]
        while self._waiting and self._waiting[0][0] <= self._as_of:
            known = self._waiting.popleft()[1]
            if not known.done():
                known.set_result(None)
        if self._waiting and not self._ahead:
            # What is on its way, or was, began too early for them.
            self._lookup.ask()
