"""The delay role in memory: the real engine, on a memory intake and a memory log."""

from __future__ import annotations

import asyncio
import math

from taskline.infra.tiers import Tiers
from taskline.infra.topics import waiting_topics
from taskline.processors.delay_core import Router
from taskline.processors.delay_engine import DelayEngine
from taskline.testing.errors import BackgroundError
from taskline.testing.intake import MemoryIntake
from taskline.testing.process import VirtualProcess
from taskline.testing.world import World

_MS = 1_000


class MemoryDelay:
    """Forwards what waits; started, stopped and killed by the kit."""

    def __init__(self, world: World) -> None:
        """Forward the records of `world`."""
        self.name = f"memory-delay-{next(world.numbers)}"
        self._world = world
        self._process = VirtualProcess(self.name)
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process, and see it in its group."""
        self._task = self._process.spawn(self._run(), name=self.name)
        await asyncio.sleep(0)

    async def stop(self) -> None:
        """Let it hand over and leave."""
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
        """What waits, or was forwarded and is not committed, in words."""
        broker, group = self._world.broker, self._world.topics.delay_group
        lags = {topic: broker.lag(group, topic) for topic in waiting_topics(self._world.settings)}
        return [f"{lag} record(s) on {topic} waiting" for topic, lag in lags.items() if lag]

    async def _run(self) -> None:
        world, settings = self._world, self._world.settings
        log = world.log()
        self._process.tie(log.sever)
        intake = MemoryIntake(
            world.broker,
            world.topics.delay_group,
            waiting_topics(settings),
            session_seconds=settings.kafka.session_timeout_ms / _MS,
        )
        self._process.tie(intake.sever)
        tiers = Tiers.of(settings.delay.tiers)
        router = Router(world.topics, tiers, settings.topics.queues)
        engine = DelayEngine(
            intake,
            log,
            router,
            stages=[router.scheduled(), *map(router.stage, tiers.tiers)],
            settings=settings.delay,
            clock=world.clock,
            longest_sleep_seconds=math.inf,
        )
        await engine.run(self._stop)
        await log.close()
