"""From a caller's words to a dispatch record: pure, so that every way to submit (library, HTTP, command line) agrees.

Everything that can be wrong with a submission is found here, before anything is produced.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

from taskline.errors import InvalidOption, PayloadTooLarge, did_you_mean, nearest
from taskline.infra.log import HEADER_TASK_ID, OutRecord, Position
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import Priority, TaskSubmitted
from taskline.schemas.ids import TaskId, created_at_ms, from_ms, new_task_id
from taskline.schemas.types import MAX_RETRIES, MAX_TIMEOUT_MS
from taskline.settings import ProducerSettings

if TYPE_CHECKING:
    from taskline.schemas.types import TaskType

# Tenants and keys are in every event of a task, in headers and in table keys.
MAX_NAME_CHARS: Final = 200
# A time-out beyond this is a mistake of units (it is the longest delay that Taskline knows).
MAX_TIMEOUT_SECONDS: Final = MAX_TIMEOUT_MS // 1000
# Left free in a dispatch record for what is added when it is dispatched again: headers, the attempt, Kafka's own framing.
RECORD_ROOM_BYTES: Final = 4_096
# version-traceid-parentid-flags
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_DAY_MS = 86_400_000


class OptionFields(TypedDict, total=False):
    """The fields of `SubmitOptions`, as keyword arguments of `submit`."""

    priority: Priority | str | None
    timeout_seconds: float | None
    max_retries: int | None
    tenant: str
    affinity_key: str | None
    retain_days: float | None
    traceparent: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitOptions:
    """How one task is to be treated. None: as its task type, or the settings, say."""

    priority: Priority | str | None = None
    # How long one execution of the handler may take.
    timeout_seconds: float | None = None
    # How many attempts may follow the first: 0 to 100.
    max_retries: int | None = None
    # Who the task belongs to; nobody else can see it.
    tenant: str = "default"
    # Tasks with one key go to one partition, so to one worker while its assignment lasts.
    affinity_key: str | None = None
    # How long the task stays readable; at most producer.task_retention_days.
    retain_days: float | None = None
    # W3C trace context of the submitter; a malformed one is ignored, as that standard asks.
    traceparent: str | None = None


DEFAULT_OPTIONS: Final = SubmitOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission(SubmitOptions):
    """One item for `submit_many`: what is to be done, and the options beside it."""

    task_type: str
    payload: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskHandle:
    """A task that is in the log."""

    task_id: TaskId
    # Where its dispatch record stands.
    position: Position
    status: Literal["pending"] = "pending"

    @property
    def created_at(self) -> datetime:
        """When the task was created (aware, UTC): its id says it."""
        return from_ms(created_at_ms(self.task_id))


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFailure:
    """An item of `submit_many` that was not, or not certainly, accepted."""

    # The item's place in the input, from 0.
    index: int
    # InvalidRequest: the item is wrong. DeliveryError: as its class says.
    error: Exception
    # The id that the task has if it is in the log after all (DeliveryUnknown); None: refused before it had one.
    task_id: TaskId | None = None


def build_submission(
    task_type: TaskType,
    payload: Any,  # noqa: ANN401 - whatever the type's schema takes
    options: SubmitOptions,
    *,
    now_ms: int,
    settings: ProducerSettings,
) -> TaskSubmitted:
    """Check and encode a submission, and mint its id.

    Args:
        task_type: what is to be done, with its defaults.
        payload: the handler's argument.
        options: what the submitter wants otherwise.
        now_ms: the creation time.
        settings: size limit and retention.

    Raises:
        InvalidOption: an option has an impossible value.
        InvalidPayload: the payload is off its schema.
        PayloadTooLarge: it is over producer.max_payload_bytes encoded.
    """
    if options is not DEFAULT_OPTIONS:
        _check(options, settings)
    encoded, fingerprint = task_type.encode(payload)
    if len(encoded) > settings.max_payload_bytes:
        raise PayloadTooLarge(len(encoded), settings.max_payload_bytes)
    task_id = new_task_id(now_ms)
    retain_days = settings.task_retention_days if options.retain_days is None else options.retain_days
    return TaskSubmitted(
        task_id=task_id,
        tenant=options.tenant,
        task_type=task_type.name,
        queue=task_type.queue,
        priority=task_type.priority if options.priority is None else priority_of(options.priority),
        payload=encoded,
        payload_fingerprint=fingerprint,
        retain_until=now_ms + round(retain_days * _DAY_MS),
        timeout_ms=None if options.timeout_seconds is None else max(1, round(options.timeout_seconds * 1000)),
        max_retries=task_type.max_retries if options.max_retries is None else options.max_retries,
        affinity_key=options.affinity_key,
        root_id=task_id,
        traceparent=_well_formed(options.traceparent),
    )


def dispatch_record(
    submission: TaskSubmitted, topics: Topics, codec: Codec, *, max_record_bytes: int
) -> OutRecord:
    """The record that workers consume.

    Args:
        submission: the task.
        topics: names the dispatch topics.
        codec: encodes it.
        max_record_bytes: as topics.max_record_bytes.

    Raises:
        PayloadTooLarge: with all its fields the record would not fit the topic, now or when it is dispatched again.
    """
    task_id = submission.task_id.bytes
    key = task_id if submission.affinity_key is None else submission.affinity_key.encode()
    value = codec.encode(submission)
    limit = max_record_bytes - RECORD_ROOM_BYTES
    if len(value) + len(key) > limit:
        raise PayloadTooLarge(len(value) + len(key), limit)
    return OutRecord(
        topic=topics.dispatch(submission.queue, submission.priority),
        key=key,
        value=value,
        headers={HEADER_TASK_ID: task_id},
    )


def priority_of(value: Priority | str) -> Priority:
    """A priority from its name.

    Raises:
        InvalidOption: there is none of that name.
    """
    try:
        return Priority(value)
    except ValueError:
        names = [each.value for each in Priority]
        hint = did_you_mean(nearest(str(value), names))
        raise InvalidOption("priority", f"{value!r} is none of {', '.join(names)}{hint}") from None


def _check(options: SubmitOptions, settings: ProducerSettings) -> None:
    _check_name("tenant", options.tenant)
    if options.affinity_key is not None:
        _check_name("affinity_key", options.affinity_key)
    if options.traceparent is not None and not isinstance(options.traceparent, str):
        raise InvalidOption("traceparent", f"a {type(options.traceparent).__name__} is not text")
    if options.timeout_seconds is not None:
        _check_number("timeout_seconds", options.timeout_seconds, MAX_TIMEOUT_SECONDS)
    if options.retain_days is not None:
        _check_number("retain_days", options.retain_days, settings.task_retention_days)
    retries = options.max_retries
    if retries is not None and (
        isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= MAX_RETRIES
    ):
        raise InvalidOption("max_retries", f"{retries!r} is not a whole number from 0 to {MAX_RETRIES}")


def _check_name(option: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidOption(option, f"a {type(value).__name__} is not text")
    if not 1 <= len(value) <= MAX_NAME_CHARS:
        raise InvalidOption(option, f"has {len(value)} characters; 1 to {MAX_NAME_CHARS} are allowed")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidOption(option, "has a lone surrogate, which no encoding can carry") from None


def _check_number(option: str, value: object, most: float) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not 0 < value <= most
    ):
        raise InvalidOption(option, f"{value!r} is not a number above 0 and at most {most:g}")


def _well_formed(traceparent: str | None) -> str | None:
    """The trace context if it has the shape that W3C Trace Context gives it, else None."""
    return traceparent if traceparent is not None and _TRACEPARENT.fullmatch(traceparent) else None
