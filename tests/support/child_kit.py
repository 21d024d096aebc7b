"""Executors with real child processes, and a context for handlers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from typing import Any

import uvloop
from child_tasks import registry

from taskline.schemas.events import Priority
from taskline.schemas.ids import new_task_id
from taskline.workers import TaskContext
from taskline.workers.child import ChildConfig
from taskline.workers.children_server import ForkServer
from taskline.workers.executor import EncodedResult

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
MAX_RESULT_BYTES = 1_000_000


def context(*, soft_seconds: float | None = None, **changes: Any) -> TaskContext:
    task_id = new_task_id(1_900_000_000_000)
    values: dict[str, Any] = {
        "task_id": task_id,
        "root_id": task_id,
        "task_type": "t",
        "attempt": 1,
        "tenant": "acme",
        "queue": "default",
        "priority": Priority.NORMAL,
        "deadline_ms": 0,
        "soft_deadline_ms": None if soft_seconds is None else round((time.time() + soft_seconds) * 1_000),
    }
    return TaskContext(**(values | changes))


def config(reference: str = "child_tasks:registry", memory_mb: int | None = None) -> ChildConfig:
    return ChildConfig(
        registry=reference, max_result_bytes=MAX_RESULT_BYTES, memory_mb=memory_mb, telemetry={}
    )


class Children:
    """An event loop, and a fork server that lives as long; tests make executors on it."""

    def __init__(
        self, loop: str, memory_mb: int | None = None, *, reference: str = "child_tasks:registry"
    ) -> None:
        self._runner = asyncio.Runner(loop_factory=LOOPS[loop])
        self.server = ForkServer(config(reference, memory_mb=memory_mb))

    @contextmanager
    def open(self) -> Any:
        with self._runner:
            yield self
            self._runner.run(self.server.close())

    def run(self, scenario: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(scenario, 60))


async def run(executor: Any, name: str, payload: Any = None, ctx: TaskContext | None = None) -> bytes | None:
    task = registry.get(name)
    assert task is not None
    result = await executor.run(task, payload, ctx or context())
    assert isinstance(result, EncodedResult)
    return result.data


def exists(pid: int) -> bool:
    """Whether a process is there, and more than a zombie that its parent has not looked at yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill(pid: int) -> None:
    os.kill(pid, 9)


async def until(condition: Callable[[], Any], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - processes set no event
            await asyncio.sleep(0.01)
