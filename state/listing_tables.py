"""Listings in Cassandra: the index of buckets, the ids of a bucket by their hints, and tasks by the handful.

Invariant: a bucket stands in the index at least as long as a task in it whose hints say that it belongs there. An entry's write timestamp is the instant at which
it expires, so that of several entries the longest-lived stays. Each process writes an entry once, and again only for a task that lives longer.

The ids of a partition are filtered by the server (ALLOW FILTERING *within* a partition, whose size the bucket length bounds):
rows that don't fit cost no work here.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cassandra.query import PreparedStatement

from taskline.schemas.ids import TaskId, bucket_of, lane_of
from taskline.state.listing import Filter
from taskline.state.store import ReplayWrite, SubmissionWrite, TaskWrite

_INSERT_BUCKET = (
    "INSERT INTO {keyspace}.task_buckets (tenant, kind, bucket) VALUES (?, ?, ?) USING TIMESTAMP ? AND TTL ?"
)
_BUCKETS = """
SELECT bucket FROM {keyspace}.task_buckets
WHERE tenant = ? AND kind = ? AND bucket <= ? AND bucket >= ? LIMIT ?
"""
_IDS = """
SELECT task_id FROM {keyspace}.tasks
WHERE bucket = ? AND lane = ? AND task_id < ? AND task_id >= ? AND tenant = ?{hints}
ORDER BY task_id DESC LIMIT ? ALLOW FILTERING
"""
_READ_MANY = """
SELECT task_id, submission, events, dispatched, replayed_as FROM {keyspace}.tasks
WHERE bucket = ? AND lane = ? AND task_id IN ?
"""
_ANY = "any"
# An entry outlives the tasks that it was written for by this, so that tasks which live a little longer need no entry of their own.
SLACK_SECONDS = 86_400
# Entries that a process remembers having written: a few tenants' tasks of months. One that is forgotten is written again.
_MAX_REMEMBERED = 50_000
# Each lane is asked for its share of the page and this many more: usually one look is enough.
_SPARE_IDS = 8

Entry = tuple[str, str, int]


class BucketIndex:
    """The entries that this process has written, and until when they live."""

    def __init__(self) -> None:
        self._written: OrderedDict[Entry, int] = OrderedDict()

    def missing(self, writes: Iterable[TaskWrite], now_ms: int) -> dict[Entry, int]:
        """Entries that these writes need, with their lives in seconds."""
        needed: dict[Entry, int] = {}
        for write in writes:
            if isinstance(write, ReplayWrite):
                continue
            entries = [(write.tenant, write.status.value, write.bucket)]
            if isinstance(write, SubmissionWrite):
                entries.append((write.tenant, _ANY, write.bucket))
            for entry in entries:
                until_ms = now_ms + write.ttl_seconds * 1000
                if self._written.get(entry, 0) < until_ms:
                    needed[entry] = max(needed.get(entry, 0), write.ttl_seconds + SLACK_SECONDS)
        return needed

    def remember(self, entries: dict[Entry, int], now_ms: int) -> None:
        """They are stored."""
        for entry, ttl_seconds in entries.items():
            self._written[entry] = now_ms + ttl_seconds * 1000
            self._written.move_to_end(entry)
        while len(self._written) > _MAX_REMEMBERED:
            self._written.popitem(last=False)


class ListingTables:
    """The prepared statements and what they mean; sending them is the store's."""

    def __init__(self, prepare: Callable[[str], PreparedStatement], *, lanes: int, bucket_ms: int) -> None:
        """Prepare; `prepare` fills in the keyspace."""
        self._prepare = prepare
        self._lanes = lanes
        self._bucket_ms = bucket_ms
        self._insert_bucket = prepare(_INSERT_BUCKET)
        self._buckets = prepare(_BUCKETS)
        self._read_many = prepare(_READ_MANY)
        # One for each choice of hints, prepared when it is first asked for.
        self._ids: dict[tuple[str, ...], PreparedStatement] = {}

    def insert(self, entry: Entry, ttl_seconds: int, now_ms: int) -> Any:  # noqa: ANN401 - the driver is untyped
        """The statement that writes an entry of the index."""
        return self._insert_bucket.bind((*entry, (now_ms + ttl_seconds * 1000) * 1000, ttl_seconds))

    def select_buckets(self, wanted: Filter, *, newest: int, oldest: int, limit: int) -> Any:  # noqa: ANN401
        """The index, from `newest` down: one column."""
        kind = _ANY if wanted.status is None else wanted.status.value
        return self._buckets.bind((wanted.tenant, kind, newest, oldest, limit))

    def knows(self, wanted: Filter) -> bool:
        """Whether `select_ids` can be called without waiting for the server."""
        return tuple(_hints(wanted)) in self._ids

    def learn(self, wanted: Filter) -> None:
        """Prepare the statement for these hints; blocks."""
        hints = tuple(_hints(wanted))
        if hints not in self._ids:
            query = _IDS.replace("{hints}", "".join(f" AND {name} = ?" for name in hints))
            self._ids[hints] = self._prepare(query)

    def select_ids(
        self, bucket: int, wanted: Filter, *, before: TaskId, since: TaskId, limit: int
    ) -> tuple[list[Any], int]:
        """The statements for each lane of a bucket, and how many ids each asks for."""
        hints = _hints(wanted)
        statement = self._ids[tuple(hints)]
        asked = min(limit, 2 * limit // self._lanes + _SPARE_IDS)
        bound = [
            statement.bind((bucket, lane, before, since, wanted.tenant, *hints.values(), asked))
            for lane in range(self._lanes)
        ]
        return bound, asked

    def select_tasks(self, task_ids: Sequence[TaskId]) -> Iterator[Any]:
        """Statements for whole tasks, one for each partition."""
        by_partition: defaultdict[tuple[int, int], list[TaskId]] = defaultdict(list)
        for task_id in task_ids:
            place = (bucket_of(task_id, self._bucket_ms), lane_of(task_id, self._lanes))
            by_partition[place].append(task_id)
        for (bucket, lane), members in by_partition.items():
            yield self._read_many.bind((bucket, lane, members))


def _hints(wanted: Filter) -> dict[str, str]:
    """The columns that can be compared, besides the tenant."""
    found: dict[str, str | None] = {
        "status": wanted.status,
        "task_type": wanted.task_type,
        "priority": wanted.priority,
        "queue": wanted.queue,
    }
    return {name: str(value) for name, value in found.items() if value is not None}
