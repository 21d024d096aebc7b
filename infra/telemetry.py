"""Logs and metrics of every role: structured lines on stderr, Prometheus numbers over HTTP."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import structlog
from prometheus_client import start_http_server

from taskline.settings import TelemetrySettings

# Libraries that narrate at INFO what is only of interest when hunting a fault in them.
_CHATTY = ("aiokafka", "cassandra", "faust", "mode", "httpx", "httpcore")


def configure_logging(telemetry: TelemetrySettings) -> None:
    """Send structlog's and the standard library's records to stderr in one format.

    JSON lines unless the format is `console`, or `auto` on a terminal.
    """
    console = telemetry.log_format == "console" or (telemetry.log_format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        # Without local variables: they hold payloads, which do not belong into logs.
        structlog.dev.ConsoleRenderer(
            exception_formatter=structlog.dev.RichTracebackFormatter(show_locals=False)
        )
        if console
        else structlog.processors.JSONRenderer()
    )
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if not console:
        shared.append(structlog.processors.format_exc_info)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = telemetry.log_level.upper()
    root.setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level]))
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        cache_logger_on_first_use=True,
    )


def serve_metrics(telemetry: TelemetrySettings) -> tuple[int | None, Callable[[], None]]:
    """Serve the process's metrics when a port is set.

    Returns:
        The port in use (None: off), and a function that stops the server.
    """
    if telemetry.metrics_port is None:
        return None, lambda: None
    server, thread = start_http_server(telemetry.metrics_port, telemetry.metrics_host)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop
