"""One priority's records on their way from its intake to the engine, with their offsets and the back-pressure.

Invariant: a record belongs to one *assignment* of its partition, from assigned to revoked or lost. What ends after its
assignment is over changes nothing: it can neither complete an offset nor be committed.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

import structlog

from taskline.infra.intake import Commit, Intake, TopicPartition
from taskline.infra.log import InRecord
from taskline.infra.watermark import WatermarkTracker
from taskline.schemas.events import Priority
from taskline.settings import WorkerSettings
from taskline.workers import metrics

log = structlog.get_logger(__name__)

# A full buffer is refilled once half of it is used up, and a full window once a quarter is free: refilling has a cost
# (a thread's wake-up; for a partition a new fetch), so not at the first free place.
_REFILL_BUFFER = 0.5
_REOPEN_WINDOW = 0.75
# Under load progress is committed before worker.commit_interval_seconds is over, so that a crash repeats about this many
# finished records at most; a commit costs a fraction of what a hundred tasks do.
COMMIT_AFTER = 100
# How far a partition is read beyond its oldest record that is not done: past a task of minutes, thousands of short ones complete. Each costs some
# 40 bytes until then, and all that are done fit into the commit's metadata as long as worker.window bounds those that are not.
MAX_SPAN = 50_000
_REOPEN_SPAN = int(MAX_SPAN * _REOPEN_WINDOW)


class Assignment:
    """One partition from assigned to revoked or lost."""

    __slots__ = ("committed", "feed", "held", "name", "open", "tracker")

    def __init__(self, name: TopicPartition, feed: Feed, committed: Commit) -> None:
        """Begin at a group's commit."""
        self.name = name
        self.feed = feed
        self.tracker = WatermarkTracker.resumed(name, committed)
        # The last commit that is known to be stored.
        self.committed = committed
        # False: over; nothing of it is started, completed or committed any more.
        self.open = True
        # True: paused, since its window is full.
        self.held = False

    def begin(self, offset: int) -> None:
        """A record's handler is about to run in this process: whoever finds the process dead shall know of it."""
        self.tracker.begin(offset)
        self.feed.begun(self)

    def complete(self, offset: int) -> None:
        """A record is done: its outcome is acknowledged."""
        if self.open:
            self.tracker.complete(offset)
            self.feed.completed()
            if self.held:
                self.feed.reopen(self)


class Waiting:
    """A record in the buffer."""

    __slots__ = ("assignment", "priority", "record", "suspect", "tries")

    def __init__(self, record: InRecord, assignment: Assignment) -> None:
        """A record of an open assignment."""
        self.record = record
        self.assignment = assignment
        self.priority = assignment.feed.priority
        # True: it ran in a process that was found dead, so that it must not take anything with it this time.
        self.suspect = record.position.offset in assignment.tracker.suspects
        # How often it was put back because its payload's schema was not known yet.
        self.tries = 0


class FeedHost(Protocol):
    """What a feed needs of the engine."""

    def offer(self, waiting: Sequence[Waiting]) -> None:
        """Records to be run."""
        ...

    async def drain(self, assignments: Sequence[Assignment]) -> None:
        """Drop what is buffered of them, let what runs finish within the grace period, and hand back the rest."""
        ...

    def abandon(self, assignments: Sequence[Assignment]) -> None:
        """Drop what is buffered of them and stop what runs: they have another owner."""
        ...

    def fail(self, error: Exception) -> None:
        """The worker can't go on."""
        ...


class Feed:
    """The sink of one intake."""

    def __init__(self, priority: Priority, intake: Intake, host: FeedHost, settings: WorkerSettings) -> None:
        """Bounds come from worker.prefetch and worker.window."""
        self.priority = priority
        self._intake = intake
        self._host = host
        self._prefetch = settings.prefetch
        self._refill_at = int(settings.prefetch * _REFILL_BUFFER)
        self._window = settings.window
        self._reopen_at = int(settings.window * _REOPEN_WINDOW)
        self._assignments: dict[tuple[str, int], Assignment] = {}
        # Being handed over.
        self._leaving: set[Assignment] = set()
        self._buffered = 0
        self._paused = False
        self._commit: Future[None] | None = None
        # Records that were completed since the last commit was begun.
        self._uncommitted = 0
        # Where handlers have begun of which no commit tells.
        self._begun: set[Assignment] = set()
        # Who waits to hear that this process is still a member of its group.
        self._asking: list[Future[None]] = []

    @property
    def assignments(self) -> tuple[Assignment, ...]:
        """The partitions that are ours."""
        return tuple(self._assignments.values())

    @property
    def buffered(self) -> int:
        """Records that wait in memory for a slot."""
        return self._buffered

    async def start(self) -> None:
        """Let the records come."""
        await self._intake.start(self)

    async def close(self) -> None:
        """Leave the group; what is still assigned is revoked and committed."""
        await self._intake.close()

    # ---- the intake's calls (IntakeSink) -------------------------------------------------------------------

    def assigned(self, committed: Mapping[TopicPartition, Commit]) -> None:
        """See `IntakeSink`."""
        for name, commit in committed.items():
            self._assignments[name] = Assignment(TopicPartition(*name), self, commit)
            log.info(
                "partition assigned",
                topic=name[0],
                partition=name[1],
                offset=commit.offset,
                holes=commit.metadata != "",
            )

    def received(self, records: Sequence[InRecord]) -> None:
        """See `IntakeSink`."""
        waiting: list[Waiting] = []
        touched: set[Assignment] = set()
        skipped = 0
        assignments = self._assignments
        for record in records:
            position = record.position
            assignment = assignments.get((position.topic, position.partition))
            if assignment is None:
                # On its way when the partition went: its next owner reads it again.
                continue
            tracker = assignment.tracker
            if position.offset < tracker.next_offset:
                log.warning(
                    "record delivered twice",
                    topic=position.topic,
                    partition=position.partition,
                    offset=position.offset,
                    expected=tracker.next_offset,
                )
                continue
            touched.add(assignment)
            if tracker.take(position.offset):
                waiting.append(Waiting(record, assignment))
            else:
                skipped += 1
        if skipped:
            metrics.SKIPPED.inc(skipped)
        self._buffered += len(waiting)
        if self._buffered >= self._prefetch and not self._paused:
            self._paused = True
            self._intake.pause()
        for assignment in touched:
            tracker = assignment.tracker
            if (tracker.unfinished >= self._window or tracker.window >= MAX_SPAN) and not assignment.held:
                assignment.held = True
                self._intake.pause((assignment.name,))
        if waiting:
            self._host.offer(waiting)

    async def revoked(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Commit]:
        """See `IntakeSink`."""
        leaving = self._remove(partitions)
        log.info("partitions revoked", partitions=_names(leaving))
        self._leaving.update(leaving)
        await self._host.drain(leaving)
        self._leaving.difference_update(leaving)
        final: dict[TopicPartition, Commit] = {}
        for assignment in leaving:
            # A partition that was lost while it was being handed over is not ours to commit.
            if assignment.open:
                final[assignment.name] = assignment.tracker.commit(leaving=True)
                assignment.open = False
        return final

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        """See `IntakeSink`."""
        names = {tuple(name) for name in partitions}
        leaving = self._remove(partitions)
        # A hand-over that took too long ends here.
        leaving += [assignment for assignment in self._leaving if assignment.name in names]
        self._leaving.difference_update(leaving)
        log.warning("partitions lost", partitions=_names(leaving))
        for assignment in leaving:
            assignment.open = False
        self._host.abandon(leaving)
        if not self._assignments:
            asking, self._asking = self._asking, []
            _answer(asking)

    def failed(self, error: Exception) -> None:
        """See `IntakeSink`."""
        self._host.fail(error)

    # ---- the engine's calls ----------------------------------------------------------------------------------

    def left_buffer(self, count: int) -> None:
        """Note that records were taken for a slot, or dropped."""
        self._buffered -= count

    def refill(self) -> None:
        """Let more records come if there is room again."""
        if self._paused and self._buffered <= self._refill_at:
            self._paused = False
            self._intake.resume()

    def reopen(self, assignment: Assignment) -> None:
        """Let more records of a held partition come if its window has room again."""
        tracker = assignment.tracker
        if tracker.unfinished <= self._reopen_at and tracker.window <= _REOPEN_SPAN:
            assignment.held = False
            self._intake.resume((assignment.name,))

    def completed(self) -> None:
        """Note that a record is done."""
        self._uncommitted += 1
        if self._uncommitted >= COMMIT_AFTER:
            self.commit()

    def begun(self, assignment: Assignment) -> None:
        """Note that a handler is about to run; a commit that tells of it follows within the time of a poll."""
        if not self._begun and self._commit is None:
            # Once a turn of the loop.
            asyncio.get_running_loop().call_soon(self._send_begun)
        self._begun.add(assignment)

    def confirm(self) -> Future[None]:
        """Whether this process is still a member of its group: resolves when a commit that was begun from now on was stored, or nothing is ours."""
        confirmed: Future[None] = asyncio.get_running_loop().create_future()
        self._asking.append(confirmed)
        if self._commit is None:
            self.commit()
        return confirmed

    def commit(self) -> None:
        """Store the progress since the last commit, unless one is still under way."""
        if self._commit is None:
            self._uncommitted = 0
            self._send(self._assignments.values())

    def _send_begun(self) -> None:
        if self._commit is None:
            self._send(self._begun)

    def _send(self, assignments: Collection[Assignment]) -> None:
        """Begin a commit of what is new in these; of everything if somebody asks."""
        asking, self._asking = self._asking, []
        changed: list[tuple[Assignment, Commit]] = []
        for assignment in self._assignments.values() if asking else assignments:
            commit = assignment.tracker.commit()
            if asking or (assignment.open and commit != assignment.committed):
                changed.append((assignment, commit))
        self._begun.clear()
        if changed:
            self._commit = self._intake.commit({assignment.name: commit for assignment, commit in changed})
            self._commit.add_done_callback(partial(self._on_committed, changed, asking))
        else:
            _answer(asking)

    def _on_committed(
        self, changed: Sequence[tuple[Assignment, Commit]], asking: list[Future[None]], done: Future[None]
    ) -> None:
        self._commit = None
        error = None if done.cancelled() else done.exception()
        if error is None and not done.cancelled():
            for assignment, commit in changed:
                assignment.committed = commit
            _answer(asking)
            if self._asking or self._uncommitted >= COMMIT_AFTER:
                self.commit()
            elif self._begun:
                self._send(self._begun)
            return
        # Asked again with the next one, which the engine begins at regular intervals.
        self._asking += asking
        metrics.COMMIT_FAILURES.labels(self.priority.value).inc()
        log.warning("commit failed; a newer one follows", priority=self.priority.value, error=str(error))

    def _remove(self, partitions: Collection[TopicPartition]) -> list[Assignment]:
        found = [self._assignments.pop((name[0], name[1]), None) for name in partitions]
        leaving = [assignment for assignment in found if assignment is not None]
        for assignment in leaving:
            # The intake forgets the pause of what goes away, too.
            assignment.held = False
        return leaving


def _answer(asking: Sequence[Future[None]]) -> None:
    for each in asking:
        if not each.done():
            each.set_result(None)


def _names(assignments: Sequence[Assignment]) -> list[str]:
    return [f"{assignment.name.topic}/{assignment.name.partition}" for assignment in assignments]
