"""A child process that runs handlers: what it is made of, from its fork to its end.

Invariant: it lives no longer than its line to the worker. When the worker hangs up or dies, an idle child ends at once and
a busy one is killed a moment later, whatever its handler does, with all that the handler has started.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import structlog

from taskline.errors import InvalidRegistry
from taskline.infra.telemetry import configure_logging
from taskline.settings import TelemetrySettings
from taskline.workers.child_answers import Answers
from taskline.workers.child_frames import BROKEN, READY, CorruptFrame, encode
from taskline.workers.child_limits import MemoryLimit, rss_bytes
from taskline.workers.child_loop import serve_loop
from taskline.workers.child_plain import serve_plain
from taskline.workers.registry import load_registry

log = structlog.get_logger(__name__)

# How long a child may take to end by itself when the worker has hung up: enough to flush, too little to do anything twice.
LEAVE_SECONDS = 0.5
_EXIT_BROKEN = 70


class Kind(IntEnum):
    """What a child can do."""

    # One handler at a time.
    PLAIN = 1
    # Many coroutines at once.
    LOOP = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildConfig:
    """What a child must know; it can be pickled."""

    # module:attribute
    registry: str
    max_result_bytes: int
    # What a child may have more than at its birth; None: anything.
    memory_mb: int | None = None
    # TelemetrySettings as plain values.
    telemetry: dict[str, Any]


def run_child(kind: Kind, sock: socket.socket, config: ChildConfig) -> int:
    """Serve a worker at the other end of `sock` until it hangs up; returns the process's exit status."""
    _be_deaf()
    _watch_lifeline(sock)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            # A killed child loses what it has not flushed.
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    configure_logging(TelemetrySettings.model_validate(config.telemetry))
    try:
        registry = load_registry(config.registry)
    except InvalidRegistry as error:
        return _leave(sock, str(error))
    answers = Answers(registry, config.max_result_bytes, MemoryLimit(config.memory_mb))
    try:
        sock.sendall(encode((READY, rss_bytes("self") or 0)))
        (serve_loop if kind is Kind.LOOP else serve_plain)(sock, answers)
    except CorruptFrame as error:
        log.critical("a child process can't read what the worker sent", error=str(error))
        return _EXIT_BROKEN
    except OSError:
        # The worker hung up while an answer was on its way.
        return 0
    return 0


def _leave(sock: socket.socket, why: str) -> int:
    with contextlib.suppress(OSError):
        sock.sendall(encode((BROKEN, why)))
    return _EXIT_BROKEN


def _be_deaf() -> None:
    # The worker decides when its children end; a terminal's Ctrl-C and a supervisor's SIGTERM reach them as well. Functions, since an ignored
    # signal would stay ignored in the programs that handlers start.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _ignore)
    os.register_at_fork(after_in_child=_hear_again)


def _ignore(signum: int, frame: object) -> None:
    """Do nothing."""


def _hear_again() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(signum, signal.SIG_DFL)


def _watch_lifeline(sock: socket.socket) -> None:
    threading.Thread(target=_follow, args=(sock.fileno(),), name="taskline-lifeline", daemon=True).start()


def _follow(fileno: int) -> None:
    poll = select.poll()
    # No events asked for: only the hang-up is reported, which is what a worker's death looks like.
    poll.register(fileno, 0)
    poll.poll()
    time.sleep(LEAVE_SECONDS)
    # With all that the handler has started: a child leads a process group of its own.
    os.killpg(os.getpid(), signal.SIGKILL)
