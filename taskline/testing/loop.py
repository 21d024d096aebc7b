"""An event loop whose time is virtual.

Invariant: time moves only when nothing is ready, and then exactly to the next timer. So code that waits by the loop's
own time (`asyncio.sleep`, `asyncio.timeout`, `loop.call_later`) runs at full speed and in the same order each time, and
a test of an hour takes as long as the work in it.

The world outside is not virtual. While a thread works for the loop (`run_in_executor`, `asyncio.to_thread`) time stands still;
sockets get a moment of silence before time moves past them. When nothing at all can wake the loop it raises
`Deadlock`, which lists who waits where.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from taskline.testing.errors import Deadlock, NeverIdle

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Events = list[tuple[selectors.SelectorKey, int]]

# Real seconds that a thread may work for the loop before its silence counts as a deadlock.
THREAD_PATIENCE_SECONDS = 30.0
# Real seconds of silence on sockets after which virtual time moves on although they are open: a keep-alive
# connection is silent for ever and must not stop the clock.
IO_PATIENCE_SECONDS = 1.0
# Timers this close count as due. asyncio's own nanosecond vanishes in a float after weeks of virtual time, and a timer
# that is due "now" would then never be.
TIMER_RESOLUTION_SECONDS = 1e-6
# The loop's own wake-up pipe, which is always registered.
_OWN_DESCRIPTORS = 1


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop that jumps to its next timer instead of waiting for it."""

    def __init__(
        self,
        *,
        thread_patience_seconds: float = THREAD_PATIENCE_SECONDS,
        io_patience_seconds: float = IO_PATIENCE_SECONDS,
    ) -> None:
        """Start at virtual time 0."""
        self._virtual_seconds = 0.0
        self._threads_at_work = 0
        self._when_quiet: Callable[[], bool] | None = None
        self._deadline: float | None = None
        self._outstanding: Callable[[], list[str]] = list
        self._thread_patience = thread_patience_seconds
        self._io_patience = io_patience_seconds
        self._limit_seconds = 0.0
        super().__init__(_VirtualSelector(self._quiet))
        self._clock_resolution = TIMER_RESOLUTION_SECONDS

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_seconds

    def run_until(
        self,
        condition: Callable[[], bool],
        *,
        limit_seconds: float,
        outstanding: Callable[[], list[str]] = list,
    ) -> None:
        """Run until `condition` holds at a quiet moment: nothing ready, time about to move.

        Args:
            condition: evaluated at quiet moments only; what it raises ends the run and is raised here.
            limit_seconds: virtual seconds that may pass.
            outstanding: words for the error, asked for when the limit is reached.

        Raises:
            NeverIdle: the limit passed first.
            Deadlock: nothing can happen any more and the condition does not hold.
        """
        self._when_quiet = condition
        self._deadline = self._virtual_seconds + limit_seconds
        self._outstanding = outstanding
        self._limit_seconds = limit_seconds
        try:
            self.run_forever()
        finally:
            self._when_quiet = None
            self._deadline = None
            self._outstanding = list

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """As any loop's; virtual time stands still until the thread is done."""
        future = super().run_in_executor(executor, func, *args)
        self._threads_at_work += 1
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._threads_at_work -= 1

    def _quiet(self, selector: _VirtualSelector, timeout: float | None) -> Events:
        """Nothing is ready: end the run, hear the world outside, move the time, or say that nothing can come."""
        if self._when_quiet is not None and self._when_quiet():
            self.stop()
            return []
        if self._threads_at_work:
            events = selector.wait(self._thread_patience)
            if not events:
                raise Deadlock(
                    self._waiting(), reason=f"a thread gave no answer in {self._thread_patience:g} s"
                )
            return events
        if selector.foreign(_OWN_DESCRIPTORS):
            events = selector.wait_once(self._io_patience)
            if events:
                return events
        if timeout is None:
            # Threads that the loop did not start itself may still call back.
            if threading.active_count() > 1 and (events := selector.wait(self._io_patience)):
                return events
            raise Deadlock(self._waiting(), reason="nothing is ready and no timer is set")
        self._virtual_seconds += timeout
        if self._deadline is not None and self._virtual_seconds > self._deadline:
            raise NeverIdle(self._outstanding(), limit_seconds=self._limit_seconds)
        return []

    def _waiting(self) -> list[str]:
        return sorted(_place(task) for task in asyncio.all_tasks(self))


class _VirtualSelector(selectors.BaseSelector):
    """The real selector, asked without waiting; what to do instead of waiting is the loop's decision."""

    def __init__(self, quiet: Callable[[_VirtualSelector, float | None], Events]) -> None:
        self._real = selectors.DefaultSelector()
        self._quiet = quiet
        # True once the registered sockets have had their moment and stayed silent.
        self._silent = False

    def select(self, timeout: float | None = None) -> Events:
        events = self._real.select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        return self._quiet(self, timeout)

    def wait(self, real_seconds: float) -> Events:
        """Wait in real time."""
        deadline = time.monotonic() + real_seconds
        while not (events := self._real.select(max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                break
        return events

    def wait_once(self, real_seconds: float) -> Events:
        """Wait in real time, unless the same sockets have been waited for and stayed silent."""
        if self._silent:
            return []
        events = self.wait(real_seconds)
        self._silent = not events
        return events

    def foreign(self, own: int) -> bool:
        """Is anything registered besides the loop's own descriptors?"""
        return len(self._real.get_map()) > own

    def register(
        self,
        fileobj: FileDescriptorLike,
        events: int,
        data: Any = None,  # noqa: ANN401 - as the base class
    ) -> selectors.SelectorKey:
        self._silent = False
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        self._silent = False
        return self._real.unregister(fileobj)

    def modify(
        self,
        fileobj: FileDescriptorLike,
        events: int,
        data: Any = None,  # noqa: ANN401 - as the base class
    ) -> selectors.SelectorKey:
        self._silent = False
        return self._real.modify(fileobj, events, data)

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        return self._real.get_map()


def _place(task: asyncio.Task[Any]) -> str:
    """A task's name and the innermost line at which it waits."""
    coroutine = task.get_coro()
    name = getattr(coroutine, "__qualname__", repr(coroutine))
    stack = task.get_stack()
    if not stack:
        return f"{task.get_name()} ({name})"
    frame = traceback.extract_stack(stack[-1], limit=1)[0]
    return f"{task.get_name()} ({name}) at {frame.filename}:{frame.lineno}"
