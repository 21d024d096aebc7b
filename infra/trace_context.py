"""The caller's trace context, for whoever uses OpenTelemetry, at no cost for whoever does not.

Invariant: OpenTelemetry is not imported from here. A process that has a current span has imported it; in any other there is nothing to hand on.
"""

from __future__ import annotations

import sys


def current_traceparent() -> str | None:
    """The current span as W3C Trace Context has it (version 00); None: there is none, or nobody traces."""
    # Nothing yet, while it is being imported on another thread.
    get_current_span = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    if get_current_span is None:
        return None
    span = get_current_span().get_span_context()
    if not span.is_valid:
        return None
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
