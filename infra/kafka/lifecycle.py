"""Lifecycle events on their way into the log: batched per lane, in order.

Invariant: events of one lane are appended in the order of `append`, each in exactly one batch, and an idle lane does not wait
for company. One `LifecycleBatch` costs the projector as much as one event would, so under load a lane gathers events for up
to the linger.

When an append fails: the futures of that batch's events fail with the log's error, and batches behind it in the same lane go on
(the log keeps their order, and holding them back would stall other tasks for one record's sake). A caller that wants its
event appends it again, so it may then stand twice, or behind later events *of other tasks*. It never stands behind
later events of its own task, provided that the caller awaits each event of a task before the task's next one, as the
engine does; a second copy changes nothing, since the fold takes an execution's first end and a task's first end state.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from dataclasses import dataclass, field

from taskline.infra.log import AsyncLog, OutRecord, Position
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import MAX_BATCH_EVENTS, LifecycleBatch, LifecycleEntry, LifecycleEvent
from taskline.schemas.ids import lane_of

# Fits the default topics.max_record_bytes with room for the record's frame.
DEFAULT_MAX_BATCH_BYTES = 900_000
# What an entry adds to its event: id (16), retain_until and the event's length (up to 10 each).
_ENTRY_OVERHEAD_BYTES = 36


@dataclass(slots=True)
class LaneBatcher:
    """When the events of one lane leave, and with whom. Pure: the time comes in, batches come out.

    A batch leaves `linger` after the one before it, or at once if that was longer ago, or as soon as it is full.
    Times are in any one unit, of a clock that does not go back.
    """

    linger: float
    max_events: int = MAX_BATCH_EVENTS
    max_bytes: int = DEFAULT_MAX_BATCH_BYTES
    _pending: list[LifecycleEntry] = field(default_factory=list)
    _pending_bytes: int = 0
    _last_left: float = float("-inf")

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, entry: LifecycleEntry, now: float) -> tuple[LifecycleEntry, ...]:
        """Take an event.

        Returns:
            The batch that is full because of it and leaves now, without `entry` if it did not fit; empty: none.
        """
        size = len(entry.event) + _ENTRY_OVERHEAD_BYTES
        full: tuple[LifecycleEntry, ...] = ()
        if self._pending and (
            len(self._pending) >= self.max_events or self._pending_bytes + size > self.max_bytes
        ):
            full = self.take(now)
        self._pending.append(entry)
        self._pending_bytes += size
        return full

    def due(self) -> float | None:
        """When the pending events leave (a time in the past: now); None: there are none."""
        return self._last_left + self.linger if self._pending else None

    def take(self, now: float) -> tuple[LifecycleEntry, ...]:
        """The pending events, which leave at `now`."""
        batch = tuple(self._pending)
        if batch:
            self._pending.clear()
            self._pending_bytes = 0
            self._last_left = now
        return batch


@dataclass(slots=True)
class _Lane:
    number: int
    batcher: LaneBatcher
    # The future of each pending event, in the same order.
    futures: list[Future[Position]] = field(default_factory=list)
    timer: asyncio.Handle | None = None


class LifecycleLog:
    """Appends lifecycle events through an `AsyncLog`; used from one event loop."""

    def __init__(
        self,
        log: AsyncLog,
        codec: Codec,
        topics: Topics,
        lanes: int,
        linger_ms: float,
        *,
        max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES,
    ) -> None:
        """Batch events for `log`.

        Args:
            log: where batches go.
            codec: how events and batches are encoded.
            topics: names the lifecycle topic.
            lanes: its partitions.
            linger_ms: how long events of a lane that is under load wait for others.
            max_batch_bytes: bound of a batch, below topics.max_record_bytes.
        """
        self._log = log
        self._codec = codec
        self._topic = topics.lifecycle
        self._count = lanes
        self._linger = linger_ms / 1000
        self._max_bytes = max_batch_bytes
        self._lanes: dict[int, _Lane] = {}
        self._in_flight: set[Future[Position]] = set()

    def append(self, event: LifecycleEvent) -> Future[Position]:
        """Hand an event over; needs a running loop.

        Returns:
            Resolves with its batch's place when that is acknowledged, or fails as `AsyncLog.append` says.
        """
        loop = asyncio.get_running_loop()
        entry = LifecycleEntry(
            task_id=event.task_id, retain_until=event.retain_until, event=self._codec.encode(event)
        )
        lane = self._lane(lane_of(event.task_id, self._count))
        now = loop.time()
        full = lane.batcher.add(entry, now)
        if full:
            self._send(lane, full)
        future: Future[Position] = loop.create_future()
        lane.futures.append(future)
        if lane.timer is None:
            due = lane.batcher.due()
            # An idle lane's batch leaves at the end of this turn of the loop, with what else comes in it.
            if due is None or due <= now:
                lane.timer = loop.call_soon(self._leave, lane)
            else:
                lane.timer = loop.call_at(due, self._leave, lane)
        return future

    async def flush(self) -> None:
        """Send what waits, and return when every event so far is acknowledged or has failed."""
        for lane in self._lanes.values():
            self._leave(lane)
        if self._in_flight:
            await asyncio.wait(list(self._in_flight))

    def _lane(self, number: int) -> _Lane:
        lane = self._lanes.get(number)
        if lane is None:
            batcher = LaneBatcher(linger=self._linger, max_bytes=self._max_bytes)
            lane = self._lanes[number] = _Lane(number=number, batcher=batcher)
        return lane

    def _leave(self, lane: _Lane) -> None:
        batch = lane.batcher.take(asyncio.get_running_loop().time())
        if batch:
            self._send(lane, batch)

    def _send(self, lane: _Lane, batch: tuple[LifecycleEntry, ...]) -> None:
        if lane.timer is not None:
            lane.timer.cancel()
            lane.timer = None
        waiting = lane.futures[: len(batch)]
        del lane.futures[: len(batch)]
        value = self._codec.encode(LifecycleBatch(events=batch))
        appended = self._log.append(OutRecord(topic=self._topic, value=value, partition=lane.number))
        self._in_flight.add(appended)

        def settle(done: Future[Position]) -> None:
            self._in_flight.discard(done)
            _settle(waiting, done)

        appended.add_done_callback(settle)


def _settle(waiting: list[Future[Position]], appended: Future[Position]) -> None:
    """Give a batch's outcome to each of its events."""
    if appended.cancelled():
        for future in waiting:
            future.cancel()
        return
    error = appended.exception()
    for future in waiting:
        if future.done():
            continue
        if error is None:
            future.set_result(appended.result())
        else:
            future.set_exception(error)
