"""What a worker writes about an execution: its start, its end, its dead letter.

Invariant: a coroutine here returns only when what it writes is in the log. A dead letter is acknowledged before the DeadLettered
that announces it, so that whoever reads `dead` finds the task on the dead-letter topic.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Sequence
from typing import Any

import structlog

from taskline.errors import DeliveryError, InvalidResult, Unavailable
from taskline.infra.log import HEADER_TASK_ID, OutRecord, Position, verbatim_dead_letter
from taskline.infra.outbox import after_failure, deliver
from taskline.schemas.events import (
    DeadLetter,
    DeadLettered,
    Failed,
    LifecycleEvent,
    Released,
    Started,
    Succeeded,
    TaskSubmitted,
)
from taskline.workers import metrics
from taskline.workers.admission import Admitted, Rejected
from taskline.workers.execution import Execution
from taskline.workers.outcome import ErrorInfo, describe_error
from taskline.workers.ports import WorkerPorts

log = structlog.get_logger(__name__)

FAILED = "failed"
UNDECODABLE = "undecodable"


class Recorder:
    """Writes under one worker's name."""

    def __init__(self, ports: WorkerPorts, *, worker: str, dlq: str) -> None:
        """`worker` is this process's name, `dlq` the dead-letter topic."""
        self._log = ports.log
        self._lifecycle = ports.lifecycle
        self._codec = ports.codec
        self._clock = ports.clock
        self._worker = worker
        self._dlq = dlq

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

    async def succeeded(self, run: Execution, admitted: Admitted, result: bytes | None) -> None:
        """The handler returned."""
        await self._events(
            Succeeded(**self._common(admitted.submission, admitted.attempt), execution=run.id, result=result)
        )

    async def failed(self, run: Execution, admitted: Admitted, error: BaseException) -> None:
        """The handler did not return a result, and the task is dead."""
        info = describe_error(error)
        log.warning("task failed", error_class=info.error_class, timed_out=run.timed_out, **run.facts())
        failed = Failed(
            **self._common(admitted.submission, admitted.attempt),
            execution=run.id,
            error_class=info.error_class,
            message=info.message,
            traceback=info.traceback,
            # What was returned will be as unrecordable the next time.
            retryable=not isinstance(error, InvalidResult),
        )
        await self._dead_letter(run, admitted.submission, admitted.attempt, FAILED, info)
        await self._events(failed, self._dead_lettered(admitted.submission, admitted.attempt, FAILED))

    async def rejected(self, run: Execution, rejected: Rejected) -> None:
        """No handler here, or no payload for it: the task is dead without having been started."""
        info = describe_error(rejected.error)
        await self._dead_letter(run, rejected.submission, rejected.attempt, rejected.reason, info)
        await self._events(self._dead_lettered(rejected.submission, rejected.attempt, rejected.reason))

    async def undecodable(self, run: Execution, cause: str) -> None:
        """Bytes that are no task: onto the dead-letter topic verbatim, with the cause and the source in headers."""
        record = run.waiting.record
        copy = verbatim_dead_letter(
            self._dlq,
            value=record.value,
            key=record.key,
            headers=record.headers,
            source=record.position,
            cause=cause,
        )
        await deliver(lambda: (self._log.append(copy),), what="undecodable record", task_id=None)
        metrics.DEAD_LETTERS.labels(UNDECODABLE).inc()
        log.warning("undecodable record put on the dead-letter topic", cause=cause, **run.facts())

    def released(self, run: Execution, reason: str) -> Future[Position]:
        """An execution was handed back unfinished; appended once, since a missing Released does no harm."""
        admitted = run.admitted
        assert admitted is not None  # noqa: S101 - only what was started is released
        metrics.tasks(admitted.task.name, "released").inc()
        log.info("task handed back", reason=reason, **run.facts())
        return self._lifecycle.append(
            Released(**self._common(admitted.submission, admitted.attempt), execution=run.id, reason=reason)
        )

    async def _dead_letter(
        self, run: Execution, submission: TaskSubmitted, attempt: int, reason: str, info: ErrorInfo
    ) -> None:
        place = run.position
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
            source_topic=place.topic,
            source_partition=place.partition,
            source_offset=place.offset,
            submission=run.waiting.record.value or b"",
        )
        key = submission.task_id.bytes

        def append() -> Sequence[Future[Position]]:
            value = self._codec.encode(letter)
            record = OutRecord(topic=self._dlq, key=key, value=value, headers={HEADER_TASK_ID: key})
            return (self._log.append(record),)

        await deliver(append, what="dead letter", task_id=submission.task_id)
        metrics.DEAD_LETTERS.labels(reason).inc()
        facts = run.facts() | {"task_id": str(submission.task_id), "attempt": attempt}
        log.warning(
            "task put on the dead-letter topic",
            reason=reason,
            error_class=info.error_class,
            **facts,
        )

    def _dead_lettered(self, submission: TaskSubmitted, attempt: int, reason: str) -> DeadLettered:
        return DeadLettered(**self._common(submission, attempt), reason=reason)

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
