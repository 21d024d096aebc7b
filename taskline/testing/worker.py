"""A worker process in memory: the real engine, on memory intakes and a memory log."""

from __future__ import annotations

import asyncio

from taskline.infra.kafka.lifecycle import LifecycleLog
from taskline.infra.tiers import Tiers
from taskline.schemas.events import Priority
from taskline.testing.errors import BackgroundError
from taskline.testing.intake import MemoryIntake
from taskline.testing.process import VirtualProcess
from taskline.testing.world import World
from taskline.workers.engine import WorkerEngine
from taskline.workers.executor import InlineExecutor
from taskline.workers.ports import WorkerPorts
from taskline.workers.registry import Registry

_MS = 1_000


class MemoryWorker:
    """Serves one queue; started, stopped and killed by the kit."""

    def __init__(self, world: World, registry: Registry, queue: str) -> None:
        """Serve `queue` with the tasks of `registry`."""
        self.name = f"memory-worker-{next(world.numbers)}"
        self.queue = queue
        self._world = world
        self._registry = registry
        self._process = VirtualProcess(self.name)
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"MemoryWorker({self.name!r}, queue={self.queue!r})"

    async def start(self) -> None:
        """Start the process, and see it in its groups."""
        self._task = self._process.spawn(self._run(), name=self.name)
        await asyncio.sleep(0)

    async def stop(self) -> None:
        """Let it drain and leave."""
        self._stop.set()
        if self._task is not None:
            await self._task

    async def kill(self) -> None:
        """Let it die at once."""
        await self._process.kill()

    def check(self) -> None:
        """Be loud when it has ended by itself.

        Raises:
            BackgroundError: with what ended it as its cause.
        """
        if self._task is not None and self._task.done() and not self._stop.is_set():
            error = None if self._task.cancelled() else self._task.exception()
            raise BackgroundError(f"{self.name} ended by itself") from error

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
        log = world.log()
        self._process.tie(log.sever)
        intakes = {priority: self._intake(priority) for priority in Priority}
        ports = WorkerPorts(
            intakes=intakes,
            log=log,
            lifecycle=LifecycleLog(
                log,
                world.codec,
                world.topics,
                settings.topics.lanes,
                settings.worker.lifecycle_linger_ms,
            ),
            codec=world.codec,
            types=world.types,
            clock=world.clock,
            coroutines=InlineExecutor(world.clock),
            functions=InlineExecutor(),
        )
        engine = WorkerEngine(
            self._registry,
            ports,
            settings.worker,
            topics=world.topics,
            tiers=Tiers.of(settings.delay.tiers),
            worker=self.name,
        )
        await engine.run(self._stop)
        await ports.lifecycle.flush()
        await log.close()

    def _intake(self, priority: Priority) -> MemoryIntake:
        topics = self._world.topics
        intake = MemoryIntake(
            self._world.broker,
            topics.worker_group(self.queue, priority),
            [topics.dispatch(self.queue, priority)],
            session_seconds=self._world.settings.kafka.session_timeout_ms / _MS,
        )
        self._process.tie(intake.sever)
        return intake
