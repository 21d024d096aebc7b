"""What workers report about what they were lent: done, failed, still at it.

Invariant: a report is answered as taken only once the view shows that it counted, and as stale only once the view shows that it did not; whatever is
not known in time is said to be so, and the same report may be made again, here or at another replica, with the same answer. Nothing
is remembered between reports: all that they are judged by is in the task's lane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import structlog

from taskline.errors import OutcomeUnknown, StaleLease, Unavailable, UndecodableRecord, UnknownSchema
from taskline.infra.role import Clock
from taskline.schemas.events import DeadLettered, Expired, RetryScheduled
from taskline.schemas.ids import TaskId, to_ms
from taskline.settings import Settings
from taskline.state.fold import Outcome
from taskline.state.leases import Lease
from taskline.workers import lease_metrics as metrics
from taskline.workers.cancels import CancelGate
from taskline.workers.failure import Failure
from taskline.workers.lease_book import LeaseBook
from taskline.workers.lease_follow import LeaseFollower
from taskline.workers.lease_reading import Found, LeaseReader
from taskline.workers.lease_records import LeaseRecords
from taskline.workers.lease_tokens import execution_of
from taskline.workers.progress import pause_seconds

log = structlog.get_logger(__name__)

T = TypeVar("T")

_MS = 1_000
# A worker that extends at a third of its lease writes an event each time, and one that extends more often does not.
_LEAST_GAIN = 3
# What a worker gets beyond its task's time limit to say how it ended.
_LAST_WORDS_MS = 5_000
# An extension is answered within this part of a lease, known or not, so that a worker's next one comes in time although the view lags.
_HEARTBEAT_SHARE = 6
_LEAST_HEARTBEAT_SECONDS = 0.5
COMPLETED: Final = "completed"
CANCELLED: Final = "cancelled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A report that counted."""

    # completed, retry_scheduled, dead, expired or cancelled.
    outcome: str
    # Of retry_scheduled: when the next attempt is due, in ms since the epoch.
    due_ms: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Extended:
    """A lease that goes on."""

    remaining_seconds: float
    # Whether the worker should stop: somebody cancels the task although it runs.
    cancel_requested: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """How far the worker is."""

    # From 0 to 1; None: it did not say.
    fraction: float | None
    message: str | None


class LeaseOutcomes:
    """Takes the reports of one queue's workers."""

    def __init__(
        self,
        reader: LeaseReader,
        records: LeaseRecords,
        follower: LeaseFollower,
        *,
        book: LeaseBook,
        gate: CancelGate | None,
        clock: Clock,
        settings: Settings,
        queue: str,
    ) -> None:
        """Judge reports by `reader`; keep this process's `book` up to date."""
        self._reader = reader
        self._records = records
        self._follower = follower
        self._book = book
        self._gate = gate
        self._clock = clock
        self._queue = queue
        self._patience = settings.api.request_timeout_seconds
        self._lease_ms = round(settings.gateway.lease_seconds * _MS)
        self._heartbeat_seconds = min(
            self._patience,
            max(_LEAST_HEARTBEAT_SECONDS, settings.gateway.lease_seconds / _HEARTBEAT_SHARE),
        )
        self._least_pause = settings.worker.progress_interval_seconds
        self._default_timeout_ms = round(settings.worker.default_timeout_seconds * _MS)
        # Failures that are being seen to: they go on when their request has run out of patience.
        self._failing: dict[TaskId, asyncio.Task[Lease]] = {}

    async def complete(self, task_id: TaskId, token: str, result: bytes | None) -> Taken:
        """The worker has done it; `result` is JSON.

        Raises:
            StaleLease: it did not count.
            OutcomeUnknown: it is not known whether it did.
        """

        async def report() -> Taken:
            execution, lease = await self._find(task_id, token)
            if lease.open:
                await self._records.succeeded(lease, result)
                lease = (await self._reader.until(task_id, execution, lambda seen: not seen.open)).lease
            self._book.remove(execution)
            if lease.outcome is not Outcome.SUCCEEDED or not lease.counted:
                raise _stale(lease)
            return Taken(outcome=COMPLETED)

        return await self._answer("complete", task_id, report())

    async def fail(self, task_id: TaskId, token: str, failure: Failure) -> Taken:
        """The worker could not; raises as `complete`. A task that is to be aborted is cancelled by this."""

        async def report() -> Taken:
            execution, lease = await self._find(task_id, token)
            if lease.open or execution in self._failing:
                lease = await asyncio.shield(self._fail(execution, lease, failure))
            self._book.remove(execution)
            if lease.outcome is Outcome.CANCELLED and lease.counted:
                return Taken(outcome=CANCELLED)
            if lease.outcome is not Outcome.FAILED or not lease.counted:
                raise _stale(lease)
            if not lease.followed:
                # Another replica is at it; if it died, the lease's guard sees to it.
                lease = (await self._reader.until(task_id, execution, lambda seen: seen.followed)).lease
            return _followed(lease)

        return await self._answer("fail", task_id, report())

    async def extend(
        self, task_id: TaskId, token: str, *, seconds: float | None, said: Said | None = None
    ) -> Extended:
        """The worker goes on; raises as `complete`.

        An extension that is in the log counts even if its answer was that nobody knows yet: a TimedOut that comes behind it changes nothing.

        Args:
            task_id: its task.
            token: of its lease.
            seconds: how long the lease shall last from now; None: as long as a new one. It never becomes shorter, and never lasts
                beyond the task's time limit.
            said: how far it is; written if the last one is long enough ago (`pause_seconds`), and lost otherwise.
        """

        async def report() -> Extended:
            execution, lease = await self._find(task_id, token)
            now_ms = self._clock.now_ms()
            if lease.open and said is not None and self._due(lease, now_ms):
                self._records.progressed(lease, said.fraction, said.message)
            asked_ms = self._lease_ms if seconds is None else round(seconds * _MS)
            until = min(now_ms + asked_ms, lease.started.at + self._limit_ms(lease) + _LAST_WORDS_MS)
            short = lease.lease_until - now_ms < asked_ms / 2
            if lease.open and until > lease.lease_until + (0 if short else asked_ms / _LEAST_GAIN):
                await self._records.extended(lease, until)
                lease = (
                    await self._reader.until(
                        task_id, execution, lambda seen: not seen.open or seen.lease_until >= until
                    )
                ).lease
            if not lease.open:
                self._book.remove(execution)
                raise _stale(lease)
            self._book.extend(execution, lease.lease_until)
            aborts = self._gate is not None and self._gate.aborts(task_id)
            return Extended(
                remaining_seconds=max(0, lease.lease_until - self._clock.now_ms()) / _MS,
                cancel_requested=lease.abort or aborts,
            )

        return await self._answer("extend", task_id, report(), patience=self._heartbeat_seconds)

    async def close(self, seconds: float) -> None:
        """Give what is being seen to some time; what is left is for the leases' guards."""
        tasks = list(self._failing.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()

    # ---- the parts ---------------------------------------------------------------------------------------------------

    async def _find(self, task_id: TaskId, token: str) -> tuple[TaskId, Lease]:
        execution = execution_of(token, task_id)
        if execution is None:
            raise StaleLease(task_id, "this is no token of this task")
        lease = (await self._reader.until(task_id, execution)).lease
        if lease.submission.queue != self._queue:
            raise StaleLease(task_id, "it is of another queue")
        return execution, lease

    def _fail(self, execution: TaskId, lease: Lease, failure: Failure) -> asyncio.Task[Lease]:
        known = self._failing.get(execution)
        if known is not None:
            return known
        task = asyncio.create_task(self._see_to(execution, lease, failure), name="lease-failure")
        self._failing[execution] = task
        task.add_done_callback(lambda done: self._seen(execution, done))
        return task

    async def _see_to(self, execution: TaskId, lease: Lease, failure: Failure) -> Lease:
        """Write the failure, see whether it counted, and write what follows; the lease as it then is."""
        task_id, submission = lease.submission.task_id, lease.submission
        if lease.abort or (self._gate is not None and self._gate.aborts(task_id)):
            await self._records.cancelled(
                submission, lease.started.attempt, execution, worker=lease.started.worker
            )
        else:
            await self._records.failed(lease, failure)
        found = await self._closed(task_id, execution)
        if found.lease.outcome is Outcome.FAILED and found.lease.counted and not found.lease.followed:
            await self._follower.follow(found.lease, found.submission, failure)
        return found.lease

    async def _closed(self, task_id: TaskId, execution: TaskId) -> Found:
        while True:
            try:
                return await self._reader.until(task_id, execution, lambda seen: not seen.open)
            except (Unavailable, UnknownSchema, UndecodableRecord) as error:
                log.warning("what became of a report can't be seen", task_id=str(task_id), error=str(error))
                await asyncio.sleep(1.0)

    def _seen(self, execution: TaskId, task: asyncio.Task[Lease]) -> None:
        self._failing.pop(execution, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("a failure could not be seen to; its lease's guard will", error=str(task.exception()))

    def _due(self, lease: Lease, now_ms: int) -> bool:
        if lease.progress is None:
            return True
        pause = pause_seconds((now_ms - lease.started.at) / _MS, self._least_pause)
        return now_ms - to_ms(lease.progress.at) >= pause * _MS

    def _limit_ms(self, lease: Lease) -> int:
        return lease.submission.timeout_ms or self._default_timeout_ms

    async def _answer(
        self, report: str, task_id: TaskId, coming: Coroutine[Any, Any, T], *, patience: float | None = None
    ) -> T:
        try:
            async with asyncio.timeout(self._patience if patience is None else patience):
                answer = await coming
        except StaleLease as stale:
            metrics.OUTCOMES.labels(report, "stale").inc()
            log.info("stale report refused", report=report, task_id=str(task_id), reason=stale.reason)
            raise
        except (TimeoutError, Unavailable, UnknownSchema, UndecodableRecord) as error:
            metrics.OUTCOMES.labels(report, "unknown").inc()
            why = "the view lags" if isinstance(error, TimeoutError) else str(error)
            raise OutcomeUnknown(task_id, why) from error
        metrics.OUTCOMES.labels(report, "taken").inc()
        return answer


def _followed(lease: Lease) -> Taken:
    following = lease.following
    if isinstance(following, RetryScheduled):
        return Taken(outcome="retry_scheduled", due_ms=following.due)
    if isinstance(following, DeadLettered):
        return Taken(outcome="dead")
    if isinstance(following, Expired):
        return Taken(outcome="expired")
    # The next attempt has begun, or the task was cancelled meanwhile.
    return Taken(outcome="retry_scheduled" if following is not None else CANCELLED)


def _stale(lease: Lease) -> StaleLease:
    words = {
        Outcome.TIMED_OUT: "it ended without an outcome",
        Outcome.SUPERSEDED: "the task was lent again",
        Outcome.RELEASED: "it was handed back",
        Outcome.CANCELLED: "the task was cancelled",
        Outcome.SUCCEEDED: "it was completed",
        Outcome.FAILED: "it was reported as failed",
        Outcome.RUNNING: "the task is over",
    }
    reason = words.get(lease.outcome, lease.outcome.value)
    return StaleLease(
        lease.submission.task_id, reason if lease.counted or not lease.over else "the task is over"
    )
