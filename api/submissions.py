"""Tasks into the log on behalf of HTTP callers.

Invariant: a submission is reported as accepted only once the broker has acknowledged it, as refused only when it is certainly
not in the log, and otherwise as unknown, with the id under which it may turn up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog

from taskline.api.models import TaskSubmission
from taskline.api.problems import DELIVERY_UNKNOWN, NOT_ACCEPTED, ProblemError
from taskline.errors import DeliveryFailed, DeliveryUnknown, ProducerClosed, QueueFull
from taskline.infra.log import AsyncLog
from taskline.infra.role import Clock
from taskline.infra.topics import Topics
from taskline.producers.submission import SubmitOptions, build_submission, dispatch_record
from taskline.schemas.codec import Codec
from taskline.schemas.events import TaskSubmitted
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


class Submissions:
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

    async def submit(
        self, request: TaskSubmission, *, tenant: str, traceparent: str | None = None
    ) -> TaskSubmitted:
        """Returns once the broker has acknowledged the task.

        Raises:
            InvalidRequest: the submission is wrong (its subclasses say how); nothing was produced.
            ProblemError: not accepted, or not known to be.
        """
        task_type = self._types.get(request.task_type)
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
            task_type, request.payload, options, now_ms=self._clock.now_ms(), settings=self._producer
        )
        record = dispatch_record(
            submission, self._topics, self._codec, max_record_bytes=self._max_record_bytes
        )
        task_id = str(submission.task_id)
        try:
            async with asyncio.timeout(self._patience):
                await self._log.append(record)
        except (DeliveryUnknown, TimeoutError) as error:
            log.warning("delivery unknown", task_id=task_id, topic=record.topic, error=str(error))
            raise ProblemError(
                DELIVERY_UNKNOWN,
                f"Kafka did not acknowledge task {task_id} in time; it may run all the same: look it up before submitting again",
                members={"task_id": task_id},
                headers={"retry-after": _RETRY_AFTER_UNKNOWN_SECONDS},
            ) from error
        except (QueueFull, DeliveryFailed, ProducerClosed) as error:
            log.warning("not accepted", task_id=task_id, topic=record.topic, error=str(error))
            raise ProblemError(
                NOT_ACCEPTED,
                f"the task was not accepted: {_WORDS[type(error)]}",
                headers={"retry-after": _RETRY_AFTER_REFUSED_SECONDS},
            ) from error
        return submission


# For the caller; the log has the error's own words, which name topics and servers.
_WORDS = {
    QueueFull: "too many tasks wait for Kafka's acknowledgement",
    DeliveryFailed: "Kafka refused it",
    ProducerClosed: "this process is stopping",
}
