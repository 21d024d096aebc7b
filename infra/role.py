"""What every long-running role shares: a clock, a name, and a clean stop on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from taskline.infra.telemetry import configure_logging, serve_metrics
from taskline.settings import TelemetrySettings

log = structlog.get_logger(__name__)


class Clock(Protocol):
    """The wall clock as an argument, so that tests choose the time."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch, UTC."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch, UTC."""
        return time.time_ns() // 1_000_000


# A machine that was suspended has not stood still for the others: where there is one, the clock that counts that, too.
_ELAPSING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def elapsed_seconds() -> float:
    """Seconds since some moment, suspended or not; never set, so differences are true (on one machine)."""
    return time.clock_gettime(_ELAPSING)


def process_name() -> str:
    """A name for this process that no other has had: host, pid and a random tail."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def run_role(
    name: str, telemetry: TelemetrySettings, body: Callable[[asyncio.Event], Awaitable[None]]
) -> None:
    """Run a role's coroutine until it returns or a signal sets the event that it was given.

    The first SIGTERM or SIGINT asks for a clean stop; the body decides how long that may take. uvloop is used when
    it is installed.
    """
    configure_logging(telemetry)
    port, stop_metrics = serve_metrics(telemetry)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_supervised(name, port, body))
    finally:
        stop_metrics()


async def _supervised(
    name: str, metrics_port: int | None, body: Callable[[asyncio.Event], Awaitable[None]]
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask(signum: signal.Signals) -> None:
        log.info("stopping", role=name, signal=signum.name)
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, ask, signum)
    log.info("starting", role=name, pid=os.getpid(), metrics_port=metrics_port)
    await body(stop)
    log.info("stopped", role=name)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes the event loops of this process: uvloop's where it is installed; None: asyncio's own."""
    try:
        import uvloop  # noqa: PLC0415 - optional
    except ImportError:
        return None
    return uvloop.new_event_loop
