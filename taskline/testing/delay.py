"""The delay role in memory: the real engine, on a memory intake and a memory log."""

from __future__ import annotations

import math

from taskline.infra.tiers import Tiers
from taskline.infra.topics import waiting_topics
from taskline.processors.delay_core import Router
from taskline.processors.delay_engine import DelayEngine
from taskline.testing.role import MemoryRole
from taskline.testing.world import World


class MemoryDelay(MemoryRole):
    """Forwards what waits."""

    def __init__(self, world: World) -> None:
        """Forward the records of `world`."""
        super().__init__(world, "delay")
        # None: it has not come to it yet.
        self.engine: DelayEngine | None = None

    def outstanding(self) -> list[str]:
        """What waits, or was forwarded and is not committed, in words."""
        broker, group = self._world.broker, self._world.topics.delay_group
        lags = {topic: broker.lag(group, topic) for topic in waiting_topics(self._world.settings)}
        return [f"{lag} record(s) on {topic} waiting" for topic, lag in lags.items() if lag]

    async def _run(self) -> None:
        world, settings = self._world, self._world.settings
        log = self._log()
        intake = self._intake(world.topics.delay_group, *waiting_topics(settings))
        tiers = Tiers.of(settings.delay.tiers)
        router = Router(world.topics, tiers, settings.topics.queues)
        engine = self.engine = DelayEngine(
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
