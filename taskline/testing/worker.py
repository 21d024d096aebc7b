"""A worker process in memory: the real engine, on memory intakes and a memory log."""

from __future__ import annotations

from taskline.infra.kafka.lifecycle import LifecycleLog
from taskline.infra.tiers import Tiers
from taskline.schemas.events import Priority
from taskline.testing.role import MemoryRole
from taskline.testing.world import World
from taskline.workers.cancels import CancelGate
from taskline.workers.engine import WorkerEngine
from taskline.workers.executor import InlineExecutor
from taskline.workers.ports import WorkerPorts
from taskline.workers.registry import Registry


class MemoryWorker(MemoryRole):
    """Serves one queue."""

    def __init__(self, world: World, registry: Registry, queue: str) -> None:
        """Serve `queue` with the tasks of `registry`."""
        super().__init__(world, "worker")
        self.queue = queue
        self._registry = registry
        # None: it has not come to it yet.
        self.engine: WorkerEngine | None = None

    def __repr__(self) -> str:
        return f"MemoryWorker({self.name!r}, queue={self.queue!r})"

    def outstanding(self) -> list[str]:
        """What its groups have not committed, in words."""
        found: list[str] = []
        topics = self._world.topics
        for priority in Priority:
            topic = topics.dispatch(self.queue, priority)
            lag = self._world.broker.lag(topics.worker_group(self.queue, priority), topic)
            if lag:
                found.append(f"{lag} record(s) on {topic} not done and committed")
        return found

    async def _run(self) -> None:
        world, settings = self._world, self._world.settings
        log, topics = self._log(), world.topics
        gate, notices = None, None
        if settings.worker.cancels:
            notices = world.notices(self.queue)
            self._process.tie(notices.sever)
            gate = CancelGate(notices, world.view, world.codec, world.clock)
            if not await self._unless_stopped(notices.start(gate.heard)):
                return
        intakes = {
            priority: self._intake(
                topics.worker_group(self.queue, priority), topics.dispatch(self.queue, priority)
            )
            for priority in Priority
        }
        ports = WorkerPorts(
            intakes=intakes,
            log=log,
            lifecycle=LifecycleLog(
                log,
                world.codec,
                topics,
                settings.topics.lanes,
                settings.worker.lifecycle_linger_ms,
            ),
            codec=world.codec,
            types=world.types,
            clock=world.clock,
            cancels=gate,
            rng=world.rng(),
            coroutines=InlineExecutor(world.clock),
            functions=InlineExecutor(),
        )
        engine = self.engine = WorkerEngine(
            self._registry,
            ports,
            settings.worker,
            topics=topics,
            tiers=Tiers.of(settings.delay.tiers),
            worker=self.name,
        )
        await engine.run(self._stop)
        if notices is not None:
            await notices.close()
        await ports.lifecycle.flush()
        await log.close()
