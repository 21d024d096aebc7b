"""Running a handler: the port, and its implementations inside this process.

`run` returns when the handler has ended, not before. Cancelling `run` asks the handler to stop; an executor that
can't stop one says so (`interruptible`), and the engine then counts the execution as failed at its time limit but keeps its slot
until the handler has really ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from taskline.infra.role import Clock, SystemClock
from taskline.workers.context import TaskContext
from taskline.workers.failure import Failure
from taskline.workers.registry import Task
from taskline.workers.soft import SoftLimited

_MS = 1_000


class Executor(Protocol):
    """Where handlers run."""

    # False: a running handler can't be stopped from outside.
    interruptible: bool
    # How many handlers it runs at once; None: as many as it is given.
    capacity: int | None
    # True: `run` is given the payload as plain values (`Admitted.value`), since it crosses to another process.
    remote: bool

    async def run(self, task: Task, payload: Any, ctx: TaskContext) -> Any:  # noqa: ANN401 - a handler's own types
        """Run the task's handler to its end; what it returned, or an `EncodedResult`.

        Raises:
            ChildDied: the process in which it ran died.
            HandlerFailed: it raised, in another process.
            BaseException: whatever the handler raised.
        """
        ...

    def close(self) -> None:
        """Take no more handlers and let go of running ones: their `run` raises `HandlerAbandoned`."""
        ...


class HandlerAbandoned(Exception):
    """The worker left while the handler was still running."""


class ChildDied(Exception):
    """The process that ran the handler died under it."""

    def __init__(self, cause: str, *, alone: bool) -> None:
        """Say how it ended; `alone`: nothing else ran in it, so that the handler is to blame."""
        self.cause = cause
        self.alone = alone
        super().__init__(cause)


class HandlerFailed(Exception):
    """A handler raised in another process, where its error was described and judged."""

    def __init__(self, failure: Failure) -> None:
        """Carry what is known of the error."""
        self.failure = failure
        super().__init__(failure.info.message)


@dataclass(frozen=True, slots=True)
class EncodedResult:
    """What a handler returned in another process: JSON in UTF-8, within the limit (None: nothing)."""

    data: bytes | None


class InlineExecutor:
    """Runs handlers on the event loop: coroutines, and plain functions that are known to return at once (tests).

    A coroutine's soft time limit is kept, a plain function's is not: nothing can be raised in what holds the loop up.
    """

    interruptible = True
    capacity: int | None = None
    remote = False

    def __init__(self, clock: Clock | None = None) -> None:
        """Soft limits are by `clock`; None: the machine's."""
        self._clock = clock or SystemClock()

    async def run(self, task: Task, payload: Any, ctx: TaskContext) -> Any:  # noqa: ANN401 - a handler's own types
        """Call the handler, and await what it returns if it is a coroutine function."""
        result = task.call(payload, ctx)
        if not task.is_async:
            return result
        if ctx.soft_deadline_ms is None:
            return await result
        return await SoftLimited(result, (ctx.soft_deadline_ms - self._clock.now_ms()) / _MS)

    def close(self) -> None:
        """Nothing to close."""


_Job = Callable[[], None]
# What a handler returned, or what it raised.
_Outcome = tuple[Any, BaseException | None]


class ThreadExecutor:
    """Runs plain functions on threads of its own, which see the context variables of the execution.

    The threads are daemons: a handler that never returns keeps its slot, but not the process from leaving.
    """

    interruptible = False
    remote = False

    def __init__(self, threads: int) -> None:
        """Use at most `threads` threads, made as they are needed."""
        self.capacity: int | None = threads
        self._limit = threads
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._names = itertools.count(1)
        self._threads = 0
        self._running: set[asyncio.Future[_Outcome]] = set()

    async def run(self, task: Task, payload: Any, ctx: TaskContext) -> Any:  # noqa: ANN401 - a handler's own types
        """Call the handler on a thread; a cancellation is held back until it has returned."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Outcome] = loop.create_future()
        context = contextvars.copy_context()

        def job() -> None:
            # The outcome travels as a value: a future refuses StopIteration, and SystemExit must not end a thread.
            outcome: _Outcome
            try:
                outcome = (context.run(_call_plain, task, payload, ctx), None)
            except BaseException as error:
                outcome = (None, error)
            try:
                loop.call_soon_threadsafe(_settle, done, outcome)
            except RuntimeError:
                # The loop was closed: the worker left without this handler.
                return

        self._running.add(done)
        self._ensure_thread()
        self._jobs.put(job)
        cancelled: asyncio.CancelledError | None = None
        try:
            while not done.done():
                try:
                    await asyncio.shield(done)
                except asyncio.CancelledError as error:
                    cancelled = error
        finally:
            self._running.discard(done)
        if cancelled is not None:
            raise cancelled
        result, raised = done.result()
        if raised is not None:
            raise raised
        return result

    def close(self) -> None:
        """Let idle threads end (busy ones end after their handler), and let go of what still runs."""
        for done in self._running:
            _settle(done, (None, HandlerAbandoned("the worker left before the handler ended")))
        for _ in range(self._threads):
            self._jobs.put(None)

    def _ensure_thread(self) -> None:
        if self._threads < min(len(self._running), self._limit):
            self._threads += 1
            threading.Thread(
                target=_work, args=(self._jobs,), name=f"taskline-handler-{next(self._names)}", daemon=True
            ).start()


def refuse_awaitable(task: Task, result: Any) -> None:  # noqa: ANN401 - a handler's own types
    """Be loud about what a plain handler returned, if it should have been awaited.

    Raises:
        TypeError: it is an awaitable.
    """
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(
            f"the plain handler of {task.name!r} returned an awaitable: declare it with `async def`"
        )


def _call_plain(task: Task, payload: Any, ctx: TaskContext) -> Any:  # noqa: ANN401 - a handler's own types
    result = task.call(payload, ctx)
    refuse_awaitable(task, result)
    return result


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        # Not kept while waiting for the next one: it holds the last handler's arguments.
        del job


def _settle(future: asyncio.Future[_Outcome], outcome: _Outcome) -> None:
    if not future.done():
        future.set_result(outcome)
