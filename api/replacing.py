"""Making way: the task that holds a dedup window gives it up to a newer one, if it still waits.

Invariant: the new task is appended only after the first one's lane says that it is cancelled, so of the two at most one runs from its
beginning. A first task that runs, or is over, keeps the window. A *cancelled* one gives it up without being asked: that is the state in which a process
leaves a window that dies between cancelling and taking the place, so that the same request sent again goes on where it died.
"""

from __future__ import annotations

import asyncio
from asyncio import Lock
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol
from weakref import WeakValueDictionary

import structlog

from taskline.api.dedup import Duplicate
from taskline.api.problems import REPLACE_UNKNOWN, ProblemError
from taskline.errors import DeliveryError, TaskNotFound, Unavailable
from taskline.infra.role import Clock
from taskline.producers.cancelling import Cancellation, Fate
from taskline.schemas.ids import TaskId, created_at_ms
from taskline.state.claims import ClaimKey

log = structlog.get_logger(__name__)

_DAY_MS = 86_400_000
# By then a cancel that is in the log is in the view, if the servers are back.
_RETRY_AFTER_SECONDS = "2"


class Cancels(Protocol):
    """Who cancels tasks; `taskline.producers.cancelling.Canceller`."""

    async def cancel(self, task_id: TaskId, *, tenant: str) -> Cancellation:
        """Cancel a task that waits; raises as `Canceller.cancel`."""
        ...


class Replacing:
    """Asks first tasks to make way."""

    def __init__(self, cancels: Cancels, *, retention_days: float, clock: Clock) -> None:
        """Ask through `cancels`; after `retention_days` a task that is not in the view is over and forgotten."""
        self._cancels = cancels
        self._retention_ms = round(retention_days * _DAY_MS)
        self._clock = clock
        # Of those in this process who replace in one window, one at a time: each would cancel what the one before has appended, and all but
        # one of them in vain.
        self._turns: WeakValueDictionary[ClaimKey, Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, window: ClaimKey, *, seconds: float) -> AsyncIterator[None]:
        """Replace in this window, after those of this process who came before.

        Raises:
            ProblemError: they took longer than that.
        """
        lock = self._turns.setdefault(window, Lock())
        try:
            async with asyncio.timeout(seconds):
                await lock.acquire()
        except TimeoutError as error:
            raise ProblemError(
                REPLACE_UNKNOWN,
                "many tasks take each other's place in this dedup window, and it was not this one's turn in time; it was not accepted",
                headers={"retry-after": _RETRY_AFTER_SECONDS},
            ) from error
        try:
            yield
        finally:
            lock.release()

    async def withdraw(
        self, first: TaskId, *, task_type: str, tenant: str, seconds: float
    ) -> Duplicate | None:
        """Cancel the first task if it waits. None: it is cancelled, so its place is free; else it stands.

        Args:
            first: the task that holds the window; in the log for certain.
            task_type: its type.
            tenant: whose it is.
            seconds: how long that may take.

        Raises:
            ProblemError: nobody can tell in time whether it is cancelled.
        """
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                found = await self._cancels.cancel(first, tenant=tenant)
        except TaskNotFound:
            if self._clock.now_ms() - created_at_ms(first) > self._retention_ms:
                return Duplicate(task_id=first, task_type=task_type, state=None)
            raise _unknown(first, "it is not in the view yet") from None
        except (Unavailable, DeliveryError, TimeoutError) as error:
            log.warning("replacement undecided", task_id=str(first), error=str(error) or "timed out")
            raise _unknown(first, "Kafka or Cassandra does not answer in time") from error
        if found.fate is Fate.REQUESTED:
            raise _unknown(first, "its cancel is in the log, and not in the view yet")
        if found.fate is Fate.CANCELLED:
            return None
        return Duplicate(task_id=first, task_type=task_type, state=found.state)


def _unknown(first: TaskId, why: str) -> ProblemError:
    return ProblemError(
        REPLACE_UNKNOWN,
        f"nobody can tell yet whether task {first} makes way: {why}; the new task was not accepted",
        members={"task_id": str(first)},
        headers={"retry-after": _RETRY_AFTER_SECONDS},
    )
