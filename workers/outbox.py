"""Appends that must succeed: events and dead letters, again and again until they are acknowledged.

Invariant: `deliver` returns only when everything is in the log. It never gives up by itself; cancelling it is the only other
way out (the partition moved, or the worker leaves), and what it was asked to append may then be in the log or not.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Iterator, Sequence

import structlog

from taskline.errors import DeliveryError, Unavailable
from taskline.infra.log import Position
from taskline.schemas.ids import TaskId
from taskline.workers import metrics

log = structlog.get_logger(__name__)

# The log's own client retries for its delivery time-out first, so this is about an outage: try soon, then at leisure, but
# often enough that work goes on within seconds of the log's return.
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
_FACTOR = 2


def pauses() -> Iterator[float]:
    """Seconds to wait after the first, second, … failure."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(pause * _FACTOR, MAX_PAUSE_SECONDS)


async def deliver(
    append: Callable[[], Sequence[Future[Position]]], *, what: str, task_id: TaskId | None
) -> None:
    """Append until every future of one attempt is acknowledged.

    Args:
        append: makes one attempt, encoding included, since a codec may need a registry that is away. Nothing between its appends
            yields to the loop, so they keep their order.
        what: for the log.
        task_id: for the log; None: bytes that are no task.
    """
    waits = pauses()
    while True:
        try:
            await _acknowledged(append())
        except (DeliveryError, Unavailable) as error:
            pause = next(waits)
            metrics.APPEND_RETRIES.inc()
            log.warning(
                "append failed; trying again",
                what=what,
                task_id=None if task_id is None else str(task_id),
                error=f"{type(error).__name__}: {error}",
                pause_seconds=pause,
            )
            await asyncio.sleep(pause)
        else:
            return


async def _acknowledged(futures: Sequence[Future[Position]]) -> None:
    try:
        for future in futures:
            await future
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # The log itself cancelled it, as it does when it is torn down: nobody knows.
        raise DeliveryError("the append was cancelled by the log") from None
    finally:
        for future in futures:
            if not future.done():
                future.add_done_callback(_retrieve)
            else:
                _retrieve(future)


def _retrieve(future: Future[Position]) -> None:
    """Mark a failure as seen; the first one of an attempt speaks for all."""
    if not future.cancelled():
        future.exception()
