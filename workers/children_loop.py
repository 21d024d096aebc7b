"""Coroutines in child processes: an asyncio loop in each, many handlers at once, and a watch on loops that do not turn.

Invariants: cancelling `run` cancels the coroutine, and `run` ends when that has ended. A loop that a handler blocks is killed: after
worker.loop_stall_seconds, sooner if one of its coroutines was to be cancelled. Its handlers then end with `ChildDied`, which blames
a handler only if it was the only one. Nor is a handler blamed that could get no memory, since others may have it: it ends with `ChildDied` too, and its
child gets no more orders.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from taskline.workers.child import Kind
from taskline.workers.child_frames import Message
from taskline.workers.children_link import ChildLink, result_of
from taskline.workers.children_server import ForkServer
from taskline.workers.children_wear import NO_LIMITS, Wear, WearLimits, out_of_memory
from taskline.workers.context import TaskContext
from taskline.workers.executor import ChildDied, EncodedResult, HandlerAbandoned
from taskline.workers.registry import Task

log = structlog.get_logger(__name__)

# A loop that turns answers within milliseconds; a second is soon enough to see that it does not.
_WATCH_SECONDS = 1.0
# So many turns of the watch at least make a stall: it counts them, since its own process may have stood still.
_LEAST_TURNS = 4
# How long a coroutine that is to be cancelled may hold up its loop before the child is killed.
CANCEL_STALL_SECONDS = 10.0


class LoopExecutor:
    """Spreads coroutines over loop children; those are started as they are needed and replaced when they die."""

    interruptible = True
    remote = True
    capacity: int | None = None

    def __init__(
        self,
        server: ForkServer,
        children: int,
        stall_seconds: float,
        cancel_stall_seconds: float = CANCEL_STALL_SECONDS,
        limits: WearLimits = NO_LIMITS,
    ) -> None:
        """Use at most `children` children of `server`, each within `limits`; see the module for the time limits."""
        self._server = server
        self._children = children
        self._stall_seconds = stall_seconds
        self._cancel_stall_seconds = min(cancel_stall_seconds, stall_seconds)
        self._turn_seconds = min(_WATCH_SECONDS, self._cancel_stall_seconds / _LEAST_TURNS)
        self._wear = Wear(server, Kind.LOOP, limits, on_gone=self._forget, on_made=self._succeed)
        # What is given orders; and what only finishes those that it has.
        self._links: list[ChildLink] = []
        self._leaving: list[ChildLink] = []
        self._starting: asyncio.Task[ChildLink] | None = None
        # When what was to be cancelled, by loop time.
        self._cancelled: dict[tuple[ChildLink, int], float] = {}
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The processes of its children."""
        return [link.pid for link in (*self._links, *self._leaving) if link.pid is not None]

    async def run(self, task: Task, payload: Any, ctx: TaskContext) -> EncodedResult:  # noqa: ANN401 - plain values
        """See `Executor`."""
        while True:
            link = self._least_loaded() or await self._started()
            if self._closed:
                raise HandlerAbandoned("the worker has left")
            # Others that waited for the same new child may have used it up.
            if link in self._links:
                break
        number, answer = link.order(task, payload, ctx)
        self._wear.given(link, task)
        self._retire_if(link, self._wear.spent(link))
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(self._turn_seconds, self._look)
        try:
            message = await answer
        except asyncio.CancelledError:
            message = await self._cancel(link, number, answer)
        finally:
            self._let_go(link)
        if link in self._links:
            self._retire_if(link, self._wear.spent_by(link, task, message))
        if out_of_memory(message):
            raise ChildDied(f"in a process that many share: {message[2].info.message}", alone=False)
        return result_of(message)

    def close(self) -> None:
        """See `Executor`; the children end by themselves, at the latest with the fork server."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        if self._starting is not None:
            self._starting.cancel()
        self._wear.close()
        for link in (*self._links, *self._leaving):
            link.abandon()

    async def _cancel(self, link: ChildLink, number: int, answer: asyncio.Future[Message]) -> Message:
        if answer.done() and not answer.cancelled():
            # It had ended before it could be stopped.
            return answer.result()
        key = (link, number)
        self._cancelled[key] = asyncio.get_running_loop().time()
        try:
            while True:
                answer = link.cancel(number)
                try:
                    return await answer
                except asyncio.CancelledError:
                    # Asked again: so is the coroutine.
                    if answer.done() and not answer.cancelled():
                        return answer.result()
        finally:
            del self._cancelled[key]

    def _least_loaded(self) -> ChildLink | None:
        if not self._links:
            return None
        link = min(self._links, key=_load)
        return None if link.runs and len(self._links) - self._wear.worn < self._children else link

    async def _started(self) -> ChildLink:
        """A new child, or the one that is being started already."""
        while True:
            if self._closed:
                raise HandlerAbandoned("the worker has left")
            starting = self._starting
            if starting is None:
                starting = self._starting = asyncio.get_running_loop().create_task(self._start())
                # Whoever waits for it hears of its error; perhaps nobody does any more.
                starting.add_done_callback(lambda task: task.cancelled() or task.exception())
            try:
                link = await asyncio.shield(starting)
            except asyncio.CancelledError:
                if not starting.cancelled():
                    raise
                # By `close`.
                continue
            if link.alive:
                return link

    async def _start(self) -> ChildLink:
        try:
            link = await ChildLink.start(self._server, Kind.LOOP, self._forget)
        finally:
            self._starting = None
        # Before anybody hears of it: who does finds it among the others.
        if self._closed:
            link.abandon()
        elif link.alive:
            self._links.append(link)
        return link

    def _forget(self, link: ChildLink) -> None:
        self._wear.forget(link)
        for links in (self._links, self._leaving):
            if link in links:
                links.remove(link)

    def _succeed(self, link: ChildLink) -> None:
        """A successor: of a worn one, whose place it takes when that is spent."""
        serving = len(self._links) + (self._starting is not None) - self._wear.worn
        if self._closed or serving >= self._children:
            link.abandon()
        elif link.alive:
            self._links.append(link)

    def _retire_if(self, link: ChildLink, spent: str | None) -> None:
        if spent is not None and link in self._links:
            self._links.remove(link)
            self._leaving.append(link)
            self._wear.retire(link, spent)
            self._let_go(link)

    def _let_go(self, link: ChildLink) -> None:
        """Hang up on one that has finished what it had."""
        if link in self._leaving and not link.runs:
            link.abandon()

    def _look(self) -> None:
        """One turn of the watch; it goes on while anything runs."""
        busy = [link for link in (*self._links, *self._leaving) if link.runs]
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(self._turn_seconds, self._look) if busy else None
        overdue = loop.time() - self._cancel_stall_seconds
        for link in busy:
            silent_seconds = link.silent * self._turn_seconds
            cancelling = any(
                each is link and since <= overdue for (each, _), since in self._cancelled.items()
            )
            # One that is still importing its registry is given the time for it, unless it is in the way.
            stalled = link.ready and silent_seconds >= self._stall_seconds
            if stalled or (cancelling and silent_seconds >= self._cancel_stall_seconds):
                log.error(
                    "a loop child is killed: a handler blocks it",
                    pid=link.pid,
                    silent_seconds=silent_seconds,
                    running=len(link.runs),
                )
                link.kill(f"its event loop was blocked for {silent_seconds:g} s")
                continue
            link.silent += 1
            link.ping()


def _load(link: ChildLink) -> tuple[bool, int]:
    # One that is not born yet would keep its orders waiting.
    return not link.ready, len(link.runs)
