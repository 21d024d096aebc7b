"""Submissions as records in the log, with what a caller is told when the log does not take one.

Invariant: a submission is reported as accepted only once the broker has acknowledged it, as refused only when it is certainly
not in the log, and otherwise as unknown, with the id under which it may turn up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from taskline.api.models import TaskSubmission
from taskline.api.problems import DELIVERY_UNKNOWN, NOT_ACCEPTED, ProblemError
from taskline.errors import DeliveryFailed, DeliveryUnknown, ProducerClosed, QueueFull
from taskline.infra.log import AsyncLog, OutRecord, Position
from taskline.infra.role import Clock
from taskline.infra.topics import Topics
from taskline.producers.submission import SubmitOptions, build_submission, dispatch_record
from taskline.schemas.codec import Codec
from taskline.schemas.events import TaskSubmitted
from taskline.schemas.ids import TaskId, created_at_ms, new_task_id
from taskline.schemas.types import TaskType
from taskline.settings import Settings

log = structlog.get_logger(__name__)

# A full buffer drains within a second or not for a while.
_RETRY_AFTER_REFUSED_SECONDS = "2"
# By then the outcome of what was unknown is in the view, if the servers are back.
_RETRY_AFTER_UNKNOWN_SECONDS = "10"


class TaskTypes(Protocol):
    """The registered task types: a `TypeCatalogue`, or the wiring's view of a `TypeDirectory`."""

    def get(self, name: str) -> TaskType:
        """The task type of this name.

        Raises:
            UnknownTaskType: there is none.
            ProblemError: the types have not been read yet.
        """
        ...

    def names(self) -> Sequence[str]:
        """Every name; raises as `get`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A submission that is right, and its record; nothing is produced yet."""

    submission: TaskSubmitted
    record: OutRecord


class Appending:
    """Checks, encodes and appends submissions."""

    def __init__(
        self, log: AsyncLog, types: TaskTypes, codec: Codec, settings: Settings, *, clock: Clock
    ) -> None:
        """Append to `log`; `settings` give the topics' names, the limits, and how long to wait (api.request_timeout_seconds)."""
        self._log = log
        self._types = types
        self._codec = codec
        self._topics = Topics(namespace=settings.kafka.namespace)
        self._producer = settings.producer
        self._max_record_bytes = settings.topics.max_record_bytes
        self._patience = settings.api.request_timeout_seconds
        self._clock = clock

    def new_id(self) -> TaskId:
        """The id of a task that is created now."""
        return new_task_id(self._clock.now_ms())

    def draft(
        self, request: TaskSubmission, *, tenant: str, traceparent: str | None, task_id: TaskId | None = None
    ) -> Draft:
        """Check and encode a submission.

        Args:
            request: what is asked for.
            tenant: whose task it is.
            traceparent: the caller's trace context.
            task_id: its id, which says when it was created; None: a new one's, now.

        Raises:
            InvalidRequest: the submission is wrong (its subclasses say how).
            ProblemError: the task types are not known yet.
        """
        options = SubmitOptions(
            priority=request.priority,
            timeout_seconds=request.timeout_seconds,
            max_retries=request.max_retries,
            tenant=tenant,
            affinity_key=request.affinity_key,
            delay=request.delay_seconds,
            not_before=request.scheduled_at,
            start_by=request.start_by,
            traceparent=traceparent,
        )
        submission = build_submission(
            self._types.get(request.task_type),
            request.payload,
            options,
            now_ms=self._clock.now_ms() if task_id is None else created_at_ms(task_id),
            settings=self._producer,
            task_id=task_id,
        )
        if request.idempotency_key is not None:
            submission = replace(submission, idempotency_key=request.idempotency_key)
        record = dispatch_record(
            submission, self._topics, self._codec, max_record_bytes=self._max_record_bytes
        )
        return Draft(submission=submission, record=record)

    async def append(self, draft: Draft) -> None:
        """Append it, and return once the broker has acknowledged it.

        Raises:
            ProblemError: not accepted, or not known to be.
        """
        try:
            async with asyncio.timeout(self._patience):
                await self._log.append(draft.record)
        except (*_KNOWN_ERRORS, TimeoutError) as error:
            raise _problem(draft, error) from error

    async def append_all(self, drafts: Sequence[Draft]) -> list[ProblemError | None]:
        """Hand all of them to the log, then wait for the acknowledgements; what `append` would raise, of each."""
        handed = [self._log.append(draft.record) for draft in drafts]
        if handed:
            await asyncio.wait(handed, timeout=self._patience)
        return [_outcome(draft, future) for draft, future in zip(drafts, handed, strict=True)]


def _outcome(draft: Draft, future: asyncio.Future[Position]) -> ProblemError | None:
    if not future.done():
        future.cancel()
        return _problem(draft, TimeoutError())
    error = future.exception()
    if error is None:
        return None
    if isinstance(error, _KNOWN_ERRORS):
        return _problem(draft, error)
    raise error


def _problem(draft: Draft, error: BaseException) -> ProblemError:
    task_id = str(draft.submission.task_id)
    words = _WORDS.get(type(error))
    if words is not None:
        log.warning("not accepted", task_id=task_id, topic=draft.record.topic, error=str(error))
        return ProblemError(
            NOT_ACCEPTED,
            f"the task was not accepted: {words}",
            headers={"retry-after": _RETRY_AFTER_REFUSED_SECONDS},
        )
    log.warning("delivery unknown", task_id=task_id, topic=draft.record.topic, error=str(error))
    advice = (
        "look it up before submitting again"
        if draft.submission.idempotency_key is None
        else "with the same idempotency key it is safe to submit it again"
    )
    return ProblemError(
        DELIVERY_UNKNOWN,
        f"Kafka did not acknowledge task {task_id} in time; it may run all the same: {advice}",
        members={"task_id": task_id},
        headers={"retry-after": _RETRY_AFTER_UNKNOWN_SECONDS},
    )


# For the caller; the log has the error's own words, which name topics and servers.
_WORDS: dict[type[BaseException], str] = {
    QueueFull: "too many tasks wait for Kafka's acknowledgement",
    DeliveryFailed: "Kafka refused it",
    ProducerClosed: "this process is stopping",
}
_KNOWN_ERRORS = (DeliveryUnknown, QueueFull, DeliveryFailed, ProducerClosed)
