"""The process that children are forked from: it has imported the registry, so that a child costs milliseconds and shares its memory.

Not multiprocessing's fork server: its children may not have children of their own (handlers use process pools), run the worker's `__main__` again,
and look dead when the server is.

Invariants: it runs no handler; every child is reaped here and its end reported once; an order to kill never hits a process that
has been reaped. When the worker hangs up or dies, it ends, after its children.
"""

from __future__ import annotations

import gc
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import time
import warnings

import structlog

from taskline.infra.role import loop_factory
from taskline.infra.telemetry import configure_logging
from taskline.settings import TelemetrySettings
from taskline.workers.child import LEAVE_SECONDS, ChildConfig, Kind, run_child
from taskline.workers.registry import load_registry

log = structlog.get_logger(__name__)

CONFIG_LENGTH = struct.Struct("!I")
# From the worker: what, a child's number, the kind of child; a SPAWN brings the child's socket along.
ORDER = struct.Struct("!cII")
SPAWN, KILL = b"s", b"k"
# To the worker: what, a child's number, its pid or how it ended (as subprocess has it: negative for a signal).
REPORT = struct.Struct("!cIi")
# UP: the registry has been imported, or can't be.
UP, BORN, DEAD = b"u", b"b", b"d"

# A machine without memory or process numbers for a child may have some again.
_FORK_PAUSE_SECONDS = 0.5
# Children end by themselves when the worker has hung up; this is for those that can't.
_END_SECONDS = 2 * LEAVE_SECONDS
_END_STEP_SECONDS = 0.01


def main(fileno: int) -> None:
    """Serve the worker at the other end of a socket; in a child, be it."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        # The worker decides; see `child`.
        signal.signal(signum, lambda *_: None)
    with socket.socket(fileno=fileno) as control:
        config = _read_config(control)
        if config is None:
            return
        configure_logging(TelemetrySettings.model_validate(config.telemetry))
        try:
            load_registry(config.registry)
        except Exception as error:
            # A child will say so to those who wait for it.
            log.warning("the registry can't be imported before children start", error=str(error))
        # Only imported: its loops are the children's.
        loop_factory()
        # What is shared must not be written to, not even by looking for garbage in it.
        gc.freeze()
        child = _Server(control).serve()
    if child is not None:
        kind, sock = child
        sys.exit(run_child(kind, sock, config))


def _read_config(control: socket.socket) -> ChildConfig | None:
    header = control.recv(CONFIG_LENGTH.size, socket.MSG_WAITALL)
    if len(header) < CONFIG_LENGTH.size:
        return None
    (length,) = CONFIG_LENGTH.unpack(header)
    data = control.recv(length, socket.MSG_WAITALL)
    if len(data) < length:
        return None
    config: ChildConfig = pickle.loads(data)  # noqa: S301 - from the worker that started this process
    return config


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._bell, self._ringer = os.pipe()

    def serve(self) -> tuple[Kind, socket.socket] | None:
        """Fork and reap until the worker hangs up; returns a child's part in the child."""
        for fileno in (self._bell, self._ringer):
            os.set_blocking(fileno, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._ringer, warn_on_full_buffer=False)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._report(UP, 0, 0)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    os.read(self._bell, 4_096)
                    self._reap()
                    continue
                order, filenos, _, _ = socket.recv_fds(self._control, ORDER.size, 1)
                if len(order) < ORDER.size:
                    self._end()
                    return None
                what, number, kind = ORDER.unpack(order)
                if what == KILL:
                    self._kill(number)
                elif self._fork(number):
                    self._become_child()
                    # Programs that handlers start must not hold the line.
                    os.set_inheritable(filenos[0], False)
                    return Kind(kind), socket.socket(fileno=filenos[0])
                else:
                    os.close(filenos[0])

    def _fork(self, number: int) -> bool:
        """True in the child."""
        while True:
            try:
                with warnings.catch_warnings():
                    # Threads that a registry's modules have started do not exist in the children, as their authors know.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pid = os.fork()
            except OSError as error:
                log.warning("no child process can be started", error=str(error))
                time.sleep(_FORK_PAUSE_SECONDS)
                continue
            if not pid:
                return True
            self._children[number] = pid
            # On both sides, whoever comes first: it must be true for a kill that comes at once.
            _lead_group(pid)
            self._report(BORN, number, pid)
            return False

    def _become_child(self) -> None:
        _lead_group(0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for fileno in (self._bell, self._ringer):
            os.close(fileno)

    def _kill(self, number: int) -> None:
        pid = self._children.get(number)
        if pid is not None:
            _kill_group(pid)

    def _reap(self) -> None:
        for number, pid in tuple(self._children.items()):
            # First only looked at: while it is not reaped, its number, and so its group's, can't be another's.
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                continue
            _kill_group(pid)
            os.waitpid(pid, 0)
            del self._children[number]
            self._report(DEAD, number, end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)

    def _report(self, what: bytes, number: int, value: int) -> None:
        try:
            self._control.sendall(REPORT.pack(what, number, value))
        except OSError:
            # The worker is gone, which the next read says too.
            return

    def _end(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        self._reap()
        while self._children and time.monotonic() < deadline:
            time.sleep(_END_STEP_SECONDS)
            self._reap()
        for pid in self._children.values():
            _kill_group(pid)
        for pid in self._children.values():
            os.waitpid(pid, 0)


def _lead_group(pid: int) -> None:
    try:
        os.setpgid(pid, 0)
    except OSError:
        # Done by the other side, or gone already.
        return


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
