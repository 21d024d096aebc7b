"""Log, view and notices with a network before them: everything takes a drawn time, and some of it goes wrong.

Invariant: what `taskline.testing` promises of a log holds here too: the records of one producer and partition keep their order, also across
its death, and commits of one member do; a commit of an assignment that is over is fenced.
"""

from __future__ import annotations

import asyncio
import contextvars
from asyncio import Future
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from taskline.errors import ProducerClosed, Unavailable
from taskline.infra.intake import Commit, IntakeSink, TopicPartition
from taskline.infra.log import OutRecord, Position
from taskline.state.store import StoredTask, Write
from taskline.testing import Fault, MemoryBroker, MemoryIntake, MemoryLog, MemoryView
from taskline.testing.cancels import MemoryNotices
from taskline.testing.errors import FencedCommit
from taskline.testing.intake import _fail, _succeed
from taskline.testing.log import DeliveryError
from taskline.testing.process import VirtualProcess, current_process
from taskline.testing.world import World

if TYPE_CHECKING:
    from simulation.run import Simulation

# Records reach a partition in the order in which they were sent.
_STEP_SECONDS = 1e-5


class SimulatedBroker(MemoryBroker):
    simulation: Simulation

    def append(self, record: OutRecord) -> Position:
        position = super().append(record)
        self.simulation.trace.appended(position, record)
        return position

    def take_fault(self, topic: str) -> Fault | None:
        if self.simulation.strikes(self.simulation.faults.append):
            fault = self.simulation.rng.choice(list(Fault))
            self.simulation.trace.note("fault", f"{fault.value} {topic}")
            return fault
        return super().take_fault(topic)


class SimulatedLog(MemoryLog):
    """A producer."""

    def __init__(self, simulation: Simulation, broker: MemoryBroker, **bounds: float) -> None:
        super().__init__(broker, **bounds)  # type: ignore[arg-type]
        self._simulation = simulation
        self._process = current_process()
        self._arrivals: dict[str, float] = {}
        # Topics of which a record was lost with the process: none of its later ones arrives.
        self._cut: set[str] = set()

    def append(self, record: OutRecord) -> Future[Position]:
        simulation, loop = self._simulation, asyncio.get_running_loop()
        simulation.point("before append", record.topic, self._process)
        future: Future[Position] = loop.create_future()
        if self._severed:
            return future
        if self._closed:
            future.set_exception(ProducerClosed("the log was closed"))
            return future
        self._unacknowledged.add(future)
        future.add_done_callback(self._unacknowledged.discard)
        arrives = max(
            loop.time() + simulation.latency(), self._arrivals.get(record.topic, 0.0) + _STEP_SECONDS
        )
        self._arrivals[record.topic] = arrives
        loop.call_at(arrives, self._arrive, record, future, context=contextvars.Context())
        return future

    def _arrive(self, record: OutRecord, future: Future[Position]) -> None:
        if self._severed:
            # Some of what a dead process has sent is on its way still.
            if record.topic in self._cut or not self._broker.available or self._simulation.rng.random() < 0.5:
                self._cut.add(record.topic)
            else:
                self._broker.append(record)
            return
        if future.done():
            return
        if self._waiting or not self._broker.available:
            self._waiting.append((record, future))
            asyncio.get_running_loop().call_later(self._delivery_timeout, self._give_up, future)
        else:
            self._deliver(record, future)
        if self._simulation.point("after append", record.topic, self._process):
            return

    def _later(self, future: Future[Position], outcome: Position | DeliveryError) -> None:
        asyncio.get_running_loop().call_later(
            self._simulation.latency(), self._settle, future, outcome, context=contextvars.Context()
        )


class SimulatedIntake(MemoryIntake):
    """A member of a group."""

    simulation: Simulation

    def begin(self, simulation: Simulation) -> SimulatedIntake:
        self.simulation = simulation
        self._process: VirtualProcess | None = None
        self._epochs: Counter[TopicPartition] = Counter()
        self._last_commit = 0.0
        simulation.intakes.append(self)
        return self

    async def start(self, sink: IntakeSink) -> None:
        self._process = current_process()
        await super().start(sink)

    async def _deliver(self, sink: IntakeSink) -> None:
        while True:
            records = self._next_records()
            if records:
                self.simulation.trace.fetched(self._group.name, records)
                sink.received(records)
                await asyncio.sleep(self.simulation.latency())
            else:
                self._wake.clear()
                await self._wake.wait()
                await asyncio.sleep(self.simulation.latency())

    def assigned(self, committed: Mapping[TopicPartition, Commit]) -> None:
        self._epochs.update(tuple(committed))
        super().assigned(committed)

    def commit(self, commits: Mapping[TopicPartition, Commit]) -> Future[None]:
        simulation, loop = self.simulation, asyncio.get_running_loop()
        simulation.point("before commit", "", self._process)
        future: Future[None] = loop.create_future()
        if self._severed:
            return future
        arrives = max(loop.time() + simulation.latency(), self._last_commit + _STEP_SECONDS)
        self._last_commit = arrives
        epochs = {key: self._epochs[key] for key in commits}
        loop.call_at(arrives, self._arrive, dict(commits), epochs, future, context=contextvars.Context())
        return future

    def _arrive(
        self,
        commits: Mapping[TopicPartition, Commit],
        epochs: Mapping[TopicPartition, int],
        future: Future[None],
    ) -> None:
        simulation, loop = self.simulation, asyncio.get_running_loop()
        error: Exception | None = None
        lost = simulation.strikes(simulation.faults.commit)
        try:
            if lost and simulation.rng.random() < 0.5:
                raise Unavailable("an injected fault: the commit was lost")
            if any(self._epochs[key] != epoch for key, epoch in epochs.items()):
                raise FencedCommit("of an earlier assignment")
            self._store(commits)
            simulation.trace.committed(self._group.name, commits)
            if lost:
                raise Unavailable("an injected fault: the answer to a commit was lost")
        except (FencedCommit, Unavailable) as failed:
            error = failed
        if simulation.point("after commit", "", self._process) or self._severed:
            return
        pause, context = simulation.latency(), contextvars.Context()
        if error is None:
            loop.call_later(pause, _succeed, future, context=context)
        else:
            loop.call_later(pause, _fail, future, error, context=context)

    # ---- faults ------------------------------------------------------------------------------------------

    @property
    def process(self) -> VirtualProcess | None:
        return self._process

    def expel(self, after_seconds: float) -> None:
        """The group gives up on it; it hears of that, and joins again, so much later."""
        if self._severed or self not in self._group.members:
            return
        self._group.expel(self)
        gone = tuple(self._offsets)
        self._epochs.update(gone)
        asyncio.get_running_loop().call_later(
            after_seconds, self._come_back, gone, context=self._context.copy()
        )

    def _come_back(self, gone: Sequence[TopicPartition]) -> None:
        if self._severed or self in self._group.members or self._delivery is None:
            return
        self.lost(gone)
        self._group.join(self, self._topics)


class SimulatedView(MemoryView):
    """Cassandra, some way off."""

    simulation: Simulation

    async def apply(self, writes: Sequence[Write]) -> None:
        simulation = self.simulation
        process = current_process()
        await asyncio.sleep(simulation.latency())
        if simulation.point("before write", "", process):
            await asyncio.sleep(0)
        if simulation.strikes(simulation.faults.view):
            self.fail_next(stored=simulation.rng.randint(0, len(writes)))
        await super().apply(writes)
        simulation.trace.note("write", f"{len(writes)}")
        if simulation.point("after write", "", process):
            await asyncio.sleep(0)
        await asyncio.sleep(simulation.latency())

    async def read(self, task_id: object) -> StoredTask | None:
        simulation = self.simulation
        await asyncio.sleep(simulation.latency())
        if simulation.strikes(simulation.faults.view):
            raise Unavailable("an injected fault")
        found = await super().read(task_id)  # type: ignore[arg-type]
        await asyncio.sleep(simulation.latency())
        return found

    def wipe(self) -> None:
        """Lose everything."""
        self._rows.clear()
        self._letters = type(self._letters)(self._clock)


class SimulatedNotices(MemoryNotices):
    """Asks for the end of the notices, and hears of it later."""

    simulation: Simulation

    async def catch_up(self) -> None:
        await asyncio.sleep(self.simulation.latency())
        await super().catch_up()
        await asyncio.sleep(self.simulation.latency())


class SimulatedWorld(World):
    """What one process sees: its own clock, and the network between it and the rest."""

    __slots__ = ()
    # One simulation at a time.
    simulation: Simulation

    def log(self) -> MemoryLog:
        producer = self.settings.producer
        return SimulatedLog(
            self.simulation,
            self.broker,
            delivery_timeout_seconds=producer.delivery_timeout_seconds,
            max_buffered_records=producer.max_buffered_records,
        )

    def intake(self, group: str, *topics: str) -> MemoryIntake:
        intake = SimulatedIntake(
            self.broker,
            group,
            topics,
            session_seconds=self.settings.kafka.session_timeout_ms / 1000,
            batch_records=self.simulation.rng.choice([1, 5, 100]),
        )
        return intake.begin(self.simulation)

    def notices(self, queue: str) -> MemoryNotices:
        made = SimulatedNotices(self.broker, self.topics.cancels(queue), self.codec, self.clock)
        made.simulation = self.simulation
        return made

    def rng(self) -> object:
        return self.simulation.new_rng()
