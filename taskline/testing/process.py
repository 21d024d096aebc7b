"""A process in memory: tasks that die together.

All roles of a kit share one loop. What a process started, directly or through any number of tasks in between, is known by its
context, so that it can be killed as a whole: first its ties to the outside are cut (nothing that it still does has
an effect on the log), then its tasks are cancelled. One difference from `kill -9` is left: `finally` blocks of
its coroutines do run.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

_current: contextvars.ContextVar[VirtualProcess | None] = contextvars.ContextVar(
    "taskline_virtual_process", default=None
)
# How often a dying task is told so before it is left behind; code that swallows one cancellation is common.
_KILL_ROUNDS = 10
# Loop iterations that a task may take to die after each telling.
_KILL_STEPS = 20


class VirtualProcess:
    """Owns every task that is started within it."""

    def __init__(self, name: str) -> None:
        """Name it for messages."""
        self.name = name
        self.dead = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ties: list[Callable[[], None]] = []

    def spawn(self, coroutine: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Start a coroutine within the process; the loop must be `tracked`."""
        context = contextvars.copy_context()
        context.run(_current.set, self)
        return asyncio.get_running_loop().create_task(coroutine, name=name, context=context)

    def tie(self, cut: Callable[[], None]) -> None:
        """Call `cut` first of all when the process is killed."""
        self._ties.append(cut)

    def cut(self) -> None:
        """Cut the ties: from now on nothing that it does reaches the outside."""
        self.dead = True
        ties, self._ties = self._ties, []
        for tie in ties:
            tie()

    async def kill(self) -> None:
        """Cut the ties, cancel the tasks, and see them end."""
        self.cut()
        for _ in range(_KILL_ROUNDS):
            for task in tuple(self._tasks):
                task.cancel()
            for _ in range(_KILL_STEPS):
                if not self._tasks:
                    return
                await asyncio.sleep(0)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Own a task."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        if self.dead:
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self.dead and not task.cancelled():
            # Retrieved, so that the loop does not report what a dead process would have raised.
            task.exception()


def current_process() -> VirtualProcess | None:
    """The process in whose context this is called; None: none."""
    return _current.get()


def process_of(context: contextvars.Context) -> VirtualProcess | None:
    """The process that a context belongs to; None: none."""
    return context.get(_current)


def track(loop: asyncio.AbstractEventLoop) -> None:
    """Let the tasks of a loop belong to the process in whose context they are made."""
    loop.set_task_factory(_make_task)


def _make_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Any,  # noqa: ANN401 - as asyncio's own factory
    *,
    context: contextvars.Context | None = None,
    **options: Any,  # noqa: ANN401 - newer Pythons pass more
) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, context=context, **options)
    process = _current.get() if context is None else context.get(_current)
    if process is not None:
        process.adopt(task)
    return task
