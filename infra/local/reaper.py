"""Ends an ephemeral stack when the process that began it is gone, however that went.

It runs as a process of its own, because whoever is killed with SIGKILL cannot clean up. The kernel's parent-death signal
would be shorter, but it fires when the *thread* that started the child ends, and it cannot remove the stack's folder.

This file is run by its path, before any package is set up: it imports nothing from Taskline.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import time
from pathlib import Path

import psutil

# psutil derives the start time from the boot time, which clock corrections move a little.
_START_TIME_TOLERANCE_S = 3.0
# How often the parent is looked at where the kernel cannot tell us of its end.
_POLL_S = 0.5
# A server may be started in the very moment its parent is killed: look twice, this far apart.
_SECOND_LOOK_S = 1.0
_KILL_WAIT_S = 30.0


def main(arguments: list[str]) -> None:
    """Wait for the parent's end, then kill the stack's processes and remove its folder.

    Args:
        arguments: The parent's pid, its start time (seconds since 1970), how the stack's markers begin (without the
            leading dash, so that this command line does not bear one), the folder.
    """
    pid, started_at, mark, folder = (
        int(arguments[0]),
        float(arguments[1]),
        f"-{arguments[2]}",
        Path(arguments[3]),
    )
    _wait_for_end(pid, started_at)
    _kill_marked(mark)
    time.sleep(_SECOND_LOOK_S)
    _kill_marked(mark)
    shutil.rmtree(folder, ignore_errors=True)


def _wait_for_end(pid: int, started_at: float) -> None:
    if hasattr(os, "pidfd_open"):
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            pass
        else:
            if _alive(pid, started_at):  # else the handle may be a later process's
                poll = select.poll()
                poll.register(handle, select.POLLIN)
                poll.poll()
            os.close(handle)
    while _alive(pid, started_at):
        time.sleep(_POLL_S)


def _alive(pid: int, started_at: float) -> bool:
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started_at) <= _START_TIME_TOLERANCE_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill_marked(mark: str) -> None:
    """Kill this user's processes that bear the mark, and wait until they are gone."""
    killed = []
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid() and any(
                part.startswith(mark) for part in process.cmdline()
            ):
                process.kill()
                killed.append(process)
        except psutil.Error:  # gone meanwhile
            continue
    psutil.wait_procs(killed, timeout=_KILL_WAIT_S)


if __name__ == "__main__":
    main(sys.argv[1:])
