"""From a caller's words to a dispatch record: pure, so that every way to submit (library, HTTP, command line) agrees.

Everything that can be wrong with a submission is found here, before anything is produced.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

from taskline.errors import InvalidOption, PayloadTooLarge, did_you_mean, nearest
from taskline.infra.log import HEADER_DUE, HEADER_TARGET, HEADER_TASK_ID, OutRecord, Position
from taskline.infra.tiers import MAX_DELAY_SECONDS, MIN_DELAY_SECONDS
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
_SECOND_MS = 1_000
_EPOCH = from_ms(0)
# 1.1 * 1000 is a little more than 1,100, and is meant to be just that.
_FLOAT_NOISE_DIGITS = 6
_DAY_MS = 86_400_000
MAX_DELAY_DAYS: Final = MAX_DELAY_SECONDS // 86_400


class OptionFields(TypedDict, total=False):
    """The fields of `SubmitOptions`, as keyword arguments of `submit`."""

    priority: Priority | str | None
    timeout_seconds: float | None
    max_retries: int | None
    tenant: str
    affinity_key: str | None
    delay: float | timedelta | None
    not_before: datetime | None
    start_by: datetime | None
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
    # Not started earlier: so long from now (seconds, or a timedelta: 0.1 s to 365 days), or at an instant (aware; one in the
    # past means at once). One of the two.
    delay: float | timedelta | None = None
    not_before: datetime | None = None
    # Not worth starting later (aware): then it ends as expired. Retries, too, start before this or not at all.
    start_by: datetime | None = None
    # How long the task stays readable after it is due; at most producer.task_retention_days.
    retain_days: float | None = None
    # W3C trace context of the submitter; a malformed one is ignored, as that standard asks. None: that of OpenTelemetry's current span, if there is one
    # (producers only).
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
    # scheduled: it must not start yet.
    status: Literal["pending", "scheduled"] = "pending"

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
    task_id: TaskId | None = None,
) -> TaskSubmitted:
    """Check and encode a submission, and mint its id.

    Args:
        task_type: what is to be done, with its defaults.
        payload: the handler's argument.
        options: what the submitter wants otherwise.
        now_ms: the creation time.
        settings: size limit and retention.
        task_id: its id, minted at `now_ms`; None: a new one.

    Raises:
        InvalidOption: an option has an impossible value.
        InvalidPayload: the payload is off its schema.
        PayloadTooLarge: it is over producer.max_payload_bytes encoded.
    """
    due_ms: int | None = None
    start_by_ms: int | None = None
    if options is not DEFAULT_OPTIONS:
        _check(options, settings)
        due_ms = _due(options, now_ms)
        start_by_ms = _start_by(options, now_ms, due_ms)
    encoded, fingerprint = task_type.encode(payload)
    if len(encoded) > settings.max_payload_bytes:
        raise PayloadTooLarge(len(encoded), settings.max_payload_bytes)
    if task_id is None:
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
        not_before=due_ms,
        start_by=start_by_ms,
        retain_until=max(now_ms, due_ms or 0) + round(retain_days * _DAY_MS),
        timeout_ms=None if options.timeout_seconds is None else max(1, round(options.timeout_seconds * 1000)),
        max_retries=task_type.max_retries if options.max_retries is None else options.max_retries,
        affinity_key=options.affinity_key,
        root_id=task_id,
        traceparent=_well_formed(options.traceparent),
    )


def dispatch_record(
    submission: TaskSubmitted, topics: Topics, codec: Codec, *, max_record_bytes: int
) -> OutRecord:
    """The record that workers consume; one that is not due goes to the scheduled ones, and reaches its topic later.

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
    target = topics.dispatch(submission.queue, submission.priority)
    if not submission.delayed:
        return OutRecord(topic=target, key=key, value=value, headers={HEADER_TASK_ID: task_id})
    headers = {
        HEADER_TASK_ID: task_id,
        HEADER_DUE: b"%d" % (submission.not_before or 0),
        HEADER_TARGET: target.encode(),
    }
    return OutRecord(topic=topics.scheduled, key=key, value=value, headers=headers)


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


def _due(options: SubmitOptions, now_ms: int) -> int | None:
    """The instant before which the task must not start."""
    delay, not_before = options.delay, options.not_before
    if delay is None and not_before is None:
        return None
    if delay is None:
        due = _instant("not_before", not_before)
        if due > now_ms + MAX_DELAY_SECONDS * _SECOND_MS:
            raise InvalidOption("not_before", f"lies more than {MAX_DELAY_DAYS} days ahead")
        return due
    if not_before is not None:
        raise InvalidOption("delay", "says a second time when the task may start")
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not (seconds == 0 or MIN_DELAY_SECONDS <= seconds <= MAX_DELAY_SECONDS)
    ):
        raise InvalidOption(
            "delay", f"{delay!r} is neither 0 nor from {MIN_DELAY_SECONDS:g} s to {MAX_DELAY_DAYS} days"
        )
    # Upwards: a task is never early.
    return now_ms + math.ceil(round(seconds * _SECOND_MS, _FLOAT_NOISE_DIGITS)) if seconds else None


def _start_by(options: SubmitOptions, now_ms: int, due_ms: int | None) -> int | None:
    if options.start_by is None:
        return None
    start_by = _instant("start_by", options.start_by)
    if start_by <= now_ms:
        raise InvalidOption("start_by", "has passed already")
    if due_ms is not None and start_by < due_ms:
        raise InvalidOption("start_by", "lies before the instant at which the task may start")
    return start_by


def _instant(option: str, value: object) -> int:
    """Whole ms since the epoch, upwards."""
    if not isinstance(value, datetime):
        raise InvalidOption(option, f"a {type(value).__name__} is no datetime")
    if value.tzinfo is None:
        raise InvalidOption(option, "has no time zone: give an aware datetime")
    # In whole numbers, since a float has not the digits; -(-a // b) rounds up.
    return -((_EPOCH - value) // timedelta(milliseconds=1))


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
