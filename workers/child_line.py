"""The line of a handler that has a child's main thread for itself, so that nobody reads the socket while it runs.

Invariants: a frame is written whole: under the lock, and in a Python frame (`FRAMES`) in which the soft time limit raises nothing. While a handler
runs, the worker sends its child nothing but STOP, so whatever can be read then is one (or the end: the worker is gone).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from types import CodeType

from taskline.workers.child_frames import PROGRESS, encode
from taskline.workers.line import Line

# At most so often a child speaks of its progress; the worker has a pace of its own, and this only keeps its loop from being flooded.
LEAST_PAUSE_SECONDS = 0.1
_PEEK = int(socket.MSG_PEEK) | int(socket.MSG_DONTWAIT)


class PlainLine(Line):
    """One execution's end of the line."""

    __slots__ = ("_latest", "_lock", "_next", "_number", "_open", "_pid", "_sock", "_timer")

    def __init__(self, sock: socket.socket, number: int) -> None:
        """`number` is the order's."""
        self._sock = sock
        self._number = number
        self._lock = threading.Lock()
        self._latest = b""
        self._next = 0.0
        self._timer: threading.Timer | None = None
        self._open = True
        # Processes that the handler forks have the socket, too, and must not speak on it.
        self._pid = os.getpid()

    @property
    def stopping(self) -> bool:
        """See `Line`."""
        try:
            self._sock.recv(1, _PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def progress(self, fraction: float | None, message: str | None) -> None:
        """See `Line`."""
        frame = encode((PROGRESS, self._number, fraction, message))
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._open:
                return
            self._latest = frame
            wait = self._next - time.monotonic()
            if self._timer is not None:
                return
            if wait <= 0:
                self._send()
                return
            timer = threading.Timer(wait, self._late)
            timer.daemon = True
            # RuntimeError: no thread can be had; then this one is lost.
            with contextlib.suppress(RuntimeError):
                timer.start()
                self._timer = timer

    def close(self) -> None:
        """The handler has ended: nothing is sent from here on."""
        with self._lock:
            self._open = False
            if self._timer is not None:
                self._timer.cancel()

    def _late(self) -> None:
        with self._lock:
            self._timer = None
            if self._open:
                self._send()

    def _send(self) -> None:
        # Only calls that Python does not make frames for: see the module.
        self._next = time.monotonic() + LEAST_PAUSE_SECONDS
        try:  # noqa: SIM105 - contextlib.suppress has frames
            self._sock.sendall(self._latest)
        except OSError:
            # The worker is gone.
            pass


FRAMES: frozenset[CodeType] = frozenset({PlainLine._send.__code__})


class Unbuffered:
    """A socket as a stream that takes no byte more than it is asked for, so that what follows can still be looked at."""

    def __init__(self, sock: socket.socket) -> None:
        """Read from a blocking socket."""
        self._sock = sock

    def read(self, size: int) -> bytes:
        """So many bytes; fewer only at the end."""
        data = self._sock.recv(size, socket.MSG_WAITALL)
        if len(data) == size or not data:
            return data
        # A signal came between.
        parts, left = [data], size - len(data)
        while left and (data := self._sock.recv(left, socket.MSG_WAITALL)):
            parts.append(data)
            left -= len(data)
        return b"".join(parts)
