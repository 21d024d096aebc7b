"""Appends that must succeed: events and dead letters, again and again until they are acknowledged.

Invariant: `deliver` returns only when everything is in the log. It never gives up by itself; cancelling it is the only other
way out (the partition moved, or the worker leaves), and what it was asked to append may then be in the log or not.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Sequence

import structlog
from prometheus_client import Counter

from taskline.errors import DeliveryError, Unavailable
from taskline.infra.backoff import pauses
from taskline.infra.log import Position
from taskline.schemas.ids import TaskId

log = structlog.get_logger(__name__)

APPEND_RETRIES = Counter(
    "taskline_log_append_retries",
    "Records that were not acknowledged and are appended again, after the client's own retries.",
)

# The log's own client retries for its delivery time-out first, so this is about an outage: try soon, then at leisure, but
# often enough that work goes on within seconds of the log's return.
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0


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
    waits = pauses(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
    while True:
        futures: Sequence[Future[Position]] = ()
        try:
            futures = append()
            for future in futures:
                await future
        except (DeliveryError, Unavailable, asyncio.CancelledError) as error:
            await after_failure(error, what=what, task_id=task_id, pause=next(waits))
        else:
            return
        finally:
            # The first failure of an attempt speaks for all.
            for future in futures:
                future.add_done_callback(_retrieve)


async def after_failure(
    error: BaseException, *, what: str, task_id: TaskId | None, pause: float = FIRST_PAUSE_SECONDS
) -> None:
    """Wait before the next attempt.

    Raises:
        CancelledError: that was `error`, and the current task was cancelled. (The log may also cancel a future of its own, as it does
            when it is torn down; then nobody knows what became of the record.)
    """
    current = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and (current is None or current.cancelling()):
        raise error
    APPEND_RETRIES.inc()
    log.warning(
        "append failed; trying again",
        what=what,
        task_id=None if task_id is None else str(task_id),
        error=f"{type(error).__name__}: {error}",
        pause_seconds=pause,
    )
    await asyncio.sleep(pause)


def _retrieve(future: Future[Position]) -> None:
    """Mark a failure as seen."""
    if not future.cancelled():
        future.exception()
