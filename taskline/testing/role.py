"""A role in memory: one coroutine in a process of its own, started, stopped and killed by the kit."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

from taskline.testing.errors import BackgroundError
from taskline.testing.intake import MemoryIntake
from taskline.testing.log import MemoryLog
from taskline.testing.process import VirtualProcess
from taskline.testing.world import World


class MemoryRole(ABC):
    """What the worker and the delay role have in common."""

    def __init__(self, world: World, kind: str) -> None:
        """A process of `world`, numbered among all."""
        self.name = f"memory-{kind}-{next(world.numbers)}"
        self._world = world
        self._process = VirtualProcess(self.name)
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process, and see it in its groups."""
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

    @abstractmethod
    def outstanding(self) -> list[str]:
        """What its groups have not committed, in words."""

    @abstractmethod
    async def _run(self) -> None:
        """Serve until `_stop` is set."""

    async def _unless_stopped(self, beginning: Coroutine[Any, Any, None]) -> bool:
        """Wait for a step that may have to wait for the broker; False: it was told to stop meanwhile."""
        step = asyncio.ensure_future(beginning)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((step, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not step.done():
                step.cancel()
        if not step.done():
            return False
        step.result()
        return True

    def _log(self) -> MemoryLog:
        """A log that falls silent when the process is killed."""
        log = self._world.log()
        self._process.tie(log.sever)
        return log

    def _intake(self, group: str, *topics: str) -> MemoryIntake:
        """A member of a group, which is cut off when the process is killed."""
        intake = self._world.intake(group, *topics)
        self._process.tie(intake.sever)
        return intake
