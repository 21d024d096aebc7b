"""What a listing of tasks asks for, and the cursor that says how far it has searched.

Invariant: a listing goes down the task ids of one tenant, newest first, and each id at most once. A cursor is a place among the ids: everything from
it upwards has been searched, everything below has not. Since ids carry their time, tasks that come in
meanwhile lie above it, and no page of the same listing repeats or skips a task because of them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

from taskline.errors import InvalidCursor
from taskline.schemas.events import Priority
from taskline.schemas.ids import TaskId, created_at_ms
from taskline.state.status import TaskState, TaskStatus
from taskline.state.store import StoredTask

_CURSOR_VERSION = 1
_DIGEST_BYTES = 8
_ID_BYTES = 16
_CURSOR_BYTES = 1 + _DIGEST_BYTES + _ID_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """Which tasks are asked for; None: whatever it is."""

    tenant: str
    status: TaskStatus | None = None
    task_type: str | None = None
    priority: Priority | None = None
    queue: str | None = None
    # Created at this instant or later, ms since the epoch.
    created_after_ms: int | None = None
    # Created earlier than this.
    created_before_ms: int | None = None

    def fits(self, state: TaskState) -> bool:
        """Whether a task is asked for, by its folded state."""
        created = created_at_ms(state.task_id)
        return (
            state.tenant == self.tenant
            and self.status in (None, state.status)
            and self.task_type in (None, state.task_type)
            and self.priority in (None, state.priority)
            and self.queue in (None, state.queue)
            and (self.created_after_ms is None or created >= self.created_after_ms)
            and (self.created_before_ms is None or created < self.created_before_ms)
        )

    def digest(self) -> bytes:
        """Tells filters apart."""
        text = repr(tuple(None if each is None else str(each) for each in astuple(self)))
        return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def first_id(ms: int) -> TaskId:
    """The smallest id that a task created at `ms` or later can have.

    It has the version of one: Cassandra compares UUIDs by their version first.
    """
    return uuid.UUID(int=(max(ms, 0) << 80) | (7 << 76) | (2 << 62))


def write_cursor(wanted: Filter, before: TaskId) -> str:
    """A cursor for the rest of this listing: the ids below `before`."""
    data = bytes([_CURSOR_VERSION]) + wanted.digest() + before.bytes
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def read_cursor(wanted: Filter, cursor: str) -> TaskId:
    """The id below which the listing goes on.

    Raises:
        InvalidCursor: nothing that `write_cursor` gave, or given for another filter.
    """
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        data = base64.b64decode(padded, altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        raise InvalidCursor("the cursor is none that a listing gave") from None
    if len(data) != _CURSOR_BYTES or data[0] != _CURSOR_VERSION:
        raise InvalidCursor("the cursor is none that a listing of this version gave")
    if data[1 : 1 + _DIGEST_BYTES] != wanted.digest():
        raise InvalidCursor("the cursor belongs to a listing with other filters")
    before = uuid.UUID(bytes=data[1 + _DIGEST_BYTES :])
    if before.version != 7 or before.variant != uuid.RFC_4122:
        raise InvalidCursor("the cursor is none that a listing gave")
    return before


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Some ids of one bucket that the store's hints speak for, newest first."""

    ids: Sequence[TaskId]
    # All hints of this id and above were looked at; None: those of the whole bucket.
    searched_to: TaskId | None
    partition_reads: int


class ListingStore(Protocol):
    """What a listing needs of the view's store.

    Hints are what the store keeps beside the events (tenant, status, type, priority, queue). They only choose what is looked at:
    what is shown is folded, and a hint that says too much costs a read.
    """

    @property
    def bucket_ms(self) -> int:
        """The length of a bucket."""
        ...

    async def buckets(self, wanted: Filter, *, newest: int, oldest: int, limit: int) -> Sequence[int]:
        """The buckets from `newest` down to `oldest` in which the tenant may have such tasks, newest first.

        Raises:
            Unavailable: the store does not answer, or not in time.
        """
        ...

    async def slice(self, bucket: int, wanted: Filter, *, before: TaskId, since: TaskId, limit: int) -> Slice:
        """Ids of the bucket, from below `before` down to `since`, whose hints fit; about `limit` of them.

        Raises:
            Unavailable: the store does not answer, or not in time.
        """
        ...

    async def read_many(self, task_ids: Sequence[TaskId]) -> Mapping[TaskId, StoredTask]:
        """What is stored of each of these tasks; those of which nothing is are left out.

        Raises:
            Unavailable: the store does not answer, or not in time.
        """
        ...


def merged(lanes: Sequence[Sequence[TaskId]], asked: int) -> tuple[list[TaskId], TaskId | None]:
    """Slices of a bucket's lanes, each newest first and of at most `asked` ids, as one.

    A lane that gave as many as it was asked for may have more below its last. So the whole is known down to the highest of
    such lasts only; ids below are left for the next look.

    Returns:
        The ids that are known to be next, newest first, and the id down to which that is so (None: all).
    """
    cut = [ids[-1] for ids in lanes if len(ids) >= asked]
    searched_to = max(cut, default=None)
    known = (task_id for ids in lanes for task_id in ids if searched_to is None or task_id >= searched_to)
    return sorted(known, reverse=True), searched_to
