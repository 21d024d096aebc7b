"""Whether an execution that was opened may begin: what the worker does about cancelled tasks.

Invariant: a handler begins only if, after its Started was acknowledged, either no notice names its task, or its task's lane says that
it may: its own Started is in the view, the task is not over, and the execution is still open. What can't be told (no view, a view that lags) is
neither run nor dropped, but waits, off its slot. So a task whose CancelRequested was effective before its Started does not run, and one
whose Started came first keeps the CancelRequested from being effective (taskline.state.fold).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Final, Protocol

import structlog

from taskline.errors import Unavailable, UndecodableRecord, UnknownSchema
from taskline.infra.backoff import pauses
from taskline.infra.cancels import CancelNotices
from taskline.infra.role import Clock
from taskline.schemas.codec import Codec
from taskline.schemas.events import TaskSubmitted
from taskline.schemas.ids import TaskId
from taskline.state.fold import LaneEvent, Outcome, history
from taskline.state.store import StoredTask
from taskline.state.stored import events_of
from taskline.workers import metrics

log = structlog.get_logger(__name__)

# A process that was frozen (or a loop that was blocked) for longer than this between the check and the handler's first line checks again: its
# partition may have moved meanwhile, after which its Started keeps no cancel from being effective. Well below a session's time-out.
FRESH_SECONDS: Final = 2.0
# The projector is usually within a flush interval (20 ms); one that is far behind must not be made slower by reads.
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 1.0
# How often a wait for the view is told of.
_WARN_SECONDS = 30.0


class Verdict(Enum):
    """What becomes of an opened execution."""

    RUN = auto()
    # The task is over: its record is done.
    OVER = auto()
    # The execution is not open any more (its record was delivered elsewhere, too), and the task is not over: it is to be opened anew.
    AGAIN = auto()
    # It is not to run, and says so in the lane.
    ABORT = auto()


class TaskView(Protocol):
    """Where a task's events are read: a `ViewStore`."""

    async def read(self, task_id: TaskId) -> StoredTask | None:
        """What is stored of the task; None: nothing.

        Raises:
            Unavailable: the view does not answer.
        """
        ...


def verdict_of(
    submission: TaskSubmitted, events: Sequence[LaneEvent], execution: TaskId, *, abort: bool
) -> Verdict | None:
    """What the task's events say about an opened execution; None: its Started is not among them yet. Pure."""
    told = history(submission, events)
    own = next((row for row in told.attempts if row.execution == execution), None)
    if own is None:
        return None
    if told.state.status.ended:
        return Verdict.OVER
    if own.outcome is not Outcome.RUNNING:
        return Verdict.AGAIN
    return Verdict.ABORT if abort else Verdict.RUN


class CancelGate:
    """What stands between Started and the handler, for all executions of a worker."""

    def __init__(self, notices: CancelNotices, view: TaskView, codec: Codec, clock: Clock) -> None:
        """Ask `notices` of every task, and `view` of those that are named."""
        self._notices = notices
        self._view = view
        self._codec = codec
        self._clock = clock
        self._on_abort: Callable[[TaskId], None] | None = None

    def listen(self, on_abort: Callable[[TaskId], None]) -> None:
        """Call `on_abort` with each task whose running executions are to be stopped."""
        self._on_abort = on_abort

    def heard(self, task_id: TaskId) -> None:
        """Take an abort; what the notices are started with."""
        if self._on_abort is not None:
            self._on_abort(task_id)

    def aborts(self, task_id: TaskId) -> bool:
        """Whether the task's executions are to be stopped."""
        return self._notices.aborts(task_id)

    def expect(self) -> None:
        """A Started is about to be appended, so `named` will be asked when it is acknowledged."""
        self._notices.expect()

    async def named(self, task_id: TaskId) -> bool:
        """Whether the task must be looked up; asked once its Started is acknowledged."""
        await self._notices.catch_up()
        return self._notices.names(task_id)

    async def judge(self, execution: TaskId, submission: TaskSubmitted) -> tuple[Verdict, float]:
        """What the view says about an opened execution, once it has its Started.

        Returns:
            The verdict, and a moment at which it held, by the loop's clock.
        """
        loop = asyncio.get_running_loop()
        task_id = submission.task_id
        waits = pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        warn_at = loop.time() + _WARN_SECONDS
        metrics.LOOKED_UP.inc()
        while True:
            asked_at = loop.time()
            if self._clock.now_ms() >= submission.retain_until:
                # Nobody may remember it any longer, so nobody can say that it was cancelled.
                log.warning("task is past its retention; it is run unasked", task_id=str(task_id))
                return Verdict.RUN, asked_at
            cause = "its Started is not in the view yet: does a projector run?"
            try:
                stored = await self._view.read(task_id)
                if stored is not None:
                    verdict = verdict_of(
                        submission,
                        events_of(self._codec, stored),
                        execution,
                        abort=self._notices.aborts(task_id),
                    )
                    if verdict is not None:
                        return verdict, asked_at
            except (Unavailable, UnknownSchema, UndecodableRecord) as error:
                cause = str(error)
            if loop.time() >= warn_at:
                warn_at = loop.time() + _WARN_SECONDS
                log.warning(
                    "task waits: it may have been cancelled, and the view can't say (worker.cancels = false would run it)",
                    task_id=str(task_id),
                    cause=cause,
                )
            await asyncio.sleep(next(waits))
