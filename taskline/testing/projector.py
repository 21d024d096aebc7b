"""A projector process in memory: the real projector's core, on the broker and the view in memory.

Invariant, as of the real role: an offset is committed only after everything before it is in the view or on the dead-letter topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from taskline.errors import Unavailable
from taskline.infra.intake import Commit, TopicPartition
from taskline.infra.log import InRecord
from taskline.infra.topics import projected_topics
from taskline.processors.projection import Layout
from taskline.processors.projector import Projector
from taskline.testing.errors import BackgroundError, FencedCommit
from taskline.testing.log import MemoryLog
from taskline.testing.process import VirtualProcess
from taskline.testing.world import World

# Virtual seconds between attempts to commit while the broker is away.
_COMMIT_PAUSE_SECONDS = 1.0


class MemoryProjector:
    """Folds the log into the view; started, paused, stopped and killed by the kit."""

    def __init__(self, world: World) -> None:
        """Read what a projector reads."""
        self._world = world
        self._topics = projected_topics(world.settings)
        self._process = VirtualProcess("memory-projector")
        self._intake = world.intake(world.topics.projector_group, *self._topics)
        self._waiting: list[InRecord] = []
        self._arrived = asyncio.Event()
        self._offsets: dict[TopicPartition, int] = {}
        self._log: MemoryLog | None = None
        self._projector: Projector | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def halted(self) -> tuple[TopicPartition, ...]:
        """Partitions whose next record was written by a newer Taskline."""
        return (
            () if self._projector is None else tuple(TopicPartition(*each) for each in self._projector.halted)
        )

    async def start(self) -> None:
        """Start the process."""
        self._task = self._process.spawn(self._run(), name="memory-projector")
        await asyncio.sleep(0)

    async def stop(self) -> None:
        """Fold what has been read, commit, and leave."""
        self._stopping = True
        self._arrived.set()
        if self._task is not None:
            await self._task
        await self._intake.close()
        if self._log is not None:
            await self._log.close()

    async def kill(self) -> None:
        """Let it die at once."""
        await self._process.kill()

    def pause(self) -> None:
        """Read nothing more."""
        self._intake.pause()

    def resume(self) -> None:
        """Read on."""
        self._intake.resume()

    @property
    def paused(self) -> bool:
        """Whether it is kept from reading."""
        return self._intake.paused

    def check(self) -> None:
        """Be loud when it has ended by itself.

        Raises:
            BackgroundError: with what ended it as its cause.
        """
        if self._task is not None and self._task.done() and not self._stopping:
            error = None if self._task.cancelled() else self._task.exception()
            raise BackgroundError("the projector ended by itself") from error

    def outstanding(self) -> list[str]:
        """What it has not put into the view and committed, in words; nothing while it is paused."""
        if self.paused:
            return []
        broker, group = self._world.broker, self._world.topics.projector_group
        halted = self.halted
        lags = {
            topic: sum(
                broker.partition_lag(group, key) for key in broker.partitions(topic) if key not in halted
            )
            for topic in self._topics
        }
        return [f"{lag} record(s) on {topic} not in the view" for topic, lag in lags.items() if lag]

    # ---- the intake's calls (IntakeSink) -------------------------------------------------------------------

    def assigned(self, committed: Mapping[TopicPartition, Commit]) -> None:
        """See `IntakeSink`."""
        self._offsets.update({key: commit.offset for key, commit in committed.items()})
        if self._projector is not None:
            for key, commit in committed.items():
                self._projector.resumed(key, commit.offset)

    def received(self, records: Sequence[InRecord]) -> None:
        """See `IntakeSink`."""
        self._waiting.extend(records)
        self._arrived.set()

    async def revoked(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Commit]:
        """See `IntakeSink`."""
        self._drop(partitions)
        return {key: Commit(offset=self._offsets.pop(key)) for key in partitions if key in self._offsets}

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        """See `IntakeSink`."""
        self._drop(partitions)
        for key in partitions:
            self._offsets.pop(key, None)

    def failed(self, error: Exception) -> None:
        """See `IntakeSink`."""
        raise error

    # ---- inside ------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        world = self._world
        self._log = world.log()
        self._process.tie(self._log.sever)
        self._process.tie(self._intake.sever)
        self._projector = Projector(
            world.view, self._log, world.codec, Layout.of(world.settings), clock=world.clock
        )
        await self._intake.start(self)
        while not self._stopping:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                # As the real role, a flush takes what has come, up to a bound.
                taken = self._waiting[: world.settings.projector.flush_records]
                del self._waiting[: len(taken)]
                await self._projector.fold(taken)
                await self._commit(taken, self._projector)

    async def _commit(self, records: Sequence[InRecord], projector: Projector) -> None:
        # In an order of its own, for runs that are to be repeated exactly.
        touched: dict[TopicPartition, None] = {}
        for record in records:
            key = TopicPartition(record.position.topic, record.position.partition)
            if key in self._offsets and projector.settles(record):
                self._offsets[key] = record.position.offset + 1
                touched[key] = None
        while commits := {key: Commit(offset=self._offsets[key]) for key in touched if key in self._offsets}:
            try:
                await self._intake.commit(commits)
            except FencedCommit:
                # Its new owner folds it again.
                return
            except Unavailable:
                await asyncio.sleep(_COMMIT_PAUSE_SECONDS)
            else:
                return

    def _drop(self, partitions: Collection[TopicPartition]) -> None:
        gone = set(partitions)
        self._waiting = [
            record
            for record in self._waiting
            if TopicPartition(record.position.topic, record.position.partition) not in gone
        ]
