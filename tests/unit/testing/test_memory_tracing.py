"""Traces from the submission to the handler, through the whole of Taskline in memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from taskline import Permanent, Registry, TaskContext
from taskline.otel import TracingMiddleware
from taskline.settings import Settings
from taskline.testing import InMemoryTaskline

SETTINGS = Settings.model_validate({"worker": {"retry_base_seconds": 1.0}})


class Traces:
    """A provider of its own (the global one can be set once per process), and what was exported."""

    def __init__(self, relation: Any = "parent") -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")
        self.registry = Registry(middleware=[TracingMiddleware(tracer_provider=provider, relation=relation)])
        self.inside: list[int] = []

        @self.registry.task("plain")
        def plain(payload: Any) -> None:
            self.inside.append(get_current_span().get_span_context().span_id)

        @self.registry.task("coroutine")
        async def coroutine(payload: Any) -> None:
            await asyncio.sleep(0.1)
            self.inside.append(get_current_span().get_span_context().span_id)

        @self.registry.task("fails-once", max_retries=2)
        async def fails_once(payload: Any, ctx: TaskContext) -> None:
            if ctx.attempt == 1:
                raise ConnectionError("first")

        @self.registry.task("dies")
        def dies(payload: Any, ctx: TaskContext) -> None:
            raise Permanent("never")

        @self.registry.task("slow", timeout=5, max_retries=0)
        async def slow(payload: Any) -> None:
            await asyncio.sleep(60)

    def spans(self) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.kind is SpanKind.CONSUMER]


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.fixture
def tl(traces: Traces) -> Iterator[InMemoryTaskline]:
    with InMemoryTaskline(traces.registry, settings=SETTINGS) as made:
        yield made


@pytest.mark.parametrize("name", ["plain", "coroutine"])
def test_a_handler_s_span_is_a_child_of_the_submitter_s(
    tl: InMemoryTaskline, traces: Traces, name: str
) -> None:
    with traces.tracer.start_as_current_span("submits") as submitter:
        task = tl.submit(name, None, priority="high")
    tl.run_until_idle()
    (span,) = traces.spans()
    assert span.name == f"process {name}"
    assert span.context is not None
    assert span.parent is not None
    assert span.context.trace_id == submitter.get_span_context().trace_id
    assert span.parent.span_id == submitter.get_span_context().span_id
    assert traces.inside == [span.context.span_id]
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes or {}) == {
        "messaging.system": "taskline",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "default",
        "messaging.message.id": str(task.task_id),
        "messaging.message.conversation_id": str(task.task_id),
        "taskline.task_type": name,
        "taskline.attempt": 1,
        "taskline.priority": "high",
        "taskline.tenant": "default",
    }


def test_a_submission_s_own_trace_context_is_kept(tl: InMemoryTaskline, traces: Traces) -> None:
    given = f"00-{'a' * 32}-{'b' * 16}-01"
    with traces.tracer.start_as_current_span("submits"):
        tl.submit("plain", None, traceparent=given)
    tl.run_until_idle()
    (span,) = traces.spans()
    assert span.context is not None
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == ("a" * 32, "b" * 16)


def test_without_one_a_handler_begins_a_trace(tl: InMemoryTaskline, traces: Traces) -> None:
    tl.submit("plain", None)
    # Not even a child of what is current where the worker runs.
    with traces.tracer.start_as_current_span("elsewhere"):
        tl.run_until_idle()
    (span,) = traces.spans()
    assert span.parent is None


def test_a_retry_and_a_replay_are_in_the_same_trace(tl: InMemoryTaskline, traces: Traces) -> None:
    with traces.tracer.start_as_current_span("submits") as submitter:
        tl.submit("fails-once", None)
        dead = tl.submit("dies", None)
    tl.run_until_idle()
    tl.replay(dead.task_id)
    tl.run_until_idle()
    trace_id = submitter.get_span_context().trace_id
    spans = traces.spans()
    assert {span.context.trace_id for span in spans if span.context} == {trace_id}
    told = sorted((span.name, (span.attributes or {})["taskline.attempt"]) for span in spans)
    assert told == [
        ("process dies", 1),
        ("process dies", 1),
        ("process fails-once", 1),
        ("process fails-once", 2),
    ]
    roots = {
        (span.attributes or {})["messaging.message.conversation_id"] for span in spans if "dies" in span.name
    }
    assert roots == {str(dead.task_id)}


def test_a_failure_is_marked(tl: InMemoryTaskline, traces: Traces) -> None:
    tl.submit("fails-once", None)
    tl.submit("slow", None)
    tl.run_until_idle()
    by_name = {span.name + str((span.attributes or {})["taskline.attempt"]): span for span in traces.spans()}
    failed = by_name["process fails-once1"]
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description == "ConnectionError: first"
    assert (failed.attributes or {})["error.type"] == "ConnectionError"
    assert [event.name for event in failed.events] == ["exception"]
    assert by_name["process fails-once2"].status.status_code is StatusCode.UNSET
    # One that its time limit cancels, too.
    assert (by_name["process slow1"].attributes or {})["error.type"] == "asyncio.exceptions.CancelledError"


def test_links_instead_of_parents() -> None:
    traces = Traces("link")
    with InMemoryTaskline(traces.registry) as tl:
        with traces.tracer.start_as_current_span("submits") as submitter:
            tl.submit("plain", None)
        tl.submit("plain", None)
        tl.run_until_idle()
    linked, alone = sorted(traces.spans(), key=lambda span: -len(span.links))
    assert linked.parent is None
    assert linked.context is not None
    assert linked.context.trace_id != submitter.get_span_context().trace_id
    assert [link.context.span_id for link in linked.links] == [submitter.get_span_context().span_id]
    assert alone.links == ()
    with pytest.raises(ValueError, match="relation"):
        TracingMiddleware(relation="sibling")  # type: ignore[arg-type]


def test_whoever_does_not_have_it_is_told_what_to_install() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
from taskline import Registry, TaskProducer
try:
    import taskline.otel
except ImportError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout.strip().endswith("pip install 'taskline[otel]'")
