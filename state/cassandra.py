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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import structlog
from cassandra import InvalidRequest
from cassandra.cluster import Cluster, Session
from cassandra.query import BatchStatement, BatchType, PreparedStatement

from taskline.errors import WrongTopology
from taskline.infra.role import SystemClock
from taskline.schemas.ids import TaskId, bucket_of, lane_of
from taskline.settings import Settings
from taskline.state.claims_cassandra import CassandraClaims
from taskline.state.fold import NO_MARKS, Marks
from taskline.state.keys_cassandra import CassandraKeys
from taskline.state.letter_row import Letter, LetterKey, LetterWrite, ResolutionWrite
from taskline.state.letter_tables import LetterTables, letters_of, places_of
from taskline.state.listing import Filter, Slice, merged
from taskline.state.listing_tables import BucketIndex, ListingTables
from taskline.state.session import TRANSIENT, Requests, connect, in_thread, open_cluster, unavailable
from taskline.state.store import EventsWrite, ReplayWrite, StoredTask, SubmissionWrite, TaskWrite, Write

log = structlog.get_logger(__name__)

MIGRATE_COMMAND = "taskline view migrate"

_INSERT_SUBMISSION = """
INSERT INTO {keyspace}.tasks (bucket, lane, task_id, submission, status, task_type, queue, priority, tenant)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP ? AND TTL ?
"""
_INSERT_DISPATCHED = """
INSERT INTO {keyspace}.tasks
    (bucket, lane, task_id, submission, status, task_type, queue, priority, tenant, dispatched)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, true) USING TIMESTAMP ? AND TTL ?
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
        self._keyspace = settings.cassandra.keyspace
        prepare = partial(_prepare, session, keyspace=self._keyspace)
        self._insert_submission = prepare(_INSERT_SUBMISSION)
        self._insert_dispatched = prepare(_INSERT_DISPATCHED)
        self._mark_replayed = prepare(_MARK_REPLAYED)
        self._add_events = prepare(_ADD_EVENTS)
        self._read = prepare(_READ)
        self._letters = LetterTables(prepare)
        self._listings = ListingTables(prepare, lanes=self._lanes, bucket_ms=self._bucket_ms)
        self._index = BucketIndex()
        self._clock = SystemClock()
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
        now_ms = self._clock.now_ms()
        entries = self._index.missing(
            (write for write in writes if not isinstance(write, LetterWrite | ResolutionWrite)), now_ms
        )
        in_flight: set[asyncio.Future[Sequence[tuple[Any, ...]]]] = set()
        failures: list[BaseException] = []
        try:
            for statement in chain(
                (self._listings.insert(entry, ttl, now_ms) for entry, ttl in entries.items()),
                self._statements(writes),
            ):
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
        self._index.remember(entries, now_ms)

    async def read(self, task_id: TaskId) -> StoredTask | None:
        """What is stored of the task: one read of one partition.

        Raises:
            Unavailable: Cassandra does not answer in time.
        """
        lane, bucket = lane_of(task_id, self._lanes), bucket_of(task_id, self._bucket_ms)
        rows = await self._rows(self._read.bind((bucket, lane, task_id)))
        return _stored(rows[0]) if rows else None

    @property
    def bucket_ms(self) -> int:
        """As `ListingStore.bucket_ms`."""
        return self._bucket_ms

    async def buckets(self, wanted: Filter, *, newest: int, oldest: int, limit: int) -> Sequence[int]:
        """As `ListingStore.buckets`: one slice of one partition."""
        statement = self._listings.select_buckets(wanted, newest=newest, oldest=oldest, limit=limit)
        return [bucket for (bucket,) in await self._rows(statement)]

    async def slice(self, bucket: int, wanted: Filter, *, before: TaskId, since: TaskId, limit: int) -> Slice:
        """As `ListingStore.slice`: one slice of each lane's partition, all at once."""
        if not self._listings.knows(wanted):
            try:
                await in_thread(partial(self._listings.learn, wanted))
            except TRANSIENT as error:
                raise unavailable(error) from error
        statements, asked = self._listings.select_ids(bucket, wanted, before=before, since=since, limit=limit)
        lanes = await asyncio.gather(*map(self._rows, statements))
        ids, searched_to = merged([[task_id for (task_id,) in rows] for rows in lanes], asked)
        return Slice(ids=ids, searched_to=searched_to, partition_reads=len(statements))

    async def read_many(self, task_ids: Sequence[TaskId]) -> Mapping[TaskId, StoredTask]:
        """As `ListingStore.read_many`: one read of each partition."""
        partitions = await asyncio.gather(*map(self._rows, self._listings.select_tasks(task_ids)))
        return {task_id: _stored(row) for rows in partitions for task_id, *row in rows}

    async def keys(self) -> CassandraKeys:
        """The API keys, over this connection.

        Raises:
            WrongTopology: their table is missing.
            Unavailable: Cassandra does not answer.
        """
        requests = self._ensure_requests()
        keys: CassandraKeys = await in_thread(lambda: CassandraKeys(self._session, requests, self._keyspace))
        return keys

    async def claims(self) -> CassandraClaims:
        """The claims of submissions, over this connection; raises as `keys`."""
        requests = self._ensure_requests()
        claims: CassandraClaims = await in_thread(
            lambda: CassandraClaims(self._session, requests, self._keyspace)
        )
        return claims

    async def ping(self) -> None:
        """Return if the view's table answers.

        Raises:
            Unavailable: it does not.
        """
        await self.read(TaskId(int=0))

    async def letter_tenants(self, day: int) -> Sequence[str]:
        """As `LetterStore.letter_tenants`."""
        return [tenant for (tenant,) in await self._rows(self._letters.select_tenants(day))]

    async def letter_rows(
        self,
        tenant: str,
        day: int,
        *,
        past: tuple[int, TaskId],
        until_ms: int,
        newest_first: bool,
        limit: int,
    ) -> Sequence[Letter | LetterKey]:
        """As `LetterStore.letter_rows`: one slice of one partition."""
        statement = self._letters.select_rows(
            tenant, day, past=past, until_ms=until_ms, newest_first=newest_first, limit=limit
        )
        return letters_of(tenant, await self._rows(statement))

    async def letter_places(self, letter_ids: Sequence[TaskId]) -> Mapping[TaskId, LetterKey]:
        """As `LetterStore.letter_places`."""
        return places_of(await self._rows(self._letters.select_places(letter_ids))) if letter_ids else {}

    async def _rows(self, statement: Any) -> Sequence[tuple[Any, ...]]:  # noqa: ANN401 - the driver is untyped
        try:
            return await self._ensure_requests().execute(statement)
        except TRANSIENT as error:
            raise unavailable(error) from error

    def _ensure_requests(self) -> Requests:
        if self._requests is None:
            self._requests = Requests(self._session)
        return self._requests

    def _statements(self, writes: Sequence[Write]) -> Iterator[Any]:
        """The writes as batches of one partition each, bounded by bytes and count; a lone write goes bare."""
        tasks: dict[tuple[int, int], list[TaskWrite]] = {}
        letters: dict[Hashable, list[tuple[Any, int]]] = {}
        for write in writes:
            if isinstance(write, LetterWrite | ResolutionWrite):
                for partition, bound, cost in self._letters.bind(write):
                    letters.setdefault(partition, []).append((bound, cost))
            else:
                tasks.setdefault((write.bucket, write.lane), []).append(write)
        for members in tasks.values():
            yield from self._batches(map(self._bind, members))
        for statements in letters.values():
            yield from self._batches(statements)

    def _batches(self, statements: Iterable[tuple[Any, int]]) -> Iterator[Any]:
        """Bound statements of one partition, each with its size, as batches."""
        batch: list[Any] = []
        size = 0
        for bound, cost in statements:
            if batch and (size + cost > self._max_batch_bytes or len(batch) >= _MAX_BATCH_STATEMENTS):
                yield _batch(batch)
                batch, size = [], 0
            batch.append(bound)
            size += cost
        yield _batch(batch)

    def _bind(self, write: TaskWrite) -> tuple[Any, int]:
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
                    write.queue,
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


def _stored(row: Sequence[Any]) -> StoredTask:
    submission, events, dispatched, replayed_as = row
    return StoredTask(
        submission=submission,
        events=dict(events.items()) if events else {},
        marks=Marks(dispatched=bool(dispatched), replayed_as=replayed_as)
        if dispatched or replayed_as
        else NO_MARKS,
    )


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
