"""What a handler may use of its child process: memory and processor time, both enforced by the system's kernel.

Memory is bounded by RLIMIT_DATA, not RLIMIT_AS: a fresh child of the package alone maps 135 MB of addresses, 42 MB of which are its own, and each further
thread reserves 72 MB of addresses but 8 MB of data; libraries that reserve gigabytes and never touch them are common. What is shared (`mmap` of
files, `multiprocessing.shared_memory`) counts under neither as what it takes.

Processor time is bounded by ITIMER_PROF, not RLIMIT_CPU: it begins anew with each run, and counts in milliseconds. Nobody handles its
signal, so the kernel ends the process at once, whatever C code it is in; the worker knows the signal (`CPU_SIGNAL`).
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from typing import TypeVar

import structlog

from taskline.workers.registry import Task

log = structlog.get_logger(__name__)

T = TypeVar("T")

# What ends a child whose handler has used up its processor time.
CPU_SIGNAL = signal.SIGPROF
# What a child may have beyond its limit to say that the limit was reached.
_RESERVE_BYTES = 16 * 1024 * 1024
_MB = 1024 * 1024
_KB = 1024


class MemoryLimit:
    """The memory of this process, counted from when this is made."""

    def __init__(self, default_mb: int | None) -> None:
        """Begin with `default_mb` more than what there is (None or 0: no limit)."""
        self._default_mb = default_mb or None
        self._born_bytes = private_bytes()
        # As the process got it from whoever started the worker; never lifted.
        self._ceiling, self._hard = resource.getrlimit(resource.RLIMIT_DATA)
        # What the process may have above its birth, in bytes; None: anything.
        self._more_bytes: int | None = None
        self.set(None)

    @property
    def limit_mb(self) -> float | None:
        """What the process may have above its birth, in MB; None: anything."""
        return None if self._more_bytes is None else self._more_bytes / _MB

    def set(self, limit_mb: int | None) -> None:
        """Let the process have `limit_mb` more than at its birth from now on; None: as much as it began with."""
        limit_mb = limit_mb or self._default_mb
        self._bound(None if limit_mb is None else limit_mb * _MB)

    def reserve(self) -> None:
        """Let it have a little more, so that it can say why it ends; until the next `set`."""
        if self._more_bytes is not None:
            self._bound(self._more_bytes + _RESERVE_BYTES)

    def _bound(self, more_bytes: int | None) -> None:
        if more_bytes == self._more_bytes:
            return
        if self._born_bytes is None:
            log.warning("memory can't be limited here: there is no /proc/self/status")
            return
        self._more_bytes = more_bytes
        soft = self._ceiling
        if more_bytes is not None:
            bound = self._born_bytes + more_bytes
            soft = bound if soft == resource.RLIM_INFINITY else min(soft, bound)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, self._hard))


def limited_cpu(task: Task, function: Callable[[], T]) -> T:
    """Call a function that runs `task`'s handler; the process is ended when it takes more than its processor time."""
    seconds = task.conduct.cpu_seconds
    if seconds is None:
        return function()
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return function()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def rss_bytes(pid: int | str | None) -> int | None:
    """A process's resident memory ("self": this one's); None: it is gone, or the system does not say."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return None


def private_bytes() -> int | None:
    """What RLIMIT_DATA counts of this process; None: the system does not say."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmData:"):
                    return int(line.split()[1]) * _KB
    except OSError:
        return None
    return None
