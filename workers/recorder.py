"""What a worker writes about an execution: its start, its end, and what follows from it.

Invariant: a coroutine here returns only when all that it writes is in the log. A dead letter is acknowledged before the DeadLettered
that announces it, so that whoever reads `dead` finds the task on the dead-letter topic. The next attempt and the events that announce
it go together: neither is of use without the other, and the failed attempt's record is not done before both are there.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Sequence
from typing import Any

import structlog

from taskline.errors import DeliveryError, Unavailable
from taskline.infra.log import HEADER_TASK_ID, HEADER_TRAIL, OutRecord, Position, verbatim_dead_letter
from taskline.infra.outbox import after_failure, deliver
from taskline.infra.tiers import Tiers, delayed
from taskline.infra.topics import Topics
from taskline.schemas.events import (
    AttemptError,
    Cancelled,
    Crashed,
    DeadLetter,
    DeadLettered,
    ErrorCategory,
    Expired,
    Failed,
    LifecycleEvent,
    Progress,
    Released,
    RetryScheduled,
    Started,
    Succeeded,
    TaskSubmitted,
)
from taskline.workers import metrics
from taskline.workers.admission import Admitted, Rejected
from taskline.workers.execution import Execution
from taskline.workers.failure import Failure
from taskline.workers.outcome import describe_error
from taskline.workers.ports import WorkerPorts
from taskline.workers.redispatch import next_attempt
from taskline.workers.retry import DEADLY
from taskline.workers.trail import Trail, decode_trail

log = structlog.get_logger(__name__)

UNDECODABLE = "undecodable"
# Why an execution was opened and not begun.
OVER = "over"
# Why one ended without an outcome: its handler said so.
HANDED_BACK = "handed_back"
# A Released is a courtesy to readers of the view (the task reads pending instead of running); it may not hold up a move.
RELEASE_SECONDS = 3.0


class Recorder:
    """Writes under one worker's name."""

    def __init__(self, ports: WorkerPorts, *, worker: str, topics: Topics, tiers: Tiers) -> None:
        """`worker` is this process's name; `topics` and `tiers` say where dead letters and next attempts go."""
        self._log = ports.log
        self._lifecycle = ports.lifecycle
        self._codec = ports.codec
        self._clock = ports.clock
        self._worker = worker
        self._topics = topics
        self._tiers = tiers

    # ---- an execution ------------------------------------------------------------------------------------------

    async def started(self, run: Execution, admitted: Admitted) -> None:
        """The handler will now run."""
        place = run.position
        await self._events(
            Started(
                **self._common(admitted.submission, admitted.attempt),
                execution=run.id,
                source_topic=place.topic,
                source_partition=place.partition,
                source_offset=place.offset,
            )
        )

    def progressed(
        self, run: Execution, admitted: Admitted, fraction: float | None, message: str | None
    ) -> Future[Position]:
        """How far the handler is; appended once, since a newer one follows, or the end."""
        appended = self._lifecycle.append(
            Progress(
                **self._common(admitted.submission, admitted.attempt),
                execution=run.id,
                fraction=fraction,
                message=message,
            )
        )
        appended.add_done_callback(_lost_quietly)
        return appended

    async def succeeded(self, run: Execution, admitted: Admitted, result: bytes | None) -> None:
        """The handler returned."""
        await self._events(
            Succeeded(**self._common(admitted.submission, admitted.attempt), execution=run.id, result=result)
        )

    async def retried(
        self, run: Execution, admitted: Admitted, failure: Failure, trail: Trail, due_ms: int
    ) -> None:
        """The attempt failed, and another one follows when it is due, with the `trail` up to this failure."""
        submission, attempt = admitted.submission, admitted.attempt
        failed = self._failed(run, admitted, failure)
        scheduled = RetryScheduled(**self._common(submission, attempt), due=due_ms)
        following = next_attempt(
            run.waiting.record,
            submission.task_id,
            attempt=attempt + 1,
            deaths=deaths_of(admitted, failure),
            trail=trail,
        )

        def append() -> Sequence[Future[Position]]:
            # It may have become due while the log was away.
            now_ms = self._clock.now_ms()
            record = delayed(following, due_ms=due_ms, now_ms=now_ms, topics=self._topics, tiers=self._tiers)
            return (self._log.append(record),)

        log.warning(
            "task failed; another attempt follows",
            error_class=failure.info.error_class,
            category=failure.category.value,
            due_ms=due_ms,
            **run.facts(),
        )
        await asyncio.gather(
            deliver(append, what="next attempt", task_id=submission.task_id),
            self._events(failed, scheduled),
        )
        metrics.RETRIES.labels(failure.category.value).inc()

    async def buried(
        self, run: Execution, admitted: Admitted, failure: Failure, trail: Trail, reason: str
    ) -> None:
        """The attempt failed, and the task is dead; `trail` as in `retried`."""
        submission, attempt = admitted.submission, admitted.attempt
        failed = self._failed(run, admitted, failure)
        await self._dead_letter(run, submission, attempt, failure, reason=reason, trail=trail)
        await self._events(failed, DeadLettered(**self._common(submission, attempt), reason=reason))

    async def crashed_beside_others(self, run: Execution, admitted: Admitted, cause: str) -> None:
        """The process died under the handler while others ran in it; no attempt is spent."""
        log.warning("process died under a task; it is run again, alone", cause=cause, **run.facts())
        await self._events(
            Crashed(
                **self._common(admitted.submission, admitted.attempt),
                execution=run.id,
                cause=cause,
                alone=False,
            )
        )

    async def expired(self, run: Execution, admitted: Admitted, failure: Failure | None = None) -> None:
        """The task is not worth starting any more; `failure` is of the attempt that ended just now, if one did."""
        submission, attempt = admitted.submission, admitted.attempt
        metrics.EXPIRED.labels(admitted.task.name).inc()
        log.warning("task expired", start_by_ms=submission.start_by, **run.facts())
        place = run.position
        over = Expired(
            **self._common(submission, attempt),
            source_topic=place.topic,
            source_partition=place.partition,
            source_offset=place.offset,
        )
        if failure is None:
            await self._events(over)
        else:
            await self._events(self._failed(run, admitted, failure), over)

    async def cancelled(self, run: Execution, admitted: Admitted) -> None:
        """The execution was stopped, or not begun, since its task was to be aborted."""
        log.info("task aborted", **run.facts())
        await self._events(Cancelled(**self._common(admitted.submission, admitted.attempt), execution=run.id))

    async def dropped(self, run: Execution, admitted: Admitted) -> None:
        """The execution was not begun, since its task was over: else it would read as running in the history for ever."""
        log.info("task is over (cancelled, most likely); not run", **run.facts())
        await self._events(
            Released(**self._common(admitted.submission, admitted.attempt), execution=run.id, reason=OVER)
        )

    def released(self, run: Execution, reason: str) -> Future[Position]:
        """An execution was handed back unfinished; appended once, since a missing Released does no harm."""
        admitted = run.admitted
        assert admitted is not None  # noqa: S101 - only what was started is released
        metrics.tasks(admitted.task.name, "released").inc()
        log.info("task handed back", reason=reason, **run.facts())
        return self._lifecycle.append(
            Released(**self._common(admitted.submission, admitted.attempt), execution=run.id, reason=reason)
        )

    async def handed_back(self, run: Execution) -> None:
        """The handler gave its execution back; as `released`, but heard of before its partition goes."""
        released = self.released(run, HANDED_BACK)
        released.add_done_callback(_lost_quietly)
        await asyncio.wait([released], timeout=RELEASE_SECONDS)

    def trail(self, run: Execution, attempt: int, failure: Failure) -> Trail:
        """The errors of the earlier attempts, and this one."""
        info = failure.info
        return decode_trail(run.waiting.record.headers.get(HEADER_TRAIL)).append(
            AttemptError(
                attempt=attempt,
                at=self._clock.now_ms(),
                worker=self._worker,
                category=failure.category,
                error_class=info.error_class,
                message=info.message,
            )
        )

    # ---- what is not run ---------------------------------------------------------------------------------------

    async def rejected(self, run: Execution, rejected: Rejected) -> None:
        """No handler here, or no payload for it: the task is dead without having been started."""
        failure = Failure(
            info=describe_error(rejected.error), category=ErrorCategory.PERMANENT, retryable=False
        )
        submission, attempt, reason = rejected.submission, rejected.attempt, rejected.reason
        trail = self.trail(run, attempt, failure)
        await self._dead_letter(run, submission, attempt, failure, reason=reason, trail=trail)
        await self._events(DeadLettered(**self._common(submission, attempt), reason=reason))

    async def undecodable(self, run: Execution, cause: str) -> None:
        """Bytes that are no task: onto the dead-letter topic verbatim, with the cause and the source in headers."""
        record = run.waiting.record
        copy = verbatim_dead_letter(
            self._topics.dlq,
            value=record.value,
            key=record.key,
            headers=record.headers,
            source=record.position,
            cause=cause,
        )
        await deliver(lambda: (self._log.append(copy),), what="undecodable record", task_id=None)
        metrics.DEAD_LETTERS.labels(UNDECODABLE).inc()
        log.warning("undecodable record put on the dead-letter topic", cause=cause, **run.facts())

    # ---- the parts ---------------------------------------------------------------------------------------------

    def _failed(self, run: Execution, admitted: Admitted, failure: Failure) -> LifecycleEvent:
        """How the attempt ended, as an event."""
        info, common = failure.info, self._common(admitted.submission, admitted.attempt)
        if failure.category is ErrorCategory.CRASH:
            return Crashed(**common, execution=run.id, cause=info.message, alone=True)
        return Failed(
            **common,
            execution=run.id,
            error_class=info.error_class,
            message=info.message,
            traceback=info.traceback,
            retryable=failure.retryable,
            category=failure.category,
        )

    async def _dead_letter(
        self,
        run: Execution,
        submission: TaskSubmitted,
        attempt: int,
        failure: Failure,
        *,
        reason: str,
        trail: Trail,
    ) -> None:
        place, info = run.position, failure.info
        letter = DeadLetter(
            task_id=submission.task_id,
            tenant=submission.tenant,
            task_type=submission.task_type,
            reason=reason,
            attempt=attempt,
            error_class=info.error_class,
            message=info.message,
            traceback=info.traceback,
            worker=self._worker,
            at=self._clock.now_ms(),
            category=failure.category,
            errors=trail.errors,
            source_topic=place.topic,
            source_partition=place.partition,
            source_offset=place.offset,
            submission=run.waiting.record.value or b"",
        )
        key = submission.task_id.bytes

        def append() -> Sequence[Future[Position]]:
            value = self._codec.encode(letter)
            record = OutRecord(topic=self._topics.dlq, key=key, value=value, headers={HEADER_TASK_ID: key})
            return (self._log.append(record),)

        await deliver(append, what="dead letter", task_id=submission.task_id)
        metrics.DEAD_LETTERS.labels(reason).inc()
        facts = run.facts() | {"task_id": str(submission.task_id), "attempt": attempt}
        log.warning(
            "task put on the dead-letter topic",
            reason=reason,
            error_class=info.error_class,
            category=failure.category.value,
            **facts,
        )

    async def _events(self, *events: LifecycleEvent) -> None:
        """Append events in one go until they are acknowledged; nearly always that is the first attempt."""
        if len(events) == 1:
            try:
                await self._lifecycle.append(events[0])
            except (DeliveryError, Unavailable, asyncio.CancelledError) as error:
                await after_failure(error, what=type(events[0]).__name__, task_id=events[0].task_id)
            else:
                return
        await deliver(
            lambda: [self._lifecycle.append(event) for event in events],
            what=type(events[0]).__name__,
            task_id=events[0].task_id,
        )

    def _common(self, submission: TaskSubmitted, attempt: int) -> dict[str, Any]:
        return {
            "task_id": submission.task_id,
            "tenant": submission.tenant,
            "attempt": attempt,
            "worker": self._worker,
            "at": self._clock.now_ms(),
            "retain_until": submission.retain_until,
        }


def deaths_of(admitted: Admitted, failure: Failure) -> int:
    """How many processes the task has killed that ran nothing else, or filled to their limit, after this failure."""
    return admitted.deaths + (failure.category in DEADLY)


def _lost_quietly(appended: Future[Position]) -> None:
    if not appended.cancelled() and appended.exception() is not None:
        log.debug("an event was lost", error=str(appended.exception()))
