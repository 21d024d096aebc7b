"""Waiting for a task's end: many wait, one reads.

Invariant: all who wait for one task share one loop of reads, whose pauses grow; and all loops together read at most `MAX_READS_PER_SECOND`
times a second, however many tasks are waited for. Who has waited long enough is answered with a read that began
after that, so that nobody is shown an older state than they may have seen elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from taskline.errors import Unavailable
from taskline.schemas.ids import TaskId
from taskline.state.status import TaskState

# A short task ends within a few of the first pauses; a long one is looked at every few seconds.
_FIRST_PAUSE_SECONDS = 0.02
_PAUSE_GROWTH = 1.5
_LONGEST_PAUSE_SECONDS = 2.0
# A tenth of a core, at what a read costs.
MAX_READS_PER_SECOND = 200

_Key = tuple[TaskId, str]


class EndWaiter:
    """Waits for end states, in one event loop."""

    def __init__(self, read: Callable[[TaskId, str], Awaitable[TaskState]]) -> None:
        """Look with `read(task_id, tenant)`, which raises as `StatusReader.get`."""
        self._read = read
        self._watches: dict[_Key, _Watch] = {}
        self._draining = False
        # How many wait now.
        self.waiting = 0

    async def wait(self, task_id: TaskId, *, tenant: str, seconds: float) -> TaskState:
        """The task's state once it has ended, or as it is after so many seconds; at once when the process is stopping.

        Raises:
            TaskNotFound: it is not (or no longer) this tenant's.
            Unavailable: the view did not answer when the time was over. Before that, it is asked again.
        """
        key = (task_id, tenant)
        watch = self._watches.get(key)
        if watch is None:
            watch = self._watches[key] = _Watch(lambda: self._read(task_id, tenant), self._least_pause)
        loop = asyncio.get_running_loop()
        waiter = _Waiter(answer=loop.create_future())
        watch.join(waiter)
        timer = loop.call_later(0 if self._draining else seconds, watch.hurry, waiter)
        self.waiting += 1
        try:
            return await waiter.answer
        finally:
            self.waiting -= 1
            timer.cancel()
            if watch.leave(waiter) and self._watches.get(key) is watch:
                del self._watches[key]

    def drain(self) -> None:
        """Answer everybody with the present state, from now on."""
        self._draining = True
        for watch in self._watches.values():
            watch.hurry_all()

    def _least_pause(self) -> float:
        return len(self._watches) / MAX_READS_PER_SECOND


@dataclass(eq=False, kw_only=True, slots=True)
class _Waiter:
    answer: asyncio.Future[TaskState]
    # The read, and those after it, whose result is the answer whatever it is; None: there is time.
    due: int | None = None


class _Watch:
    """The reads of one task."""

    def __init__(self, read: Callable[[], Awaitable[TaskState]], least_pause: Callable[[], float]) -> None:
        self._read = read
        self._least_pause = least_pause
        self._waiters: set[_Waiter] = set()
        self._begun = 0
        self._hurried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def join(self, waiter: _Waiter) -> None:
        self._waiters.add(waiter)
        # The reads also end when all are answered, before those have left.
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="wait-for-end")

    def leave(self, waiter: _Waiter) -> bool:
        """True: nobody is left, and the reads have stopped."""
        self._waiters.discard(waiter)
        if self._waiters:
            return False
        if self._task is not None:
            self._task.cancel()
        return True

    def hurry(self, waiter: _Waiter) -> None:
        waiter.due = self._begun + 1
        self._hurried.set()

    def hurry_all(self) -> None:
        for waiter in self._waiters:
            self.hurry(waiter)

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while self._waiters:
            await self._rest(max(pause, self._least_pause()))
            pause = min(pause * _PAUSE_GROWTH, _LONGEST_PAUSE_SECONDS)
            self._hurried.clear()
            self._begun += 1
            try:
                state = await self._read()
            except Unavailable as error:
                # The view may be back before their time is over.
                self._settle(error, everybody=False)
            except Exception as error:  # whatever it is, it is theirs to see
                self._settle(error, everybody=True)
            else:
                self._settle(state, everybody=state.status.ended)

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._hurried.wait()
        except TimeoutError:
            pass

    def _settle(self, result: TaskState | Exception, *, everybody: bool) -> None:
        for waiter in tuple(self._waiters):
            if not everybody and (waiter.due is None or waiter.due > self._begun):
                continue
            self._waiters.discard(waiter)
            if waiter.answer.done():
                continue
            if isinstance(result, Exception):
                waiter.answer.set_exception(result)
            else:
                waiter.answer.set_result(result)
