"""Child processes: start them detached, know them again, signal them, end them.

A process is known by three things together: its pid, its start time, and a marker on its command line. A pid alone may
have been recycled since it was written down, and a signal to a recycled pid hits a stranger. So all three are compared
before any signal is sent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

# psutil derives the start time from the boot time, which clock corrections move a little.
_START_TIME_TOLERANCE_S = 3.0

# How often an ending process is looked at.
_POLL_S = 0.05

# The new command line shows within microseconds of the exec, on a machine that stalls in milliseconds.
_EXEC_WAIT_S = 5.0
_EXEC_POLL_S = 0.001

# SIGKILL cannot be refused, it is only slow at times (a large heap is given back, a disk write ends).
_KILL_WAIT_S = 30.0

# Our own children. They are kept until they were seen to end: one that nobody waits for stays a zombie.
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """A process, told apart from any later one with the same pid."""

    pid: int
    # When it started, in seconds since 1970.
    started_at: float
    # An argument that its command line bears.
    marker: str


def spawn(command: Sequence[str], *, marker: str, output: Path, cwd: Path) -> ProcessIdentity:
    """Start a program in a session of its own, so that neither Ctrl-C nor the end of a terminal reaches it.

    Args:
        command: The program and its arguments; the marker must be one of them.
        marker: What it is known by later.
        output: A file for its stdout and stderr; begun afresh.
        cwd: Its working directory.

    Raises:
        OSError: The program cannot be started.
    """
    with output.open("wb") as sink:
        child = subprocess.Popen(  # noqa: S603 - programs found on this machine, arguments made here
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            start_new_session=True,
        )
    process = psutil.Process(child.pid)
    # If it has ended by now it is a zombie, since nobody has waited for it: its start time can be read all the same.
    identity = ProcessIdentity(pid=child.pid, started_at=process.create_time(), marker=marker)
    # Popen returns when the exec is certain, a moment before the kernel shows the new command line.
    deadline = time.monotonic() + _EXEC_WAIT_S
    while find(identity) is None and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(_EXEC_POLL_S)
    _children[child.pid] = child
    return identity


def find(identity: ProcessIdentity) -> psutil.Process | None:
    """The live process with this identity; None if it has ended, or its pid is another's by now."""
    process = _same_pid(identity)
    try:
        if process is None or process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process if identity.marker in process.cmdline() else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def send(identity: ProcessIdentity, signum: signal.Signals) -> bool:
    """Send a signal, if the process is still the one that is meant; say whether it was sent."""
    process = find(identity)
    if process is None:
        return False
    try:
        process.send_signal(signum)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return True


def end(identity: ProcessIdentity, *, grace_s: float) -> None:
    """End a process and wait until it is gone: SIGTERM, then SIGKILL after the grace period (at once if that is 0)."""
    if grace_s > 0 and send(identity, signal.SIGTERM):
        send(identity, signal.SIGCONT)  # a paused process would not see the SIGTERM
        _wait_until_gone(identity, grace_s)
    send(identity, signal.SIGKILL)
    _wait_until_gone(identity, _KILL_WAIT_S)


def find_marked(marker: str) -> list[ProcessIdentity]:
    """All of this user's live processes that bear the marker."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid() and marker in process.cmdline():
                found.append(
                    ProcessIdentity(pid=process.pid, started_at=process.create_time(), marker=marker)
                )
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [identity for identity in found if find(identity) is not None]


def _same_pid(identity: ProcessIdentity) -> psutil.Process | None:
    """The process that has the pid, if it started when it should have; it may be a zombie."""
    _collect(identity.pid)
    try:
        process = psutil.Process(identity.pid)
        close = abs(process.create_time() - identity.started_at) <= _START_TIME_TOLERANCE_S
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return process if close else None


def _collect(pid: int) -> None:
    child = _children.get(pid)
    if child is not None and child.poll() is not None:
        del _children[pid]


def _wait_until_gone(identity: ProcessIdentity, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while _lingers(identity) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _lingers(identity: ProcessIdentity) -> bool:
    """Whether it lives or is still being taken apart.

    A killed process loses its command line first. Then its main thread is a zombie while others are still ending, and
    only the last of them lets go of the ports and file locks.
    """
    process = _same_pid(identity)
    try:
        if process is None:
            return False
        if process.status() == psutil.STATUS_ZOMBIE:
            return identity.pid in _children or process.num_threads() > 1
        return not process.cmdline() or identity.marker in process.cmdline()
    except psutil.ZombieProcess:
        # It became one between two questions (a subclass of NoSuchProcess): look again.
        return True
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
