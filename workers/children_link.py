"""The worker's end of the line to one child: orders out, answers in, and the news of its death.

Invariant: every order ends once, with the child's answer, or with `ChildDied` when it died before it answered. What a dying child
had still said is heard first.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import structlog

from taskline.errors import InvalidRegistry
from taskline.workers.child import Kind
from taskline.workers.child_frames import (
    BROKEN,
    CANCEL,
    CANCELLED,
    FAILED,
    PING,
    PROGRESS,
    READY,
    RESULT,
    RUN,
    STOP,
    CorruptFrame,
    FrameReader,
    Message,
    context_values,
    encode,
)
from taskline.workers.children_server import Death, ForkServer, Spawned
from taskline.workers.context import TaskContext
from taskline.workers.executor import ChildDied, EncodedResult, HandlerAbandoned, HandlerFailed
from taskline.workers.line import Line
from taskline.workers.registry import Task

log = structlog.get_logger(__name__)

# A child's death and the end of its line are reported on two ways; so long one waits for the other.
_LINGER_SECONDS = 0.1
# Plain: flags of the enumeration are put together slowly.
_PEEK = int(socket.MSG_PEEK) | int(socket.MSG_DONTWAIT)
_PING_FRAME = encode((PING,))


class ChildLink(asyncio.Protocol):
    """One child, as its executor sees it."""

    def __init__(self, server: ForkServer, spawned: Spawned, on_gone: Callable[[ChildLink], None]) -> None:
        """Made by `start`; `on_gone` is called once, when no more orders can be given."""
        self._loop = asyncio.get_running_loop()
        self._server = server
        self._spawned = spawned
        self._on_gone = on_gone
        self._reader = FrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._hung_up = False
        # True: this side has hung up, and the child ends by itself.
        self._abandoned = False
        # Why it can't run anything.
        self._broken: str | None = None
        # Why this side ended it.
        self._sentence: str | None = None
        # What runs in it, by number.
        self.runs: dict[int, asyncio.Future[Message]] = {}
        # How many it was given in all.
        self.orders = 0
        # What its handlers say, and are told, goes through these.
        self._lines: dict[int, Line] = {}
        # True: it has imported its registry, and can answer.
        self.ready = False
        # What it takes then, in bytes; and resolves when it can answer, or never will.
        self.born_bytes = 0
        self.up: asyncio.Future[None] = self._loop.create_future()
        # False: no more orders.
        self.alive = True
        # Resolves when it is dead and everything about it is settled.
        self.gone: asyncio.Future[None] = self._loop.create_future()
        # Turns of a watch since something was heard of it; whoever watches it counts.
        self.silent = 0

    @classmethod
    async def start(cls, server: ForkServer, kind: Kind, on_gone: Callable[[ChildLink], None]) -> ChildLink:
        """Ask for a child, and be connected to it before it is born.

        Raises:
            OSError: the system lets no further process or socket be made.
        """
        spawned = server.spawn(kind)
        link = cls(server, spawned, on_gone)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=spawned.sock)
        except BaseException:
            server.kill(spawned)
            spawned.sock.close()
            raise
        spawned.died.add_done_callback(link._on_death)
        return link

    @property
    def pid(self) -> int | None:
        """The child's process, once it was forked."""
        return self._spawned.pid

    @property
    def hung_up(self) -> bool:
        """Whether an idle child has died without this side having heard of it yet."""
        try:
            return not self._spawned.sock.recv(1, _PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def order(self, task: Task, payload: Any, ctx: TaskContext) -> tuple[int, asyncio.Future[Message]]:  # noqa: ANN401 - plain values
        """Let it run a task; the order's number, and the answer.

        Raises:
            ChildDied: it is dead already.
            Exception: the payload can't be sent.
        """
        assert self._transport is not None  # noqa: S101 - connected
        if self.gone.done():
            raise ChildDied("it died before it was given anything", alone=False)
        number = self.orders = self.orders + 1
        frame = encode((RUN, number, task.name, payload, context_values(ctx)))
        if not self.runs:
            self.silent = 0
        answer = self.runs[number] = self._loop.create_future()
        self._lines[number] = ctx.line
        self._transport.write(frame)
        ctx.line.heed(partial(self._stop, number))
        return number, answer

    def cancel(self, number: int) -> asyncio.Future[Message]:
        """Ask it to cancel a coroutine; its answer, which takes the place of the one that `order` gave."""
        answer: asyncio.Future[Message] = self._loop.create_future()
        if self.gone.done():
            answer.set_exception(ChildDied("it died while the handler was being cancelled", alone=False))
            return answer
        self.runs[number] = answer
        if self._transport is not None and self.alive:
            self._transport.write(encode((CANCEL, number)))
        return answer

    def _stop(self, number: int) -> None:
        if number in self.runs and self._transport is not None and self.alive:
            self._transport.write(encode((STOP, number)))

    def ping(self) -> None:
        """Ask it for a sign of life."""
        if self._transport is not None and self.alive:
            self._transport.write(_PING_FRAME)

    def kill(self, why: str | None = None) -> None:
        """Kill it; `why` is what its runs say of their end."""
        self._sentence = self._sentence or why
        self._retire()
        self._server.kill(self._spawned)

    def abandon(self) -> None:
        """Hang up: it ends by itself, and what runs in it is let go."""
        for answer in self.runs.values():
            if not answer.done():
                answer.set_exception(
                    HandlerAbandoned("the worker left before the handler ended in its child process")
                )
        self.runs.clear()
        self._abandoned = True
        self._retire()
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self.silent = 0
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except CorruptFrame as error:
            log.warning(
                "a child process is killed: what it says can't be read", pid=self.pid, error=str(error)
            )
            self.kill(f"it sent what can't be read ({error})")

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._hung_up = True
        self._retire()
        if self._spawned.died.done():
            self._settle()
        elif not self._abandoned:
            # It may have closed its line without dying.
            self._loop.call_later(_LINGER_SECONDS, self._server.kill, self._spawned)

    def _take(self, message: Message) -> None:
        kind = message[0]
        if kind in (RESULT, FAILED, CANCELLED):
            answer = self.runs.pop(message[1], None)
            self._lines.pop(message[1], None)
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif kind == PROGRESS:
            line = self._lines.get(message[1])
            if line is not None:
                line.progress(message[2], message[3])
        elif kind == READY:
            self.ready = True
            self.born_bytes = message[1]
            self._be_up()
        elif kind == BROKEN:
            self._broken = message[1]

    def _on_death(self, died: asyncio.Future[Death]) -> None:
        self._retire()
        if self._hung_up:
            self._settle()
        elif not died.cancelled():
            # Something that it started may hold the line for ever.
            self._loop.call_later(_LINGER_SECONDS, self._settle)

    def _retire(self) -> None:
        self._be_up()
        if self.alive:
            self.alive = False
            self._on_gone(self)

    def _be_up(self) -> None:
        if not self.up.done():
            self.up.set_result(None)

    def _settle(self) -> None:
        if self.gone.done():
            return
        death = self._spawned.died.result()
        alone = death.own and len(self.runs) == 1
        for answer in self.runs.values():
            if answer.done():
                continue
            if self._broken is not None:
                answer.set_exception(InvalidRegistry(f"in a child process: {self._broken}"))
            else:
                answer.set_exception(ChildDied(self._sentence or death.cause, alone=alone))
        self.runs.clear()
        if self._transport is not None:
            self._transport.abort()
        self.gone.set_result(None)


def result_of(message: Message) -> EncodedResult:
    """What an answer says.

    Raises:
        HandlerFailed: that the handler raised.
        asyncio.CancelledError: that it was cancelled.
    """
    kind = message[0]
    if kind == RESULT:
        return EncodedResult(message[2])
    if kind == FAILED:
        raise HandlerFailed(message[2])
    raise asyncio.CancelledError
