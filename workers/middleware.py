"""Code around every handler of a registry: context, tracing, metrics, checks.

    class Timing(Middleware):
        def after(self, ctx, outcome):
            histogram.labels(ctx.task_type).observe(...)

    registry = Registry(middleware=[TracingMiddleware(), Timing()])

Invariant: middleware is part of the handler's run. It runs where the handler runs (in its child process, on its thread, in its asyncio task), inside its time
limits, and what it raises is the task's failure like what the handler raises. The first that was added is the outermost: the first to begin
and the last to end, whatever its neighbours do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

from taskline.workers.context import TaskContext

CallNext = Callable[[Any, TaskContext], Any]
AsyncCallNext = Callable[[Any, TaskContext], Awaitable[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class HandlerOutcome:
    """How a handler's run ended, as its middleware sees it."""

    # What it returned.
    result: Any = None
    # What it raised, an `asyncio.CancelledError` or `SystemExit` as well; None: it returned.
    error: BaseException | None = None

    @property
    def ok(self) -> bool:
        """Whether it returned."""
        return self.error is None


class Middleware:
    """Derive from this, and override the hooks you need: `before` and `after`, or both `around` methods for what must enclose the handler.

    One instance serves all executions of a process, also at the same time: what belongs to one execution goes into local variables of
    `around`, or context variables.
    """

    def before(self, ctx: TaskContext) -> None:
        """Called before the handler; short, since an event loop may wait for it. What it raises keeps the handler from being called."""

    def after(self, ctx: TaskContext, outcome: HandlerOutcome) -> None:
        """Called after it, however it ended, if `before` returned. What it raises takes the outcome's place."""

    def around(self, call_next: CallNext, payload: Any, ctx: TaskContext) -> Any:  # noqa: ANN401 - the handler's own types
        """Run a plain function: `call_next(payload, ctx)` is what is further in, and returns the handler's result.

        Another payload or context may be handed on, another result returned, and `call_next` left out or called again.
        """
        self.before(ctx)
        try:
            result = call_next(payload, ctx)
        except BaseException as error:
            self.after(ctx, HandlerOutcome(error=error))
            raise
        self.after(ctx, HandlerOutcome(result=result))
        return result

    async def around_async(self, call_next: AsyncCallNext, payload: Any, ctx: TaskContext) -> Any:  # noqa: ANN401 - the handler's own types
        """As `around`, for a coroutine function: `await call_next(payload, ctx)`."""
        self.before(ctx)
        try:
            result = await call_next(payload, ctx)
        except BaseException as error:
            self.after(ctx, HandlerOutcome(error=error))
            raise
        self.after(ctx, HandlerOutcome(result=result))
        return result


# In these a plain function's soft time limit raises nothing: the handler has not begun, or has ended, and its result would be lost.
FRAMES: frozenset[CodeType] = frozenset({Middleware.around.__code__})


def missing_hook(middleware: Middleware, *, is_async: bool) -> str | None:
    """The method that this middleware lacks to enclose such a handler, when it has the other kind's; None: nothing is amiss."""
    own = type(middleware)
    plain, coroutines = own.around is not Middleware.around, own.around_async is not Middleware.around_async
    if plain == coroutines:
        return None
    if is_async:
        return "around_async" if plain else None
    return "around" if coroutines else None


def layered(call: CallNext, middleware: Sequence[Middleware], *, is_async: bool) -> CallNext:
    """A handler's `call` inside the middleware, the first outermost."""
    for each in reversed(middleware):
        # Partials, which have no frames of their own.
        call = partial(each.around_async if is_async else each.around, call)
    return call
