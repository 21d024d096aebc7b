"""Fetches on one side, the queue's records on the other: tasks are lent to workers of the HTTP protocol.

Invariant: a task is handed out only when, in this order, its Started with the lease's end and a guard for that end are in the log, it may begin
(`taskline.workers.cancels`), and its dispatch record's progress is committed. From then on the lease keeps the task. What a crash leaves
before that is a record that its partition's next owner lends again, and an execution that its Started supersedes; nobody was given it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from taskline.errors import (
    DeliveryError,
    Unavailable,
    UndecodablePayload,
    UndecodableRecord,
    UnknownSchema,
    UnknownTaskType,
)
from taskline.infra.intake import Intake
from taskline.infra.log import HEADER_ATTEMPT, HEADER_UNFETCHED, Headers, InRecord
from taskline.infra.role import Clock
from taskline.schemas.codec import Codec
from taskline.schemas.events import LeaseRef, Priority, TaskSubmitted
from taskline.schemas.ids import TaskId
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType
from taskline.settings import Settings
from taskline.workers import lease_metrics as metrics
from taskline.workers.admission import PAYLOAD_UNDECODABLE, UNREGISTERED
from taskline.workers.cancels import CancelGate, Verdict
from taskline.workers.lease_book import LeaseBook
from taskline.workers.lease_buffer import Entry, LeaseBuffer
from taskline.workers.lease_feed import LeaseAssignment, LeaseFeed
from taskline.workers.lease_guards import GuardWriter
from taskline.workers.lease_payloads import payload_json
from taskline.workers.lease_records import LeaseRecords
from taskline.workers.lease_tokens import new_token

log = structlog.get_logger(__name__)

_MS = 1_000
_UPKEEP_SECONDS = 0.5
# A waiting fetch looks again so often, whatever it was told.
_LOOK_SECONDS = 1.0
# And so soon when what it found could not be lent.
_AGAIN_SECONDS = 0.02
# How long a fetch waits for the view's word on a task that may have been cancelled; then the task waits for another fetch.
_VERDICT_SECONDS = 2.0
# How long one start may take before its record is given back: the log is away.
_START_SECONDS = 15.0
# A partition that moves waits so long for starts that are on their way.
_SETTLE_SECONDS = 10.0
# Records that are handed on at once, of one partition.
_HAND_ON_BATCH = 100
_MOST_DOUBLINGS = 6
_MAX_DIGITS = 9


class TypeSource(Protocol):
    """The registered task types: a `TypeDirectory`."""

    def get(self, name: str) -> TaskType:
        """The type of this name.

        Raises:
            UnknownTaskType: there is none.
        """
        ...

    def writer_schema(self, fingerprint: bytes) -> PayloadSchema | None:
        """The schema with that fingerprint; None: not known, or not yet."""
        ...

    def refresh(self) -> None:
        """Return when everything that is registered now is known; waits for the log."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Lent:
    """A task that is lent."""

    task_id: TaskId
    task_type: str
    # JSON.
    payload: bytes
    timeout_seconds: float
    attempt: int
    token: str = field(repr=False)
    execution: TaskId
    entry: Entry = field(repr=False)
    worker: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeskPorts:
    """What a desk stands on."""

    # Makes a member of the group of one priority.
    intakes: Mapping[Priority, Callable[[], Intake]]
    types: TypeSource
    codec: Codec
    clock: Clock
    records: LeaseRecords
    guards: GuardWriter
    # None: cancelled tasks are lent all the same (worker.cancels).
    gate: CancelGate | None


@dataclass(eq=False, slots=True)
class _Waiter:
    task_types: frozenset[str]
    woken: asyncio.Future[None]


class LeaseDesk:
    """One gateway's lending."""

    def __init__(self, ports: DeskPorts, settings: Settings) -> None:
        """Lend the tasks of the ports' groups."""
        self._ports = ports
        self._settings = settings.gateway
        self._default_timeout = settings.worker.default_timeout_seconds
        self._lease_ms = round(settings.gateway.lease_seconds * _MS)
        self._buffer = LeaseBuffer()
        self.book = LeaseBook(settings.gateway.max_leases)
        self._feeds = {
            priority: LeaseFeed(
                priority, make, self, buffer=settings.gateway.buffer, window=settings.worker.window
            )
            for priority, make in ports.intakes.items()
        }
        self._waiters: list[_Waiter] = []
        # When a type was last asked for, and when anything was, by the loop's clock.
        self._asked: dict[str, float] = {}
        self._last_fetch = float("-inf")
        self._joined = False
        self._moving = asyncio.Lock()
        self._opening: dict[asyncio.Task[Lent | None], LeaseAssignment] = {}
        self._side: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] | None = None
        self._stopping = False

    # ---- its life --------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Look after things until `stop` is set; then give back what is in memory and leave.

        Raises:
            Exception: what ended an intake.
        """
        self._failure = asyncio.get_running_loop().create_future()
        stopping = asyncio.ensure_future(stop.wait())
        try:
            while not stop.is_set() and not self._failure.done():
                await asyncio.wait(
                    (stopping, self._failure), timeout=_UPKEEP_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                await self._upkeep()
        finally:
            stopping.cancel()
            self._stopping = True
            self._wake_all()
            async with self._moving:
                await self._leave()
            for task in self._side:
                task.cancel()
            if self._side:
                await asyncio.wait(self._side)
        if self._failure.done():
            self._failure.result()

    async def fetch(
        self,
        worker: str,
        task_types: Collection[str],
        *,
        limit: int,
        wait_seconds: float,
        left: Callable[[], bool] = lambda: False,
    ) -> list[Lent]:
        """Lend tasks of these types; wait for the first of them.

        Args:
            worker: whom to.
            task_types: what it can do.
            limit: most tasks.
            wait_seconds: for the first.
            left: whether the worker has gone away, so that it gets none.
        """
        loop = asyncio.get_running_loop()
        wanted = frozenset(task_types)
        deadline = loop.time() + wait_seconds
        await self._join()
        while True:
            if left():
                return []
            self._touch(wanted)
            room = min(limit, self.book.room - len(self._opening))
            entries = self._buffer.take(wanted, room) if room > 0 else []
            if entries:
                lent = await self._open_all(entries, worker)
                if lent:
                    return lent
            remaining = deadline - loop.time()
            if remaining <= 0 or self._stopping:
                return []
            await self._rest(wanted, min(remaining, _AGAIN_SECONDS if entries else _LOOK_SECONDS))

    async def release(self, lent: Sequence[Lent], reason: str) -> None:
        """Take back what reached nobody; it spends no attempt."""
        for each in lent:
            self.book.remove(each.execution)
            log.info("lease taken back", task_id=str(each.task_id), attempt=each.attempt, reason=reason)
            await self._ports.records.released(
                each.entry.submission,
                each.entry.record,
                each.attempt,
                each.execution,
                worker=each.worker,
                reason=reason,
            )

    # ---- the feeds' calls (FeedHost) ---------------------------------------------------------------------------------

    def take(self, record: InRecord, assignment: LeaseAssignment) -> None:
        """See `FeedHost`."""
        try:
            submission = self._ports.codec.decode(record.value, TaskSubmitted)
            attempt = _number(record.headers, HEADER_ATTEMPT, least=1, otherwise=1)
            unfetched = _number(record.headers, HEADER_UNFETCHED, least=0, otherwise=0)
        except UnknownSchema as error:
            # A newer producer's: to bury it would lose it.
            self.fail(error)
            return
        except UndecodableRecord as error:
            self._aside(self._ports.records.undecodable(record, str(error)), record, assignment)
            return
        except Unavailable:
            self._later(record, assignment)
            return
        if self.book.lends(submission.task_id, attempt):
            # A second copy: a hop through the tiers was repeated.
            log.info("second copy of a lent task dropped", task_id=str(submission.task_id), attempt=attempt)
            assignment.left()
            assignment.complete(record.position.offset)
            return
        self._buffer.add(
            Entry(
                record=record,
                assignment=assignment,
                submission=submission,
                attempt=attempt,
                unfetched=unfetched,
                since=asyncio.get_running_loop().time(),
            )
        )
        self._wake(submission.task_type)

    def forget(self, assignments: Collection[LeaseAssignment]) -> None:
        """See `FeedHost`."""
        leaving = set(assignments)
        self._buffer.drop(lambda entry: entry.assignment in leaving)

    async def settle(self, assignments: Collection[LeaseAssignment]) -> None:
        """See `FeedHost`."""
        opening = [task for task, assignment in self._opening.items() if assignment in assignments]
        if opening:
            await asyncio.wait(opening, timeout=_SETTLE_SECONDS)

    def fail(self, error: Exception) -> None:
        """See `FeedHost`."""
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    # ---- lending ---------------------------------------------------------------------------------------------------

    async def _open_all(self, entries: Sequence[Entry], worker: str) -> list[Lent]:
        tasks: list[asyncio.Task[Lent | None]] = []
        for entry in entries:
            task = asyncio.create_task(self._open(entry, worker), name="lease-open")
            self._opening[task] = entry.assignment
            task.add_done_callback(self._opened)
            tasks.append(task)
        # A request that is given up leaves them running: what they open is released by whoever gave it up.
        await asyncio.shield(asyncio.gather(*tasks, return_exceptions=True))
        return [lent for task in tasks if task.exception() is None and (lent := task.result()) is not None]

    def _opened(self, task: asyncio.Task[Lent | None]) -> None:
        self._opening.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error if isinstance(error, Exception) else RuntimeError(str(error)))

    async def _open(self, entry: Entry, worker: str) -> Lent | None:
        """Lend one task; None: it can't be, and was seen to."""
        ports, submission = self._ports, entry.submission
        now_ms = ports.clock.now_ms()
        if submission.start_by is not None and now_ms > submission.start_by:
            await ports.records.expired(submission, entry.record.position, entry.attempt)
            self._done(entry)
            return None
        found = await self._payload(entry)
        if found is None:
            return None
        task_type, payload = found
        token = new_token(submission.task_id)
        self.book.add(token.execution, submission.task_id, entry.attempt, now_ms + self._lease_ms)
        if not await self._start(entry, token.execution, worker, until=now_ms + self._lease_ms):
            self.book.remove(token.execution)
            return None
        entry.assignment.left()
        metrics.LENT.labels(task_type.name).inc()
        timeout_ms = submission.timeout_ms or task_type.timeout_ms
        return Lent(
            task_id=submission.task_id,
            task_type=task_type.name,
            payload=payload,
            timeout_seconds=self._default_timeout if timeout_ms is None else timeout_ms / _MS,
            attempt=entry.attempt,
            token=token.text,
            execution=token.execution,
            entry=entry,
            worker=worker,
        )

    async def _start(self, entry: Entry, execution: TaskId, worker: str, *, until: int) -> bool:
        """Write the lease, and let its record go; False: it must not be handed out, and its record was seen to."""
        ports, submission, place = self._ports, entry.submission, entry.record.position
        try:
            async with asyncio.timeout(_START_SECONDS):
                if ports.gate is not None:
                    ports.gate.expect()
                # The guard comes second: so one whose lease is not in the view yet only has to wait for it.
                await ports.records.started(
                    submission, place, entry.attempt, execution, worker=worker, until=until
                )
                lease = LeaseRef(task_id=submission.task_id, execution=execution)
                _, verdict = await asyncio.gather(
                    ports.guards.write(lease, ends_ms=until, retain_until=submission.retain_until),
                    self._verdict(entry, execution),
                )
        except (DeliveryError, TimeoutError, Unavailable) as error:
            # Its Started may be in the log all the same; the next one supersedes it.
            log.warning("task was not lent; it waits", task_id=str(submission.task_id), error=str(error))
            verdict = Verdict.AGAIN
        if verdict is Verdict.AGAIN:
            self._return(entry)
            return False
        if verdict is not Verdict.RUN:
            if verdict is Verdict.ABORT:
                await ports.records.cancelled(submission, entry.attempt, execution, worker=worker)
            self._done(entry)
            return False
        # Otherwise its partition's next owner lends it.
        assignment = entry.assignment
        return assignment.complete(place.offset) and await assignment.feed.stored(assignment)

    async def _verdict(self, entry: Entry, execution: TaskId) -> Verdict:
        gate, submission = self._ports.gate, entry.submission
        if gate is None or not await gate.named(submission.task_id):
            return Verdict.RUN
        async with asyncio.timeout(_VERDICT_SECONDS):
            verdict, _ = await gate.judge(execution, submission)
        return verdict

    async def _payload(self, entry: Entry) -> tuple[TaskType, bytes] | None:
        """The task's type, and its payload as JSON; None: it has none, and is dead."""
        submission, types = entry.submission, self._ports.types
        error: Exception
        for fresh in (False, True):
            if fresh:
                # What was registered before it was submitted may not have been read here yet.
                try:
                    await asyncio.to_thread(types.refresh)
                except Unavailable:
                    self._return(entry)
                    return None
            try:
                task_type = types.get(submission.task_type)
                value = task_type.decode(
                    submission.payload, submission.payload_fingerprint, types.writer_schema
                )
                return task_type, payload_json(value)
            except UnknownTaskType as unknown:
                error, reason = unknown, UNREGISTERED
            except (UndecodablePayload, TypeError) as broken:
                error, reason = broken, PAYLOAD_UNDECODABLE
        await self._ports.records.rejected(
            submission, entry.record, entry.attempt, reason=reason, error=error
        )
        self._done(entry)
        return None

    def _done(self, entry: Entry) -> None:
        entry.assignment.left()
        entry.assignment.complete(entry.record.position.offset)

    def _return(self, entry: Entry) -> None:
        if entry.assignment.open:
            self._buffer.give_back(entry)

    # ---- what is not lent -----------------------------------------------------------------------------------------

    def _aside(
        self, seeing_to_it: Callable[[], object] | object, record: InRecord, assignment: LeaseAssignment
    ) -> None:
        """See to a record beside everything else; it is done then."""

        async def see() -> None:
            await seeing_to_it  # type: ignore[misc]  # a coroutine
            assignment.left()
            assignment.complete(record.position.offset)

        self._spawn(see())

    def _later(self, record: InRecord, assignment: LeaseAssignment) -> None:
        async def wait() -> None:
            await asyncio.sleep(_LOOK_SECONDS)
            if assignment.open:
                self.take(record, assignment)

        self._spawn(wait())

    def _spawn(self, coroutine: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)  # type: ignore[arg-type]
        self._side.add(task)
        task.add_done_callback(self._side_done)

    def _side_done(self, task: asyncio.Task[None]) -> None:
        self._side.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self.fail(error)

    # ---- upkeep ----------------------------------------------------------------------------------------------------

    async def _upkeep(self) -> None:
        self.book.expire(self._ports.clock.now_ms())
        loop = asyncio.get_running_loop()
        for feed in self._feeds.values():
            if any(each.tracker.commit() != each.committed for each in feed.assignments):
                feed.commit()
            for assignment in feed.assignments:
                if assignment.full:
                    self._make_room(assignment, loop.time())
        metrics.OPEN.set(len(self.book))
        metrics.BUFFERED.set(len(self._buffer))
        metrics.WAITING.set(len(self._waiters))
        metrics.JOINED.set(self._joined)
        idle = loop.time() - self._last_fetch > self._settings.idle_seconds
        if self._joined and idle and not self._waiters and not self._opening:
            async with self._moving:
                log.info("nobody fetches: leaving the groups", idle_seconds=self._settings.idle_seconds)
                await self._leave()

    def _make_room(self, assignment: LeaseAssignment, now: float) -> None:
        """Hand on what is in the way of others in a partition that is full."""
        mine = [entry for entry in self._buffer if entry.assignment is assignment]
        if not mine:
            return
        unasked = [entry for entry in mine if not self._is_asked(entry.submission.task_type, now)]
        if not unasked and any(not self._is_asked_now(entry.submission.task_type) for entry in mine):
            # Its types are fetched, but the oldest record holds the window: somebody's workers are busy, or gone.
            oldest = min(mine, key=lambda entry: entry.record.position.offset)
            if (
                assignment.tracker.watermark == oldest.record.position.offset
                and assignment.tracker.window > len(mine) + len(self._opening)
                and not self._is_asked_now(oldest.submission.task_type)
            ):
                unasked = [
                    entry for entry in mine if entry.submission.task_type == oldest.submission.task_type
                ]
        gone = {id(entry) for entry in sorted(unasked, key=lambda entry: entry.number)[:_HAND_ON_BATCH]}
        for entry in self._buffer.drop(lambda entry: id(entry) in gone):
            self._spawn(self._hand_on(entry))

    async def _hand_on(self, entry: Entry) -> None:
        doublings = min(entry.unfetched, _MOST_DOUBLINGS)
        delay_ms = round(self._settings.unfetched_delay_seconds * _MS) * 2**doublings
        await self._ports.records.handed_on(
            entry.record,
            entry.submission.task_id,
            times=min(entry.unfetched + 1, 10**_MAX_DIGITS - 1),
            delay_ms=delay_ms,
        )
        metrics.HANDED_ON.labels(entry.submission.task_type).inc()
        self._done(entry)

    def _is_asked(self, task_type: str, now: float) -> bool:
        return now - self._asked.get(task_type, float("-inf")) <= self._settings.idle_seconds

    def _is_asked_now(self, task_type: str) -> bool:
        return any(task_type in waiter.task_types for waiter in self._waiters)

    # ---- waiting ---------------------------------------------------------------------------------------------------

    async def _rest(self, task_types: frozenset[str], seconds: float) -> None:
        waiter = _Waiter(task_types, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await asyncio.wait((waiter.woken,), timeout=seconds)
        finally:
            self._waiters.remove(waiter)

    def _wake(self, task_type: str) -> None:
        for waiter in self._waiters:
            if task_type in waiter.task_types and not waiter.woken.done():
                waiter.woken.set_result(None)
                return

    def _wake_all(self) -> None:
        for waiter in self._waiters:
            if not waiter.woken.done():
                waiter.woken.set_result(None)

    def _touch(self, task_types: Collection[str]) -> None:
        now = self._last_fetch = asyncio.get_running_loop().time()
        for task_type in task_types:
            self._asked[task_type] = now
        if len(self._asked) > _MOST_TYPES:
            self._asked = {name: at for name, at in self._asked.items() if self._is_asked(name, now)}

    # ---- the groups --------------------------------------------------------------------------------------------------

    async def _join(self) -> None:
        if self._joined or self._stopping:
            return
        self._last_fetch = asyncio.get_running_loop().time()
        async with self._moving:
            if self._has_joined() or self._stopping:
                return
            log.info("joining the groups: somebody fetches")
            for feed in self._feeds.values():
                await feed.join()
            self._joined = True

    def _has_joined(self) -> bool:
        return self._joined

    async def _leave(self) -> None:
        if not self._joined:
            return
        self._joined = False
        await asyncio.gather(*(feed.leave() for feed in self._feeds.values()))


# More type names than that are somebody's mistake, or attack: those that are not asked for any more are forgotten.
_MOST_TYPES = 10_000


def _number(headers: Headers, name: str, *, least: int, otherwise: int) -> int:
    header = headers.get(name)
    if header is None:
        return otherwise
    if len(header) > _MAX_DIGITS or not header.isdigit() or int(header) < least:
        raise UndecodableRecord(f"header {name} is not a number from {least}")
    return int(header)
