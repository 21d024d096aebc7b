"""The worker's intake on the broker in memory: a member of a consumer group, as Kafka's is.

Invariant (of the port): each record of an assigned partition is handed over once, in offset order, from the committed offset on; for
one partition the calls are assigned → received* → revoked | lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from asyncio import Future
from collections.abc import Callable, Collection, Mapping, Sequence

from taskline.errors import Unavailable
from taskline.infra.intake import Commit, Intake, IntakeSink, TopicPartition
from taskline.infra.log import InRecord
from taskline.testing.broker import MemoryBroker
from taskline.testing.errors import FencedCommit
from taskline.testing.groups import SESSION_SECONDS, MemoryGroup

# Records that are handed over in one call, over all partitions: small enough that a pause takes effect soon.
BATCH_RECORDS = 100


class MemoryIntake(Intake):
    """One member of a group, reading one or more topics. All its calls are made in the process that started it."""

    def __init__(
        self,
        broker: MemoryBroker,
        group: str,
        topics: Sequence[str],
        *,
        session_seconds: float = SESSION_SECONDS,
        batch_records: int = BATCH_RECORDS,
    ) -> None:
        """Join `group` at `start`; `session_seconds` (virtual) is how long its death goes unnoticed."""
        self._broker = broker
        self._group: MemoryGroup = broker.group(group)
        self._topics = tuple(topics)
        self._session_seconds = session_seconds
        self._batch_records = batch_records
        self._offsets: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._all_paused = False
        self._wake = asyncio.Event()
        self._sink: IntakeSink | None = None
        self._context = contextvars.Context()
        self._delivery: asyncio.Task[None] | None = None
        self._forget: Callable[[], None] = _nothing
        self._severed = False

    # ---- the port ----------------------------------------------------------------------------------------

    async def start(self, sink: IntakeSink) -> None:
        """Join the group and hand its records to `sink`."""
        self._sink = sink
        self._context = contextvars.copy_context()
        self._forget = self._broker.listen(self._wake.set)
        self._delivery = asyncio.get_running_loop().create_task(
            self._deliver(sink), name=f"intake {self._group.name}"
        )
        self._group.join(self, self._topics)

    def commit(self, commits: Mapping[TopicPartition, Commit]) -> Future[None]:
        """Store progress; fails when the broker is away (Unavailable) or a partition has moved (FencedCommit)."""
        loop = asyncio.get_running_loop()
        future: Future[None] = loop.create_future()
        if self._severed:
            return future
        try:
            self._store(commits)
        except (FencedCommit, Unavailable) as error:
            loop.call_soon(_fail, future, error)
        else:
            loop.call_soon(_succeed, future)
        return future

    def pause(self, partitions: Collection[TopicPartition] | None = None) -> None:
        """Hand over no more of these, or of any."""
        if partitions is None:
            self._all_paused = True
        else:
            self._paused.update(TopicPartition(*each) for each in partitions if each in self._offsets)

    def resume(self, partitions: Collection[TopicPartition] | None = None) -> None:
        """Undo `pause` of the same kind."""
        if partitions is None:
            self._all_paused = False
        else:
            self._paused.difference_update(partitions)
        self._wake.set()

    @property
    def paused(self) -> bool:
        """Whether the whole intake is paused."""
        return self._all_paused

    async def close(self) -> None:
        """Hand everything over and leave the group."""
        self._forget()
        self._forget = _nothing
        await self._group.leave(self)
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            delivery.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await delivery

    def sever(self) -> None:
        """The process is dead: it hears and says nothing more, and the group notices when the session is over."""
        self._severed = True
        self._offsets.clear()
        self._forget()
        self._forget = _nothing
        if self in self._group.members:
            self._group.abandon(self, after_seconds=self._session_seconds)

    # ---- the group's calls (GroupMember) -------------------------------------------------------------------

    def assigned(self, committed: Mapping[TopicPartition, Commit]) -> None:
        """Begin with these partitions."""
        if self._severed or self._sink is None:
            return
        self._offsets.update({key: commit.offset for key, commit in committed.items()})
        self._context.run(self._sink.assigned, committed)
        self._wake.set()

    async def revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Let the sink finish, commit what it says, and let go."""
        if self._sink is None:
            return
        self._drop(partitions)
        final = asyncio.get_running_loop().create_task(
            self._sink.revoked(partitions), name=f"revoke {self._group.name}", context=self._context
        )
        try:
            commits = await final
        except asyncio.CancelledError:
            if not self._severed:
                raise
            # Killed meanwhile: silence, until the group has had enough of it.
            await asyncio.sleep(self._session_seconds)
            return
        with contextlib.suppress(FencedCommit, Unavailable):
            self._store(commits)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Somebody else has these partitions."""
        self._drop(partitions)
        if self._sink is not None and not self._severed:
            self._context.run(self._sink.lost, partitions)

    # ---- inside ------------------------------------------------------------------------------------------

    def _drop(self, partitions: Collection[TopicPartition]) -> None:
        for each in partitions:
            self._offsets.pop(each, None)
            self._paused.discard(each)

    def _store(self, commits: Mapping[TopicPartition, Commit]) -> None:
        if not self._broker.available:
            raise Unavailable("the broker is away")
        self._group.commit(self, commits)

    async def _deliver(self, sink: IntakeSink) -> None:
        while True:
            records = self._next_records()
            if records:
                sink.received(records)
                # Everybody else's turn, so that a pause takes effect after one batch.
                await asyncio.sleep(0)
            else:
                self._wake.clear()
                await self._wake.wait()

    def _next_records(self) -> list[InRecord]:
        if self._all_paused or not self._broker.available:
            return []
        taken: list[InRecord] = []
        for partition, offset in self._offsets.items():
            room = self._batch_records - len(taken)
            if partition in self._paused or room <= 0:
                continue
            records = self._broker.read(partition, offset, room)
            self._offsets[partition] = offset + len(records)
            taken.extend(records)
        # The partition that was served first comes last the next time.
        if self._offsets:
            first = next(iter(self._offsets))
            self._offsets[first] = self._offsets.pop(first)
        return taken


def _nothing() -> None:
    pass


def _succeed(future: Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
