"""The view in Cassandra: one row per task, `((bucket, lane), task_id)`, its events in a map by sequence number.

Invariant: every statement is idempotent and commutes with every other. Events are *added* to the map (an
overwrite would write a tombstone), with write timestamps that follow the lane (`Write.timestamp_us`); nothing is deleted, nothing is
null, nothing is conditional. So a write may be sent again after any failure, by anybody, at any time.

A write is acknowledged by a local quorum and a read asks one, so that reads never go back. What an acknowledgement is worth is the
server's `commitlog_sync`: under `periodic` (its default) a node that is killed gives up what it acknowledged since its last
sync marker, up to 100 ms (CASSANDRA-13987), and a power cut up to the sync period. With one replica such rows are gone from
the view although their offsets are committed; with three it takes two nodes at once. The log still has them. Writes of one
partition share UNLOGGED batches, which the server applies as one mutation (its batch-size thresholds are
about batches of several).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import structlog
from cassandra import InvalidRequest
from cassandra.cluster import Cluster, Session
from cassandra.query import BatchStatement, BatchType, PreparedStatement

from taskline.errors import WrongTopology
from taskline.schemas.ids import TaskId, bucket_of, lane_of
from taskline.settings import Settings
from taskline.state.fold import NO_MARKS, Marks
from taskline.state.session import TRANSIENT, Requests, connect, in_thread, open_cluster, unavailable
from taskline.state.store import EventsWrite, ReplayWrite, StoredTask, SubmissionWrite, Write

log = structlog.get_logger(__name__)

MIGRATE_COMMAND = "taskline view migrate"

_INSERT_SUBMISSION = """
INSERT INTO {keyspace}.tasks (bucket, lane, task_id, submission, status, task_type, priority, tenant)
VALUES (?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP ? AND TTL ?
"""
_INSERT_DISPATCHED = """
INSERT INTO {keyspace}.tasks
    (bucket, lane, task_id, submission, status, task_type, priority, tenant, dispatched)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, true) USING TIMESTAMP ? AND TTL ?
"""
_MARK_REPLAYED = """
UPDATE {keyspace}.tasks USING TIMESTAMP ? AND TTL ? SET replayed_as = ?
WHERE bucket = ? AND lane = ? AND task_id = ?
"""
_ADD_EVENTS = """
UPDATE {keyspace}.tasks USING TIMESTAMP ? AND TTL ? SET events = events + ?, status = ?
WHERE bucket = ? AND lane = ? AND task_id = ?
"""
_READ = """
SELECT submission, events, dispatched, replayed_as FROM {keyspace}.tasks
WHERE bucket = ? AND lane = ? AND task_id = ?
"""

# Bytes of a statement besides its blobs: keys, hints, timestamps, framing. For sizing batches only.
_STATEMENT_OVERHEAD_BYTES = 120
# Per event in the map: key and lengths.
_EVENT_OVERHEAD_BYTES = 16
# The protocol counts a batch's statements in 16 bits; long before that a batch holds up the partition's other readers.
_MAX_BATCH_STATEMENTS = 500


class CassandraStore:
    """The `ViewStore` of the real system. Make it with `connect`, inside the loop that uses it."""

    def __init__(self, cluster: Cluster, session: Session, settings: Settings) -> None:
        """Prepare the statements; blocks (see `connect`).

        Raises:
            WrongTopology: the keyspace or its tables are missing.
        """
        self._cluster = cluster
        self._lanes = settings.topics.lanes
        self._bucket_ms = settings.cassandra.bucket_seconds * 1000
        self._max_batch_bytes = settings.projector.max_batch_bytes
        self._write_concurrency = settings.projector.write_concurrency
        self._session = session
        self._insert_submission = _prepare(session, _INSERT_SUBMISSION, settings.cassandra.keyspace)
        self._insert_dispatched = _prepare(session, _INSERT_DISPATCHED, settings.cassandra.keyspace)
        self._mark_replayed = _prepare(session, _MARK_REPLAYED, settings.cassandra.keyspace)
        self._add_events = _prepare(session, _ADD_EVENTS, settings.cassandra.keyspace)
        self._read = _prepare(session, _READ, settings.cassandra.keyspace)
        self._requests: Requests | None = None

    @classmethod
    async def connect(cls, settings: Settings) -> CassandraStore:
        """Connect and prepare.

        Raises:
            Unavailable: Cassandra does not answer.
            WrongTopology: the keyspace or its tables are missing.
        """

        def blocking() -> CassandraStore:
            cluster = open_cluster(settings.cassandra)
            try:
                return cls(cluster, connect(cluster), settings)
            except TRANSIENT as error:
                cluster.shutdown()
                raise unavailable(error) from error
            except BaseException:
                cluster.shutdown()
                raise

        store: CassandraStore = await in_thread(blocking)
        store._requests = Requests(store._session)
        return store

    async def close(self) -> None:
        """Close the connections; requests in flight fail."""
        await in_thread(self._cluster.shutdown)

    async def apply(self, writes: Sequence[Write]) -> None:
        """Store all writes, `write_concurrency` batches at a time.

        Raises:
            Unavailable: a batch was not acknowledged; the others may be stored.
        """
        execute = self._ensure_requests().execute
        in_flight: set[asyncio.Future[Sequence[tuple[Any, ...]]]] = set()
        failures: list[BaseException] = []
        try:
            for statement in self._statements(writes):
                if len(in_flight) >= self._write_concurrency:
                    in_flight = await _some(in_flight, failures)
                if failures:
                    break
                in_flight.add(execute(statement))
            # After a failure, too: the caller tries all again, and should not meet its own writes still on their way.
            while in_flight:
                in_flight = await _some(in_flight, failures)
        except asyncio.CancelledError:
            for request in in_flight:
                request.cancel()
            raise
        for error in failures:
            if not isinstance(error, TRANSIENT):
                raise error
        if failures:
            raise unavailable(failures[0]) from failures[0]

    async def read(self, task_id: TaskId) -> StoredTask | None:
        """What is stored of the task: one read of one partition.

        Raises:
            Unavailable: Cassandra does not answer in time.
        """
        lane, bucket = lane_of(task_id, self._lanes), bucket_of(task_id, self._bucket_ms)
        statement = self._read.bind((bucket, lane, task_id))
        try:
            rows = await self._ensure_requests().execute(statement)
        except TRANSIENT as error:
            raise unavailable(error) from error
        for submission, events, dispatched, replayed_as in rows:
            return StoredTask(
                submission=submission,
                events=dict(events.items()) if events else {},
                marks=Marks(dispatched=bool(dispatched), replayed_as=replayed_as)
                if dispatched or replayed_as
                else NO_MARKS,
            )
        return None

    async def ping(self) -> None:
        """Return if the view's table answers.

        Raises:
            Unavailable: it does not.
        """
        await self.read(TaskId(int=0))

    def _ensure_requests(self) -> Requests:
        if self._requests is None:
            self._requests = Requests(self._session)
        return self._requests

    def _statements(self, writes: Sequence[Write]) -> Iterator[Any]:
        """The writes as batches of one partition each, bounded by bytes and count; a lone write goes bare."""
        partitions: dict[tuple[int, int], list[Write]] = {}
        for write in writes:
            partitions.setdefault((write.bucket, write.lane), []).append(write)
        for members in partitions.values():
            batch: list[Any] = []
            size = 0
            for write in members:
                bound, cost = self._bind(write)
                if batch and (size + cost > self._max_batch_bytes or len(batch) >= _MAX_BATCH_STATEMENTS):
                    yield _batch(batch)
                    batch, size = [], 0
                batch.append(bound)
                size += cost
            yield _batch(batch)

    def _bind(self, write: Write) -> tuple[Any, int]:
        """The bound statement of one write and about how many bytes it sends."""
        if isinstance(write, SubmissionWrite):
            insert = self._insert_dispatched if write.dispatched else self._insert_submission
            bound = insert.bind(
                (
                    write.bucket,
                    write.lane,
                    write.task_id,
                    write.submission,
                    write.status.value,
                    write.task_type,
                    write.priority.value,
                    write.tenant,
                    write.timestamp_us,
                    write.ttl_seconds,
                )
            )
            return bound, len(write.submission) + _STATEMENT_OVERHEAD_BYTES
        if isinstance(write, ReplayWrite):
            bound = self._mark_replayed.bind(
                (
                    write.timestamp_us,
                    write.ttl_seconds,
                    write.replayed_as,
                    write.bucket,
                    write.lane,
                    write.task_id,
                )
            )
            return bound, _STATEMENT_OVERHEAD_BYTES
        bound = self._add_events.bind(
            (
                write.timestamp_us,
                write.ttl_seconds,
                write.events,
                write.status.value,
                write.bucket,
                write.lane,
                write.task_id,
            )
        )
        return bound, _events_bytes(write) + _STATEMENT_OVERHEAD_BYTES


async def _some(
    in_flight: set[asyncio.Future[Sequence[tuple[Any, ...]]]], failures: list[BaseException]
) -> set[asyncio.Future[Sequence[tuple[Any, ...]]]]:
    """Wait for at least one request; note what failed, and return those that are still under way."""
    done, under_way = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
    for request in done:
        error = request.exception()
        if error is not None:
            failures.append(error)
    return under_way


def _events_bytes(write: EventsWrite) -> int:
    return sum(map(len, write.events.values())) + _EVENT_OVERHEAD_BYTES * len(write.events)


def _batch(bound: list[Any]) -> Any:  # noqa: ANN401
    if len(bound) == 1:
        return bound[0]
    batch = BatchStatement(BatchType.UNLOGGED)
    batch.is_idempotent = True
    for statement in bound:
        batch.add(statement)
    return batch


def _prepare(session: Session, query: str, keyspace: str) -> PreparedStatement:
    try:
        statement = session.prepare(query.format(keyspace=keyspace).strip())
    except InvalidRequest as error:
        raise WrongTopology(
            [f"keyspace {keyspace!r} lacks the view's tables ({error})"], MIGRATE_COMMAND
        ) from error
    statement.is_idempotent = True
    return statement
