"""The soft time limit of a coroutine: `SoftTimeout` is raised at the `await` where it stands, once.

What the coroutine waits for is cancelled, as any time limit in asyncio does, but the coroutine itself sees SoftTimeout and may catch it. The
asyncio task is not cancelled for that, so that a real cancellation, before, after or at the same time, is still one. A coroutine that waits for
the end of an `asyncio.TaskGroup` leaves the group's tasks running when SoftTimeout is raised there: put `try` inside the group.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

from taskline.errors import SoftTimeout

T = TypeVar("T")


def soft_timeout() -> SoftTimeout:
    """The error, in the words in which a handler's log shows it."""
    return SoftTimeout("the soft time limit has passed")


class SoftLimited(Generic[T]):
    """Awaits a coroutine in the same asyncio task, with a soft time limit."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> None:
        """Give the coroutine `seconds` from when this is awaited; none left: until its first `await`."""
        self._coroutine = coroutine
        self._seconds = seconds
        # What the coroutine waits for: a future, or None for a mere turn of the loop.
        self._waits_for: Any = None
        self._due = False
        # The asyncio task, and how many cancellations of it were under way at the beginning; more of them: it is being cancelled.
        self._task: asyncio.Task[Any] | None = None
        self._cancellations = 0

    def __await__(self) -> Generator[Any, Any, T]:
        self._task = asyncio.current_task()
        assert self._task is not None  # noqa: S101 - coroutines of handlers run in tasks
        self._cancellations = self._task.cancelling()
        timer = asyncio.get_running_loop().call_later(max(0.0, self._seconds), self._ring)
        try:
            return (yield from self._drive())
        finally:
            timer.cancel()

    @types.coroutine
    def _drive(self) -> Generator[Any, Any, T]:
        raised: BaseException | None = None
        value: Any = None
        while True:
            try:
                waits_for = self._coroutine.send(value) if raised is None else self._coroutine.throw(raised)
            except StopIteration as stop:
                result: T = stop.value
                return result
            value, raised, self._waits_for = None, None, waits_for
            try:
                value = yield waits_for
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as error:
                raised = error
            self._waits_for = None
            if self._due and not self._being_cancelled():
                self._due = False
                raised = soft_timeout()

    def _ring(self) -> None:
        self._due = True
        if self._waits_for is not None:
            self._waits_for.cancel()

    def _being_cancelled(self) -> bool:
        # Also by an asyncio.timeout inside the coroutine, which takes its cancellation back: SoftTimeout comes after it then.
        assert self._task is not None  # noqa: S101 - set when it was awaited
        return self._task.cancelling() > self._cancellations
