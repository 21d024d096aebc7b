"""Spans around handlers, as parts of the traces in which their tasks were submitted. Needs the extra `otel` (opentelemetry-api).

```python
from taskline import Registry
from taskline.otel import TracingMiddleware

registry = Registry(middleware=[TracingMiddleware()])
```

Producers hand the current span's context on by themselves (`taskline.infra.trace_context`); it stays with the task through retries and replays.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

from taskline.workers import Middleware, TaskContext

try:
    from opentelemetry import context as otel_context
    from opentelemetry import trace
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError(
        "taskline.otel needs OpenTelemetry, which is not installed: pip install 'taskline[otel]'"
    ) from error

_PROPAGATOR: Final = TraceContextTextMapPropagator()
# OpenTelemetry's semantic conventions for messaging spans (semconv 1.3x, "development" still).
_SYSTEM: Final = "taskline"
_OPERATION: Final = "process"


class TracingMiddleware(Middleware):
    """A CONSUMER span around each execution of a handler. Put it first, so that other middleware is inside."""

    def __init__(
        self, *, tracer_provider: TracerProvider | None = None, relation: Literal["parent", "link"] = "parent"
    ) -> None:
        """Make spans with the global tracer provider, as it is when the first handler runs, unless another is given.

        Args:
            tracer_provider: where spans go.
            relation: what the submission's span is to the handler's. "parent": both are in one trace; "link": each execution begins a trace of its
                own, which is linked, for tasks that run long after or by the thousand.
        """
        if relation not in ("parent", "link"):
            raise ValueError(f'relation is "parent" or "link", not {relation!r}')
        self._tracer = trace.get_tracer("taskline", tracer_provider=tracer_provider)
        self._linked = relation == "link"

    def around(self, call_next: Callable[..., Any], payload: Any, ctx: TaskContext) -> Any:  # noqa: ANN401 - the handler's own types
        """See `Middleware`."""
        with self._span(ctx):
            return call_next(payload, ctx)

    async def around_async(
        self,
        call_next: Callable[..., Awaitable[Any]],
        payload: Any,  # noqa: ANN401 - the handler's own types
        ctx: TaskContext,
    ) -> Any:  # noqa: ANN401
        """See `Middleware`."""
        with self._span(ctx):
            return await call_next(payload, ctx)

    @contextmanager
    def _span(self, ctx: TaskContext) -> Iterator[Span]:
        # Of nothing else than the task: what the worker's thread or loop happens to have as its current span is not its parent.
        parent = otel_context.Context()
        links: list[Link] = []
        if ctx.traceparent is not None:
            submitted = _PROPAGATOR.extract({"traceparent": ctx.traceparent}, context=parent)
            if self._linked:
                links.append(Link(trace.get_current_span(submitted).get_span_context()))
            else:
                parent = submitted
        with self._tracer.start_as_current_span(
            f"{_OPERATION} {ctx.task_type}",
            context=parent,
            kind=SpanKind.CONSUMER,
            attributes=_attributes(ctx),
            links=links,
            # By hand, since cancellations and SystemExit are errors of a handler, too.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as error:
                span.record_exception(error)
                span.set_attribute("error.type", _name(type(error)))
                span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
                raise


def _attributes(ctx: TaskContext) -> dict[str, str | int]:
    return {
        "messaging.system": _SYSTEM,
        "messaging.operation.name": _OPERATION,
        "messaging.operation.type": _OPERATION,
        "messaging.destination.name": ctx.queue,
        "messaging.message.id": str(ctx.task_id),
        "messaging.message.conversation_id": str(ctx.root_id),
        "taskline.task_type": ctx.task_type,
        "taskline.attempt": ctx.attempt,
        "taskline.priority": ctx.priority.value,
        "taskline.tenant": ctx.tenant,
    }


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
