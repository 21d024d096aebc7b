"""Handlers in child processes, one at a time in each: for plain functions, and for whatever may kill its process.

Invariants: a child's death is the work of the only handler that ran in it. A cancelled handler is killed with its child before
`run` ends. A child serves again only after its handler has answered.
"""

from __future__ import annotations

import asyncio
from typing import Any

from taskline.workers.child import Kind
from taskline.workers.child_frames import Message
from taskline.workers.child_limits import CPU_SIGNAL
from taskline.workers.children_link import ChildLink, result_of
from taskline.workers.children_server import ForkServer, in_words
from taskline.workers.children_wear import NO_LIMITS, Wear, WearLimits
from taskline.workers.context import TaskContext
from taskline.workers.executor import ChildDied, EncodedResult, HandlerAbandoned, HandlerFailed
from taskline.workers.failure import cpu_spent
from taskline.workers.registry import Task

_CPU_SPENT = in_words(-CPU_SIGNAL)


class ProcessExecutor:
    """A pool of children, started as they are needed and replaced when they die or are worn. Runs both kinds of handlers."""

    interruptible = True
    remote = True

    def __init__(self, server: ForkServer, children: int, limits: WearLimits = NO_LIMITS) -> None:
        """Use at most `children` children of `server` at once, each within `limits`."""
        self.capacity: int | None = children
        self._children = children
        self._wear = Wear(server, Kind.PLAIN, limits, on_gone=self._forget, on_made=self._succeed)
        self._server = server
        self._room = asyncio.Semaphore(children)
        self._links: set[ChildLink] = set()
        # How many are being made for those who wait.
        self._starting = 0
        # The last one to become idle is the next one to be used: its memory is warm.
        self._idle: list[ChildLink] = []
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The processes of its children."""
        return [link.pid for link in self._links if link.pid is not None]

    async def run(self, task: Task, payload: Any, ctx: TaskContext) -> EncodedResult:  # noqa: ANN401 - plain values
        """See `Executor`."""
        async with self._room:
            link = self._take_idle() or await self._start()
            if self._closed:
                link.abandon()
                raise HandlerAbandoned("the worker has left")
            message: Message | None = None
            try:
                _, answer = link.order(task, payload, ctx)
                self._wear.given(link, task)
                try:
                    message = await answer
                except ChildDied as died:
                    if task.conduct.cpu_seconds is not None and died.alone and died.cause == _CPU_SPENT:
                        raise HandlerFailed(cpu_spent(task.conduct.cpu_seconds)) from died
                    raise
                except asyncio.CancelledError:
                    if not answer.done() or answer.cancelled():
                        await self._kill(link)
                        raise
                    # It had ended before it could be stopped.
                    message = answer.result()
            finally:
                if link.alive:
                    self._put_back(link, task, message)
        return result_of(message)

    def close(self) -> None:
        """See `Executor`; the children end by themselves, at the latest with the fork server."""
        self._closed = True
        self._wear.close()
        for link in tuple(self._links):
            link.abandon()

    def _take_idle(self) -> ChildLink | None:
        while self._idle:
            link = self._idle.pop()
            if not link.hung_up:
                return link
            # Died idle; a handler given to it would be blamed for that.
            link.kill()
        return None

    def _put_back(self, link: ChildLink, task: Task, message: Message | None) -> None:
        spent = self._wear.spent(link) if message is None else self._wear.spent_by(link, task, message)
        if spent is None:
            self._idle.append(link)
        else:
            self._wear.retire(link, spent)
            link.abandon()

    def _succeed(self, link: ChildLink) -> None:
        """A successor: of a worn one, whose place it takes when that is spent."""
        serving = len(self._links) + self._starting - self._wear.worn
        if self._closed or serving >= self._children:
            link.abandon()
        elif link.alive:
            self._links.add(link)
            # Used when there is no other.
            self._idle.insert(0, link)

    async def _start(self) -> ChildLink:
        if self._closed:
            raise HandlerAbandoned("the worker has left")
        self._starting += 1
        try:
            link = await ChildLink.start(self._server, Kind.PLAIN, self._forget)
        finally:
            self._starting -= 1
        if link.alive:
            self._links.add(link)
        return link

    async def _kill(self, link: ChildLink) -> None:
        link.kill()
        # One that was not born yet runs nothing, and would be waited for as long as the registry's import takes.
        if link.ready:
            await asyncio.shield(link.gone)

    def _forget(self, link: ChildLink) -> None:
        self._links.discard(link)
        self._wear.forget(link)
        if link in self._idle:
            self._idle.remove(link)
