"""The delay role's engine: records of delay topics in, the same records on to their next place, offsets after their acknowledgement.

Invariants:
- An offset is done only when the record's next copy is acknowledged, and only while its partition is ours. A crash loses nothing; what
  it forwards again is at most what was forwarded and not committed (`delay_progress`).
- Memory does not grow with what waits (`delay_lane`): a full partition is paused. What is paused is forgotten with its lane, so
  a partition that comes back flows.
- One timer, for the earliest record of all; nothing ticks while nothing is due.
- A process that stood still (SIGSTOP, a suspended machine) forwards nothing before the group has taken a commit of it: its partitions
  may have had another owner for long, who has forwarded the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from asyncio import Future
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import structlog

from taskline.errors import DeliveryError
from taskline.infra.backoff import pauses
from taskline.infra.intake import Commit, Intake, TopicPartition
from taskline.infra.log import AsyncLog, InRecord, Position
from taskline.infra.outbox import after_failure, deliver
from taskline.infra.role import Clock
from taskline.processors import delay_metrics as metrics
from taskline.processors.delay_core import Held, Router, Stage
from taskline.processors.delay_lane import Lane, Room
from taskline.processors.delay_progress import Progress
from taskline.settings import DelaySettings

log = structlog.get_logger(__name__)

# Partitions that move wait this long for acknowledgements under way; an acknowledgement takes milliseconds, and with the log
# away it does not come at all.
HAND_OVER_SECONDS = 5.0
# The loop's time and the wall clock part when a machine is suspended or its clock is set: look again after this at the latest, while
# something waits.
LONGEST_SLEEP_SECONDS = 10.0
# A timer that rings later than this is a sign that the process stood still; a busy loop is late by milliseconds.
_STALL_SECONDS = 0.5
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
_MS = 1_000
_WHAT = "delayed record"


class DelayEngine:
    """Forwards the records of one intake; an `IntakeSink`."""

    def __init__(
        self,
        intake: Intake,
        appends: AsyncLog,
        router: Router,
        *,
        stages: Collection[Stage],
        settings: DelaySettings,
        clock: Clock,
        longest_sleep_seconds: float = LONGEST_SLEEP_SECONDS,
    ) -> None:
        """Plug an engine together; `run` starts it.

        Args:
            intake: brings the records of the stages' topics.
            appends: takes them to their next place.
            router: the rules.
            stages: what the intake reads.
            settings: bounds and intervals.
            clock: says what is due.
            longest_sleep_seconds: the clock is looked at again after this; infinite for one that can't part from the loop's time.
        """
        self._intake = intake
        self._log = appends
        self._router = router
        self._stages = {stage.topic: stage for stage in stages}
        self._far = Room(records=settings.buffer_records, bytes=settings.buffer_bytes)
        self._near = Room(records=settings.near_records, bytes=settings.near_bytes)
        self._clock = clock
        self._longest_sleep = longest_sleep_seconds
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._progress = Progress(intake, self._lanes.values, settings.commit_interval_seconds, self._soon)
        # (when, number, lane): when each lane's first record leaves; entries that a lane has outdated are skipped.
        self._alarms: list[tuple[int, int, Lane]] = []
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0
        # The loop's time at which it rings.
        self._timer_at = 0.0
        # While the group is asked whether the partitions are still ours.
        self._doubt: asyncio.Task[None] | None = None
        self._pump_due = False
        # Records whose append failed, and that are appended again.
        self._again: dict[asyncio.Task[None], Lane] = {}
        # Being handed over: set when nothing of one is under way any more.
        self._leaving: dict[Lane, asyncio.Event] = {}
        self._failure: Exception | None = None
        self._wake = asyncio.Event()

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The partitions that are ours."""
        return tuple(self._lanes.values())

    async def run(self, stop: asyncio.Event) -> None:
        """Forward until `stop` is set, then hand everything over.

        Raises:
            OffsetLost, WrongTopology, …: what the intake can't go on without.
        """
        stopping = asyncio.create_task(stop.wait(), name="delay-stop")
        failing = asyncio.create_task(self._wake.wait(), name="delay-failure")
        try:
            await self._intake.start(self)
            await asyncio.wait((stopping, failing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            failing.cancel()
            await self._intake.close()
            self._end(tuple(self._lanes.values()))
            self._progress.stop()
            for pending in (self._timer, self._doubt):
                if pending is not None:
                    pending.cancel()
        if self._failure is not None:
            raise self._failure

    # ---- the intake's calls (IntakeSink) -------------------------------------------------------------------

    def assigned(self, committed: Mapping[TopicPartition, Commit]) -> None:
        """See `IntakeSink`."""
        for name, commit in committed.items():
            stage = self._stages[name[0]]
            room = self._near if stage.near else self._far
            self._lanes[name[0], name[1]] = Lane(TopicPartition(*name), stage, room, commit)
        log.info("partitions assigned", partitions=[f"{name[0]}/{name[1]}" for name in committed])

    def received(self, records: Sequence[InRecord]) -> None:
        """See `IntakeSink`."""
        now = self._clock.now_ms()
        touched: dict[Lane, None] = {}
        skipped = 0
        lanes, router = self._lanes, self._router
        for record in records:
            position = record.position
            lane = lanes.get((position.topic, position.partition))
            if lane is None or position.offset < lane.tracker.next_offset:
                # On its way when the partition went; or handed over before.
                continue
            touched[lane] = None
            if not lane.tracker.take(position.offset):
                skipped += 1
                lane.changed = True
                continue
            lane.hold(router.admit(record, lane.stage, now))
        if skipped:
            metrics.SKIPPED.inc(skipped)
            self._progress.later()
        for lane in touched:
            self._schedule(lane)
        self._pump()
        for lane in touched:
            if lane.full and not lane.paused:
                lane.paused = True
                self._intake.pause((lane.name,))

    async def revoked(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Commit]:
        """See `IntakeSink`."""
        leaving = self._remove(partitions)
        log.info("partitions revoked", partitions=_names(leaving))
        for lane in leaving:
            lane.clear()
        quiet = {lane: asyncio.Event() for lane in leaving if lane.under_way}
        self._leaving.update(quiet)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_SECONDS):
                for event in quiet.values():
                    await event.wait()
        # A partition that was lost meanwhile is not ours to commit.
        final = {lane.name: lane.tracker.commit() for lane in leaving if lane.open}
        self._end(leaving)
        return final

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        """See `IntakeSink`."""
        leaving = self._remove(partitions)
        # A hand-over that took too long ends here.
        names = {tuple(name) for name in partitions}
        leaving += [lane for lane in self._leaving if lane.name in names]
        log.warning("partitions lost", partitions=_names(leaving))
        self._end(leaving)

    def failed(self, error: Exception) -> None:
        """See `IntakeSink`."""
        self._failure = self._failure or error
        self._wake.set()

    # ---- what is due ---------------------------------------------------------------------------------------

    def _soon(self) -> None:
        """Look at what is due in this turn of the loop, once."""
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _schedule(self, lane: Lane) -> None:
        """Note when a lane's first record leaves."""
        first = lane.next_ms
        if first is not None and (lane.alarm_ms is None or first < lane.alarm_ms):
            lane.alarm_ms = first
            self._number += 1
            heapq.heappush(self._alarms, (first, self._number, lane))

    def _pump(self) -> None:
        """Forward all that is due and that there is room for."""
        self._pump_due = False
        if self._in_doubt():
            return
        now = self._clock.now_ms()
        alarms, progress = self._alarms, self._progress
        while alarms and alarms[0][0] <= now and not progress.full:
            when, _, lane = heapq.heappop(alarms)
            if lane.alarm_ms != when or not lane.open:
                continue
            lane.alarm_ms = None
            while (first := lane.next_ms) is not None and first <= now and not progress.full:
                self._forward(lane, lane.pop(), now)
            self._schedule(lane)
            if lane.paused and lane.roomy:
                lane.paused = False
                self._intake.resume((lane.name,))
        if progress.full:
            # Goes on when a commit is stored.
            progress.commit()
        elif alarms:
            self._set_timer(alarms[0][0], now)

    def _set_timer(self, when_ms: int, now_ms: int) -> None:
        if self._timer is not None:
            if self._timer_ms == when_ms:
                return
            self._timer.cancel()
        self._timer_ms = when_ms
        loop = asyncio.get_running_loop()
        self._timer_at = loop.time() + min((when_ms - now_ms) / _MS, self._longest_sleep)
        self._timer = loop.call_at(self._timer_at, self._ring)

    def _ring(self) -> None:
        if not self._in_doubt():
            self._timer = None
            self._pump()

    def _in_doubt(self) -> bool:
        """Whether nothing may be forwarded, since the process stood still and the group has not answered yet."""
        if self._doubt is not None:
            return True
        loop = asyncio.get_running_loop()
        if self._timer is None or loop.time() <= self._timer_at + _STALL_SECONDS:
            return False
        log.warning("the process stood still", seconds=round(loop.time() - self._timer_at, 1))
        self._timer.cancel()
        self._timer = None
        self._doubt = loop.create_task(self._reassure(), name="delay-reassure")
        return True

    async def _reassure(self) -> None:
        """Wait until the group takes a commit, or has taken the partitions away."""
        waits = pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while self._lanes:
            commits = {lane.name: lane.tracker.commit() for lane in self._lanes.values()}
            try:
                await self._intake.commit(commits)
            except Exception as error:
                log.warning("the group did not take the commit", error=str(error))
                await asyncio.sleep(next(waits))
            else:
                break
        self._doubt = None
        self._pump()

    # ---- appends -------------------------------------------------------------------------------------------

    def _forward(self, lane: Lane, held: Held, now_ms: int) -> None:
        if held.cause is not None:
            _log_refusal(held)
        else:
            metrics.release_lateness(lane.stage.name).observe(max(0, now_ms - held.until_ms) / _MS)
            if held.due_ms <= now_ms:
                metrics.DELIVERY_LATENESS.observe((now_ms - held.due_ms) / _MS)
        self._progress.sent(lane)
        future = self._log.append(self._router.release(held, now_ms))
        future.add_done_callback(partial(self._acknowledged, lane, held))

    def _acknowledged(self, lane: Lane, held: Held, future: Future[Position]) -> None:
        error = None if future.cancelled() else future.exception()
        if not lane.open:
            return
        if error is None and not future.cancelled():
            self._complete(lane, held, future.result())
            return
        task = asyncio.get_running_loop().create_task(
            self._append_again(lane, held, error or asyncio.CancelledError()), name="delay-again"
        )
        self._again[task] = lane
        task.add_done_callback(self._again.pop)

    async def _append_again(self, lane: Lane, held: Held, error: BaseException) -> None:
        if not isinstance(error, DeliveryError | asyncio.CancelledError):
            self.failed(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            return
        await after_failure(error, what=_WHAT, task_id=None)
        landed: list[Future[Position]] = []

        def append() -> Sequence[Future[Position]]:
            # Decided anew each time: what had to wait before the outage may be due after it.
            landed[:] = [self._log.append(self._router.release(held, self._clock.now_ms()))]
            return landed

        await deliver(append, what=_WHAT, task_id=None)
        if lane.open:
            self._complete(lane, held, landed[0].result())

    def _complete(self, lane: Lane, held: Held, landed: Position) -> None:
        if held.cause is not None:
            metrics.REFUSED.inc()
        else:
            metrics.forwarded(lane.stage.name, "target" if landed.topic == held.target else "tier").inc()
        self._progress.done(lane, held.record.position.offset)
        if not lane.under_way and lane in self._leaving:
            self._leaving[lane].set()

    # ---- ends of lanes -------------------------------------------------------------------------------------

    def _remove(self, partitions: Collection[TopicPartition]) -> list[Lane]:
        found = [self._lanes.pop((name[0], name[1]), None) for name in partitions]
        return [lane for lane in found if lane is not None]

    def _end(self, leaving: Collection[Lane]) -> None:
        gone = set(leaving)
        for lane in gone:
            lane.open = False
            lane.clear()
            self._progress.gone(lane)
            if lane in self._leaving:
                self._leaving.pop(lane).set()
        self._alarms = [alarm for alarm in self._alarms if alarm[2].open]
        heapq.heapify(self._alarms)
        for task, lane in tuple(self._again.items()):
            if lane in gone:
                task.cancel()
        self._soon()


def _log_refusal(held: Held) -> None:
    position = held.record.position
    log.warning(
        "record refused",
        topic=position.topic,
        partition=position.partition,
        offset=position.offset,
        cause=held.cause,
    )


def _names(lanes: Collection[Lane]) -> list[str]:
    return [f"{lane.name.topic}/{lane.name.partition}" for lane in lanes]
