"""A child that runs many coroutines at once, in one asyncio loop.

Invariant: every RUN is answered once, by RESULT, FAILED or CANCELLED, when its coroutine has ended. Pings are answered by the loop
itself, so that an answer means that no handler blocks it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial
from typing import Any, cast

from taskline.infra.role import loop_factory
from taskline.workers.child_answers import Answers, Order
from taskline.workers.child_frames import (
    CANCEL,
    CANCELLED,
    PING,
    PONG,
    PROGRESS,
    RUN,
    STOP,
    CorruptFrame,
    FrameReader,
    Message,
    encode,
)
from taskline.workers.child_line import LEAST_PAUSE_SECONDS
from taskline.workers.line import NOWHERE
from taskline.workers.progress import LoopLine
from taskline.workers.soft import SoftLimited

_PONG_FRAME = encode((PONG,))
# A child's exit status when it can't say what became of a handler.
EXIT_MUTE = 71


def serve_loop(sock: socket.socket, answers: Answers) -> None:
    """Run what the worker sends until it hangs up; what runs then is cancelled.

    Raises:
        CorruptFrame: what it sent can't be read.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(sock, answers))


async def _serve(sock: socket.socket, answers: Answers) -> None:
    loop = asyncio.get_running_loop()
    _, orders = await loop.create_unix_connection(lambda: _Orders(loop, answers), sock=sock)
    await orders.over


class _Orders(asyncio.Protocol):
    """The child's end of the line."""

    def __init__(self, loop: asyncio.AbstractEventLoop, answers: Answers) -> None:
        self.over: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._answers = answers
        self._reader = FrameReader()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._lines: dict[int, LoopLine] = {}
        # Numbers of those of them that were told to end.
        self._cancelled: set[int] = set()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except CorruptFrame as error:
            if not self.over.done():
                self.over.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def _take(self, message: Message) -> None:
        kind = message[0]
        if kind == RUN:
            line = LoopLine(partial(self._progress, message[1]), pace=_pace, now_ms=NOWHERE.now_ms)
            order = self._answers.order(message, line)
            if isinstance(order, bytes):
                self._write(order)
            else:
                self._lines[order.number] = line
                self._running[order.number] = self._loop.create_task(self._run(order))
        elif kind == CANCEL:
            running = self._running.get(message[1])
            if running is not None:
                self._cancelled.add(message[1])
                running.cancel()
        elif kind == STOP:
            line_of = self._lines.get(message[1])
            if line_of is not None:
                line_of.stop()
        elif kind == PING:
            self._write(_PONG_FRAME)

    async def _run(self, order: Order) -> None:
        number = order.number
        try:
            answer = self._answers.result(order, await self._handle(order))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and number in self._cancelled:
                answer = encode((CANCELLED, number))
            else:
                try:
                    answer = self._answers.failure(order, error)
                except BaseException:
                    # No memory even to say so. Unanswered, the order would never end.
                    os._exit(EXIT_MUTE)
        del self._running[number]
        self._lines.pop(number).close()
        self._cancelled.discard(number)
        self._write(answer)

    async def _handle(self, order: Order) -> Any:  # noqa: ANN401 - whatever a handler returns
        coroutine = order.task.call(order.task.instance(order.value), order.ctx)
        seconds = order.soft_seconds
        return await (coroutine if seconds is None else SoftLimited(coroutine, seconds))

    def _progress(self, number: int, fraction: float | None, text: str | None) -> None:
        self._write(encode((PROGRESS, number, fraction, text)))

    def _write(self, frame: bytes) -> None:
        assert self._transport is not None  # noqa: S101 - connected
        if not self._transport.is_closing():
            self._transport.write(frame)


def _pace(elapsed_seconds: float) -> float:
    return LEAST_PAUSE_SECONDS
