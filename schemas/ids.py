"""Task ids, lanes and time buckets: all that can be known of a task from its id alone.

A task id is a UUIDv7 minted by Taskline, so it carries its creation time (ms, the task's `created_at`) and sorts by
it. Its random tail chooses its *lane*: the lifecycle partition that holds all its events. Its time chooses
the *bucket*: with the lane, the view's partition.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

from uuid_utils.compat import uuid7

from taskline.errors import InvalidTaskId

TaskId = uuid.UUID

_NANOS_PER_MS = 1_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
# An id from a machine whose clock is ahead by more than this is refused, so that nobody can fill future buckets.
MAX_CLOCK_AHEAD_MS = 300_000


def new_task_id(now_ms: int) -> TaskId:
    """Mint the id of a task created at `now_ms` (ms since the epoch, UTC)."""
    return uuid7(nanoseconds=now_ms * _NANOS_PER_MS)


def task_id_of(data: bytes) -> TaskId:
    """The id of 16 big-endian bytes.

    As `uuid.UUID(bytes=data)`, whose checks of five kinds of arguments cost four times as much: every record has ids.

    Raises:
        ValueError: not 16 bytes.
    """
    if len(data) != _ID_BYTES:
        raise ValueError(f"{len(data)} bytes are no id")
    task_id = _new_uuid(uuid.UUID)
    _set_attribute(task_id, "int", int.from_bytes(data, "big"))
    _set_attribute(task_id, "is_safe", uuid.SafeUUID.unknown)
    return task_id


_ID_BYTES = 16
_new_uuid = uuid.UUID.__new__
# UUIDs refuse assignment.
_set_attribute = object.__setattr__


def created_at_ms(task_id: TaskId) -> int:
    """When the task was created, in ms since the epoch (RFC 9562 §5.7: the first 48 bits)."""
    return task_id.int >> 80


def lane_of(task_id: TaskId, lanes: int) -> int:
    """The lifecycle partition of a task: its id's random tail modulo the number of lanes."""
    return (task_id.int & 0xFFFF_FFFF) % lanes


def bucket_of(task_id: TaskId, bucket_ms: int) -> int:
    """The number of the view's time bucket that holds the task."""
    return created_at_ms(task_id) // bucket_ms


def parse_task_id(text: str, now_ms: int) -> TaskId:
    """Read an id from outside.

    Raises:
        InvalidTaskId: not a canonical UUIDv7, or from further in the future than clocks may differ.
    """
    try:
        task_id = uuid.UUID(text)
    except ValueError as error:
        raise InvalidTaskId(f"{text[:64]!r} is not a task id") from error
    if task_id.version != 7 or task_id.variant != uuid.RFC_4122 or str(task_id) != text.lower():
        raise InvalidTaskId(f"{text[:64]!r} is not a task id (a UUIDv7 in its usual form)")
    if created_at_ms(task_id) > now_ms + MAX_CLOCK_AHEAD_MS:
        raise InvalidTaskId(f"{text!r} lies in the future")
    return task_id


def from_ms(ms: int) -> datetime:
    """An instant in ms since the epoch, as an aware datetime in UTC.

    Raises:
        OverflowError: outside the years 1 to 9999.
    """
    # Not fromtimestamp(ms / 1000): a float is off by microseconds.
    return _EPOCH + timedelta(milliseconds=ms)


def to_ms(instant: datetime) -> int:
    """An aware datetime as whole ms since the epoch.

    Raises:
        ValueError: the datetime is naive.
    """
    if instant.tzinfo is None:
        raise ValueError("a naive datetime has no instant: give it a timezone")
    return round((instant - _EPOCH) / _MILLISECOND)
