"""One priority's records on their way from its group to a gateway, and the offsets of those that are lent.

Invariants:
- A record is *done* when its lease is in the log with a guard, or when it went elsewhere: from then on the lease keeps the task, and not the offset.
- `stored` says that a done record's progress is committed, so that no later owner of the partition takes it again. A member that
  the group has fenced hears False, and hands out nothing.
- What is only in memory is never done: the partition's next owner reads it, and no attempt is spent.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import structlog

from taskline.infra.intake import Commit, Intake, TopicPartition
from taskline.infra.log import InRecord
from taskline.infra.watermark import WatermarkTracker
from taskline.schemas.events import Priority

log = structlog.get_logger(__name__)

# A full partition is read on once half of its room is free: a new fetch has a cost.
_REOPEN = 0.5
# A commit that failed is repeated: in a rebalance it takes some attempts.
_COMMIT_PAUSE_SECONDS = 0.1


class LeaseAssignment:
    """One partition from assigned to revoked or lost."""

    __slots__ = (
        "buffered",
        "committed",
        "feed",
        "final",
        "held",
        "lost",
        "name",
        "open",
        "priority",
        "tracker",
    )

    def __init__(self, name: TopicPartition, feed: LeaseFeed, committed: Commit) -> None:
        """Begin at a group's commit."""
        self.name = name
        self.feed = feed
        self.priority = feed.priority
        self.tracker = WatermarkTracker.resumed(name, committed)
        self.committed = committed
        # False: it is on its way to another owner, or there.
        self.open = True
        # True: it has another owner already.
        self.lost = False
        # True: its final commit was made, and nothing can be added to it.
        self.final = False
        # Records of it that wait in memory.
        self.buffered = 0
        self.held = False

    def complete(self, offset: int) -> bool:
        """A record is done; False: it is its next owner's to say."""
        if self.lost or self.final:
            return False
        self.tracker.complete(offset)
        self.feed.reopen(self)
        return True

    def left(self, count: int = 1) -> None:
        """Records left the memory."""
        self.buffered -= count
        self.feed.reopen(self)

    @property
    def full(self) -> bool:
        """Whether nothing more is read of it."""
        return self.held


class FeedHost(Protocol):
    """What a feed needs of the gateway."""

    def take(self, record: InRecord, assignment: LeaseAssignment) -> None:
        """A record that is not done."""
        ...

    def forget(self, assignments: Collection[LeaseAssignment]) -> None:
        """Drop what is in memory of them."""
        ...

    async def settle(self, assignments: Collection[LeaseAssignment]) -> None:
        """Return once nothing of them is about to be written, or soon all the same."""
        ...

    def fail(self, error: Exception) -> None:
        """The gateway can't go on."""
        ...


class LeaseFeed:
    """The sink of one intake."""

    def __init__(
        self,
        priority: Priority,
        intake: Callable[[], Intake],
        host: FeedHost,
        *,
        buffer: int,
        window: int,
    ) -> None:
        """Each partition may have `buffer` records in memory, and `window` between its oldest that is not done and its newest.

        Args:
            priority: of its topic.
            intake: makes a member of the group, anew each time that it joins.
            host: the gateway.
            buffer: records of one partition in memory.
            window: records of one partition above its committed offset.
        """
        self.priority = priority
        self._make = intake
        self._intake: Intake | None = None
        self._host = host
        self._buffer = buffer
        self._window = window
        self._assignments: dict[tuple[str, int], LeaseAssignment] = {}
        # Being handed over.
        self._leaving: set[LeaseAssignment] = set()
        self._waiting: list[tuple[LeaseAssignment, Future[bool]]] = []
        self._committing: asyncio.Task[None] | None = None

    @property
    def assignments(self) -> tuple[LeaseAssignment, ...]:
        """The partitions that are ours."""
        return tuple(self._assignments.values())

    async def join(self) -> None:
        """Become a member of the group."""
        self._intake = self._make()
        await self._intake.start(self)

    async def leave(self) -> None:
        """Leave it; what is in memory is its next owner's."""
        intake = self._intake
        if intake is None:
            return
        await intake.close()
        self._intake = None
        if self._committing is not None:
            # The answer that it waits for will not come.
            self._committing.cancel()
        for assignment, future in self._waiting:
            if not future.done():
                future.set_result(not assignment.lost)
        self._waiting.clear()

    async def stored(self, assignment: LeaseAssignment) -> bool:
        """Wait until what is done of the partition is committed; False: it has another owner.

        What is done while a partition is being handed over is part of its final commit.
        """
        if not assignment.open:
            return not assignment.lost
        future: Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((assignment, future))
        self.commit()
        return await future

    def commit(self) -> None:
        """Store the progress, unless that is under way (it then goes on with what came meanwhile)."""
        if self._committing is None or self._committing.done():
            self._committing = asyncio.create_task(self._commit(), name=f"lease-commit-{self.priority.value}")

    # ---- the intake's calls (IntakeSink) ------------------------------------------------------------------------------

    def assigned(self, committed: Mapping[TopicPartition, Commit]) -> None:
        """See `IntakeSink`."""
        for name, commit in committed.items():
            self._assignments[name] = LeaseAssignment(TopicPartition(*name), self, commit)
            log.info("partition assigned", topic=name[0], partition=name[1], offset=commit.offset)

    def received(self, records: Sequence[InRecord]) -> None:
        """See `IntakeSink`."""
        touched: set[LeaseAssignment] = set()
        for record in records:
            position = record.position
            assignment = self._assignments.get((position.topic, position.partition))
            if assignment is None or position.offset < assignment.tracker.next_offset:
                continue
            if assignment.tracker.take(position.offset):
                touched.add(assignment)
                assignment.buffered += 1
                self._host.take(record, assignment)
        for assignment in touched:
            crowded = assignment.buffered >= self._buffer or assignment.tracker.window >= self._window
            if crowded and not assignment.held and self._intake is not None:
                assignment.held = True
                self._intake.pause((assignment.name,))

    async def revoked(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Commit]:
        """See `IntakeSink`."""
        leaving = self._remove(partitions)
        log.info(
            "partitions revoked", partitions=[f"{each.name.topic}/{each.name.partition}" for each in leaving]
        )
        for assignment in leaving:
            assignment.open = False
        self._leaving.update(leaving)
        self._answer(leaving, stored=True)
        self._host.forget(leaving)
        await self._host.settle(leaving)
        self._leaving.difference_update(leaving)
        for assignment in leaving:
            assignment.final = True
        return {each.name: each.tracker.commit() for each in leaving if not each.lost}

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        """See `IntakeSink`."""
        names = {tuple(name) for name in partitions}
        leaving = self._remove(partitions)
        # A hand-over that took too long ends here.
        leaving += [assignment for assignment in self._leaving if assignment.name in names]
        log.warning(
            "partitions lost", partitions=[f"{each.name.topic}/{each.name.partition}" for each in leaving]
        )
        for assignment in leaving:
            assignment.open, assignment.lost = False, True
        self._answer(leaving, stored=False)
        self._host.forget(leaving)

    def failed(self, error: Exception) -> None:
        """See `IntakeSink`."""
        self._host.fail(error)

    # ---- inside ---------------------------------------------------------------------------------------------------

    def reopen(self, assignment: LeaseAssignment) -> None:
        """Read a full partition on, if there is room again."""
        if (
            assignment.held
            and assignment.open
            and self._intake is not None
            and assignment.buffered <= self._buffer * _REOPEN
            and assignment.tracker.window <= self._window * _REOPEN
        ):
            assignment.held = False
            self._intake.resume((assignment.name,))

    async def _commit(self) -> None:
        while True:
            # They stay in the list meanwhile: a hand-over answers them, which this thread's commit can't outlast.
            waiting = list(self._waiting)
            commits = {each: each.tracker.commit() for each in self._assignments.values()}
            changed = {each: commit for each, commit in commits.items() if commit != each.committed}
            if changed and self._intake is not None:
                try:
                    await self._intake.commit({each.name: commit for each, commit in changed.items()})
                except Exception as error:
                    log.warning(
                        "commit failed; a newer one follows", priority=self.priority.value, error=str(error)
                    )
                    await asyncio.sleep(_COMMIT_PAUSE_SECONDS)
                    continue
                for each, commit in changed.items():
                    each.committed = commit
            for assignment, future in waiting:
                if not future.done():
                    future.set_result(not assignment.lost)
            self._waiting = [each for each in self._waiting if not each[1].done()]
            if not self._waiting:
                return

    def _answer(self, leaving: Collection[LeaseAssignment], *, stored: bool) -> None:
        for assignment, future in self._waiting:
            if assignment in leaving and not future.done():
                future.set_result(stored)

    def _remove(self, partitions: Collection[TopicPartition]) -> list[LeaseAssignment]:
        found = [self._assignments.pop((name[0], name[1]), None) for name in partitions]
        leaving = [assignment for assignment in found if assignment is not None]
        for assignment in leaving:
            assignment.held = False
        return leaving
