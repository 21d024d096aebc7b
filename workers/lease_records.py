"""What is written about a lease: its start, its extensions, its end, and what follows from that.

Invariant: a coroutine here returns only when what it writes is in the log. What follows an end is acknowledged before the event that announces it
(the next attempt before RetryScheduled, the dead letter before DeadLettered): a lease that closed without such an event has nothing that
follows it for certain, so that whoever comes by may see to it (`taskline.workers.lease_watch`).
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Sequence
from typing import Any

import structlog

from taskline.errors import Unavailable
from taskline.infra.kafka.lifecycle import LifecycleLog
from taskline.infra.log import (
    HEADER_TASK_ID,
    HEADER_UNFETCHED,
    AsyncLog,
    InRecord,
    OutRecord,
    Position,
    verbatim_dead_letter,
)
from taskline.infra.outbox import deliver
from taskline.infra.role import Clock
from taskline.infra.tiers import Tiers, delayed
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import (
    AttemptError,
    Cancelled,
    DeadLetter,
    DeadLettered,
    ErrorCategory,
    Expired,
    Failed,
    LeaseExtended,
    LifecycleEvent,
    Progress,
    Released,
    RetryScheduled,
    Started,
    Succeeded,
    TaskSubmitted,
    TimedOut,
)
from taskline.schemas.ids import TaskId, to_ms
from taskline.state.leases import Lease
from taskline.workers import metrics
from taskline.workers.failure import Failure
from taskline.workers.outcome import describe_error, head
from taskline.workers.redispatch import dispatch_again
from taskline.workers.trail import EMPTY, Trail

log = structlog.get_logger(__name__)

UNDECODABLE = "undecodable"
# A worker of the HTTP protocol is named by whoever runs it; the name goes into every event of its executions.
MAX_WORKER_BYTES = 100


class LeaseRecords:
    """Writes under one gateway's name, or for its workers under theirs."""

    def __init__(
        self,
        kafka: AsyncLog,
        lifecycle: LifecycleLog,
        codec: Codec,
        clock: Clock,
        *,
        replica: str,
        topics: Topics,
        tiers: Tiers,
    ) -> None:
        """`replica` is this process's name; `topics` and `tiers` say where records go."""
        self._log = kafka
        self._lifecycle = lifecycle
        self._codec = codec
        self._clock = clock
        self._replica = replica
        self._topics = topics
        self._tiers = tiers

    # ---- a lease -----------------------------------------------------------------------------------------------------

    def started(
        self,
        submission: TaskSubmitted,
        place: Position,
        attempt: int,
        execution: TaskId,
        *,
        worker: str,
        until: int,
    ) -> Future[Position]:
        """The task is lent; appended once, since a lease that may not have begun is not handed out."""
        return self._lifecycle.append(
            Started(
                **self._common(submission, attempt, worker=worker),
                execution=execution,
                source_topic=place.topic,
                source_partition=place.partition,
                source_offset=place.offset,
                lease_until=until,
            )
        )

    async def extended(self, lease: Lease, until: int) -> None:
        """The lease ends later."""
        await self._event(
            LeaseExtended(**self._of(lease), execution=lease.started.execution, lease_until=until)
        )

    def progressed(self, lease: Lease, fraction: float | None, message: str | None) -> None:
        """How far its worker is; appended once and not waited for, since a newer one follows, or the end."""
        said = Progress(
            **self._of(lease), execution=lease.started.execution, fraction=fraction, message=message
        )
        try:
            self._lifecycle.append(said).add_done_callback(_lost_quietly)
        except Unavailable as error:
            log.debug("progress was lost", error=str(error))

    async def succeeded(self, lease: Lease, result: bytes | None) -> None:
        """The worker has done it."""
        await self._event(Succeeded(**self._of(lease), execution=lease.started.execution, result=result))

    async def failed(self, lease: Lease, failure: Failure) -> None:
        """The worker could not."""
        info = failure.info
        await self._event(
            Failed(
                **self._of(lease),
                execution=lease.started.execution,
                error_class=info.error_class,
                message=info.message,
                traceback=info.traceback,
                retryable=failure.retryable,
                category=failure.category,
            )
        )

    async def cancelled(
        self, submission: TaskSubmitted, attempt: int, execution: TaskId, *, worker: str
    ) -> None:
        """The task was to be aborted, and is not run, or not any more."""
        await self._event(Cancelled(**self._common(submission, attempt, worker=worker), execution=execution))

    async def timed_out(self, lease: Lease) -> None:
        """The lease has ended without an outcome."""
        await self._event(
            TimedOut(
                **self._common(lease.submission, lease.started.attempt),
                execution=lease.started.execution,
                lease_until=lease.lease_until,
            )
        )

    # ---- what follows it -----------------------------------------------------------------------------------------

    async def retried(self, lease: Lease, submission: bytes, due_ms: int) -> None:
        """Another attempt, when it is due."""
        following = dispatch_again(
            self._dispatch(lease.submission),
            submission,
            lease.submission,
            attempt=lease.started.attempt + 1,
            deaths=lease.deaths,
            trail=trail_of(lease),
        )
        await self._send_later(following, due_ms, what="next attempt", task_id=lease.submission.task_id)
        await self._event(RetryScheduled(**self._of_replica(lease), due=due_ms))
        error = lease.errors[-1].error if lease.errors else None
        metrics.RETRIES.labels((error.category if error else ErrorCategory.UNKNOWN).value).inc()

    async def buried(self, lease: Lease, submission: bytes, reason: str) -> None:
        """A dead letter."""
        started, last = lease.started, lease.errors[-1]
        await self._dead_letter(
            DeadLetter(
                task_id=lease.submission.task_id,
                tenant=lease.submission.tenant,
                task_type=lease.submission.task_type,
                reason=reason,
                attempt=started.attempt,
                error_class=last.error.error_class,
                message=last.error.message,
                traceback=last.error.traceback,
                worker=last.worker,
                at=self._clock.now_ms(),
                category=last.error.category,
                errors=trail_of(lease).errors,
                source_topic=started.source_topic,
                source_partition=started.source_partition,
                source_offset=started.source_offset,
                submission=submission,
            )
        )
        await self._event(DeadLettered(**self._of_replica(lease), reason=reason))

    async def expired(self, submission: TaskSubmitted, place: Position, attempt: int) -> None:
        """Not worth starting any more: the dispatch record at `place` is not lent."""
        metrics.EXPIRED.labels(submission.task_type).inc()
        await self._event(
            Expired(
                **self._common(submission, attempt),
                source_topic=place.topic,
                source_partition=place.partition,
                source_offset=place.offset,
            )
        )

    # ---- a dispatch record that is not lent ---------------------------------------------------------------------

    async def released(
        self,
        submission: TaskSubmitted,
        record: InRecord,
        attempt: int,
        execution: TaskId,
        *,
        worker: str,
        reason: str,
    ) -> None:
        """A lease that reached nobody: its record goes to the topic again, and spends no attempt."""
        again = OutRecord(
            topic=record.position.topic, key=record.key, value=record.value, headers=dict(record.headers)
        )
        await deliver(lambda: (self._log.append(again),), what="released task", task_id=submission.task_id)
        await self._event(
            Released(**self._common(submission, attempt, worker=worker), execution=execution, reason=reason)
        )

    async def handed_on(self, record: InRecord, task_id: TaskId, *, times: int, delay_ms: int) -> None:
        """A record that nobody fetches goes to its topic's end, by way of the tiers."""
        headers = {**record.headers, HEADER_UNFETCHED: b"%d" % times}
        again = OutRecord(topic=record.position.topic, key=record.key, value=record.value, headers=headers)
        due_ms = self._clock.now_ms() + delay_ms
        await self._send_later(again, due_ms, what="unfetched task", task_id=task_id)

    async def rejected(
        self, submission: TaskSubmitted, record: InRecord, attempt: int, *, reason: str, error: Exception
    ) -> None:
        """No such type, or no payload of it: the task is dead without having been lent."""
        info, place = describe_error(error), record.position
        await self._dead_letter(
            DeadLetter(
                task_id=submission.task_id,
                tenant=submission.tenant,
                task_type=submission.task_type,
                reason=reason,
                attempt=attempt,
                error_class=info.error_class,
                message=info.message,
                traceback=info.traceback,
                worker=self._replica,
                at=self._clock.now_ms(),
                category=ErrorCategory.PERMANENT,
                errors=(),
                source_topic=place.topic,
                source_partition=place.partition,
                source_offset=place.offset,
                submission=record.value or b"",
            )
        )
        await self._event(DeadLettered(**self._common(submission, attempt), reason=reason))

    async def undecodable(self, record: InRecord, cause: str) -> None:
        """Bytes that are no task: onto the dead-letter topic as they are."""
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
        log.warning(
            "undecodable record put on the dead-letter topic", cause=cause, source=str(record.position)
        )

    # ---- the parts ---------------------------------------------------------------------------------------------------

    def _dispatch(self, submission: TaskSubmitted) -> str:
        return self._topics.dispatch(submission.queue, submission.priority)

    async def _send_later(self, record: OutRecord, due_ms: int, *, what: str, task_id: TaskId) -> None:
        def append() -> Sequence[Future[Position]]:
            now_ms = self._clock.now_ms()
            sent = delayed(record, due_ms=due_ms, now_ms=now_ms, topics=self._topics, tiers=self._tiers)
            return (self._log.append(sent),)

        await deliver(append, what=what, task_id=task_id)

    async def _dead_letter(self, letter: DeadLetter) -> None:
        key = letter.task_id.bytes

        def append() -> Sequence[Future[Position]]:
            value = self._codec.encode(letter)
            return (
                self._log.append(
                    OutRecord(topic=self._topics.dlq, key=key, value=value, headers={HEADER_TASK_ID: key})
                ),
            )

        await deliver(append, what="dead letter", task_id=letter.task_id)
        metrics.DEAD_LETTERS.labels(letter.reason).inc()
        log.warning(
            "task put on the dead-letter topic",
            task_id=str(letter.task_id),
            attempt=letter.attempt,
            reason=letter.reason,
            error_class=letter.error_class,
        )

    async def _event(self, event: LifecycleEvent) -> None:
        await deliver(
            lambda: (self._lifecycle.append(event),), what=type(event).__name__, task_id=event.task_id
        )

    def _of(self, lease: Lease) -> dict[str, Any]:
        return self._common(lease.submission, lease.started.attempt, worker=lease.started.worker)

    def _of_replica(self, lease: Lease) -> dict[str, Any]:
        return self._common(lease.submission, lease.started.attempt)

    def _common(
        self, submission: TaskSubmitted, attempt: int, *, worker: str | None = None
    ) -> dict[str, Any]:
        return {
            "task_id": submission.task_id,
            "tenant": submission.tenant,
            "attempt": attempt,
            "worker": self._replica if worker is None else worker,
            "at": self._clock.now_ms(),
            "retain_until": submission.retain_until,
        }


def _lost_quietly(appended: Future[Position]) -> None:
    if not appended.cancelled() and appended.exception() is not None:
        log.debug("progress was lost", error=str(appended.exception()))


def trail_of(lease: Lease) -> Trail:
    """The errors of all attempts so far, as the next one's record carries them."""
    trail = EMPTY
    for past in lease.errors:
        trail = trail.append(
            AttemptError(
                attempt=past.error.attempt,
                at=to_ms(past.error.at),
                worker=past.worker,
                category=past.error.category,
                error_class=past.error.error_class,
                message=past.error.message,
            )
        )
    return trail


def worker_name(worker_id: str) -> str:
    """How a worker's own name is written into events."""
    return head(worker_id, MAX_WORKER_BYTES)
