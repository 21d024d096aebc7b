"""Guards that have come due: what becomes of leases whose workers do not answer.

Invariants:
- A lease is closed by TimedOut only if the view shows it open and at its end; and what follows is begun only once the view shows that this
  TimedOut counted. A worker's outcome that came first stands, and one that comes later changes nothing (`taskline.state.fold`).
- A guard is done with when each of its leases is closed with something that follows, or is named by a newer guard. So whatever a gateway
  was doing when it died is done by another: also the next attempt of a failure whose report it had taken.
- No guard waits for its turn behind another's trouble: what must be waited for goes back into the tiers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

import structlog

from taskline.errors import Unavailable, UndecodableRecord, UnknownSchema
from taskline.infra.intake import Commit, Intake, TopicPartition
from taskline.infra.log import InRecord
from taskline.infra.role import Clock
from taskline.infra.watermark import WatermarkTracker
from taskline.schemas.codec import Codec
from taskline.schemas.events import LeaseGuard, LeaseRef
from taskline.state.fold import Outcome
from taskline.state.leases import Lease
from taskline.workers import lease_metrics as metrics
from taskline.workers.lease_follow import LeaseFollower
from taskline.workers.lease_guards import GuardWriter
from taskline.workers.lease_reading import Found, LeaseReader
from taskline.workers.lease_records import LeaseRecords

log = structlog.get_logger(__name__)

_COMMIT_SECONDS = 0.5
# Leases that are looked at together; each is a read of the view.
_AT_ONCE = 64
# Guards in hand beyond which no more are read.
_MOST_GUARDS = 200
# A guard whose lease is not in the view, or is being seen to by the replica that took its worker's report, is looked at again after this.
_AGAIN_MS = 5_000
# A replica that took a report of failure has written what follows by then, or has died.
_REPAIR_AFTER_MS = 10_000
# Workers whose reports could not be taken while the view was away come first when it is back.
_AFTER_OUTAGE_SECONDS = 5.0
_VIEW_PAUSE_SECONDS = 1.0
# How long the view is waited for to show a TimedOut, before the guard goes back into the tiers.
_OWN_SECONDS = 30.0


class LeaseWatch:
    """The member of the leases' group in one gateway."""

    def __init__(
        self,
        *,
        reader: LeaseReader,
        records: LeaseRecords,
        guards: GuardWriter,
        follower: LeaseFollower,
        codec: Codec,
        clock: Clock,
    ) -> None:
        """Look leases up with `reader`, and see to them with the others."""
        self._reader = reader
        self._records = records
        self._guards = guards
        self._follower = follower
        self._codec = codec
        self._clock = clock
        self._intake: Intake | None = None
        self._trackers: dict[TopicPartition, WatermarkTracker] = {}
        self._stored: dict[TopicPartition, Commit] = {}
        self._seeing: dict[asyncio.Task[None], TopicPartition] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._paused = False
        self._failure: asyncio.Future[None] | None = None

    async def run(self, intake: Intake, stop: asyncio.Event) -> None:
        """See to guards until `stop` is set.

        Raises:
            Exception: what ended the intake.
        """
        self._intake = intake
        self._failure = asyncio.get_running_loop().create_future()
        stopping = asyncio.ensure_future(stop.wait())
        await intake.start(self)
        try:
            while not stop.is_set() and not self._failure.done():
                await asyncio.wait(
                    (stopping, self._failure), timeout=_COMMIT_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                self._flow()
                await self._commit()
        finally:
            stopping.cancel()
            await intake.close()
            for task in self._seeing:
                task.cancel()
        if self._failure.done():
            self._failure.result()

    # ---- the intake's calls (IntakeSink) -------------------------------------------------------------------------------

    def assigned(self, committed: Mapping[TopicPartition, Commit]) -> None:
        """See `IntakeSink`."""
        for name, commit in committed.items():
            key = TopicPartition(*name)
            self._trackers[key] = WatermarkTracker.resumed(key, commit)
            self._stored[key] = commit

    def received(self, records: Sequence[InRecord]) -> None:
        """See `IntakeSink`."""
        for record in records:
            place = record.position
            key = TopicPartition(place.topic, place.partition)
            tracker = self._trackers.get(key)
            if tracker is None or place.offset < tracker.next_offset or not tracker.take(place.offset):
                continue
            task = asyncio.create_task(self._see(record, tracker), name="lease-guard")
            self._seeing[task] = key
            task.add_done_callback(self._seen)
        self._flow()

    async def revoked(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Commit]:
        """See `IntakeSink`."""
        # What is being seen to is begun again by the next owner: each step looks first.
        await self._drop(partitions)
        final = {key: self._trackers.pop(key).commit() for key in self._own(partitions)}
        for key in final:
            self._stored.pop(key, None)
        return final

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        """See `IntakeSink`."""
        for key in self._own(partitions):
            del self._trackers[key]
            self._stored.pop(key, None)
            for task, of in list(self._seeing.items()):
                if of == key:
                    task.cancel()

    def failed(self, error: Exception) -> None:
        """See `IntakeSink`."""
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    # ---- guards ----------------------------------------------------------------------------------------------------

    async def _see(self, record: InRecord, tracker: WatermarkTracker) -> None:
        try:
            guard = self._codec.decode(record.value, LeaseGuard)
        except UnknownSchema as error:
            self.failed(error)
            return
        except UndecodableRecord as error:
            await self._records.undecodable(record, str(error))
        else:
            await asyncio.gather(*(self._see_to(lease, guard.retain_until) for lease in guard.leases))
        tracker.complete(record.position.offset)

    async def _see_to(self, ref: LeaseRef, retain_until: int) -> None:
        """See to one lease; returns when nothing is left to do, or a newer guard names it."""
        away = False
        while True:
            try:
                async with self._slots:
                    found = await self._reader.read(ref.task_id, ref.execution)
                    if found is None or not away:
                        again_ms = await self._judge(ref, found, retain_until)
                        break
                # It was away until now.
                away = False
                await asyncio.sleep(_AFTER_OUTAGE_SECONDS)
            except (Unavailable, UnknownSchema, UndecodableRecord) as error:
                away = True
                log.warning("lease can't be looked up; it waits", task_id=str(ref.task_id), error=str(error))
                await asyncio.sleep(_VIEW_PAUSE_SECONDS)
        if again_ms is not None:
            await self._guards.write(ref, ends_ms=again_ms, retain_until=retain_until)

    async def _judge(self, ref: LeaseRef, found: Found | None, retain_until: int) -> int | None:
        """See to a lease as the view has it; when to look again, in ms since the epoch (None: no more)."""
        now_ms = self._clock.now_ms()
        if found is None:
            if now_ms >= retain_until:
                return None
            log.info("lease is not in the view yet; its guard waits", task_id=str(ref.task_id))
            return now_ms + _AGAIN_MS
        lease = found.lease
        if lease.open:
            if lease.lease_until > now_ms:
                return lease.lease_until
            return await self._time_out(ref, lease)
        return await self._mend(found, now_ms)

    async def _time_out(self, ref: LeaseRef, lease: Lease) -> int | None:
        await self._records.timed_out(lease)
        ended = lease.lease_until
        try:
            async with asyncio.timeout(_OWN_SECONDS):
                found = await self._reader.until(
                    ref.task_id, ref.execution, lambda seen: not seen.open or seen.lease_until > ended
                )
        except TimeoutError:
            return self._clock.now_ms() + _AGAIN_MS
        lease = found.lease
        if lease.open:
            # An extension came first.
            return lease.lease_until
        if lease.outcome is not Outcome.TIMED_OUT or not lease.counted:
            return None
        metrics.EXPIRED.labels(lease.submission.task_type).inc()
        if not lease.followed:
            await self._follower.follow(lease, found.submission)
        return None

    async def _mend(self, found: Found, now_ms: int) -> int | None:
        """Do what another replica has left undone, unless it may still be at it."""
        lease = found.lease
        if lease.followed or not lease.counted or lease.outcome not in (Outcome.FAILED, Outcome.TIMED_OUT):
            return None
        may_follow_until = (lease.closed_at or 0) + _REPAIR_AFTER_MS
        if now_ms < may_follow_until:
            return may_follow_until
        log.warning(
            "a closed lease had nothing that follows; mended",
            task_id=str(lease.submission.task_id),
            attempt=lease.started.attempt,
            outcome=lease.outcome.value,
        )
        metrics.REPAIRED.inc()
        await self._follower.follow(lease, found.submission)
        return None

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _seen(self, task: asyncio.Task[None]) -> None:
        self._seeing.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self.failed(error)
        self._flow()

    def _flow(self) -> None:
        if self._intake is None:
            return
        crowded = len(self._seeing) >= _MOST_GUARDS
        if crowded and not self._paused:
            self._paused = True
            self._intake.pause()
        elif self._paused and len(self._seeing) <= _MOST_GUARDS // 2:
            self._paused = False
            self._intake.resume()

    async def _commit(self) -> None:
        assert self._intake is not None  # noqa: S101 - set by run
        commits = {key: tracker.commit() for key, tracker in self._trackers.items()}
        changed = {key: commit for key, commit in commits.items() if commit != self._stored.get(key)}
        if not changed:
            return
        storing = self._intake.commit(changed)
        await asyncio.wait((storing,), timeout=_COMMIT_SECONDS)
        if storing.done() and not storing.cancelled() and storing.exception() is None:
            self._stored.update({key: commit for key, commit in changed.items() if key in self._trackers})

    async def _drop(self, partitions: Collection[TopicPartition]) -> None:
        keys = set(self._own(partitions))
        tasks = [task for task, key in self._seeing.items() if key in keys]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _own(self, partitions: Collection[TopicPartition]) -> list[TopicPartition]:
        return [key for key in (TopicPartition(*name) for name in partitions) if key in self._trackers]
