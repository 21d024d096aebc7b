"""A registry with middleware, for child processes under test."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

from taskline.workers import Middleware, Registry, TaskContext

_PARENT = os.getpid()


class Where(Middleware):
    """Adds to the result where this has run."""

    def around(self, call_next: Callable[..., Any], payload: Any, ctx: TaskContext) -> Any:
        return self._told(call_next(payload, ctx))

    async def around_async(
        self, call_next: Callable[..., Awaitable[Any]], payload: Any, ctx: TaskContext
    ) -> Any:
        return self._told(await call_next(payload, ctx))

    def _told(self, pid: int) -> dict[str, bool]:
        return {"handler": True, "same_process": pid == os.getpid(), "child": pid != _PARENT}


registry = Registry(middleware=[Where()])


@registry.task("where")
def where(payload: Any) -> int:
    return os.getpid()


@registry.task("where.async")
async def where_async(payload: Any) -> int:
    return os.getpid()
