"""Taskline's own roles as child processes, for demos and acceptance tests: started, watched, stopped or killed by pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from taskline.errors import TasklineError
from taskline.settings import Settings, as_environment

# A role drains for at most its grace period (30 s by default) and then leaves its group.
_STOP_SECONDS = 60.0
_LOG_TAIL_BYTES = 2_000


class RoleDied(TasklineError):
    """A role's process ended when it should be running."""


class Role:
    """One `taskline …` process. Leaving the context stops it."""

    def __init__(
        self,
        arguments: Sequence[str],
        settings: Settings,
        *,
        log: Path,
        cwd: Path | None = None,
        environ: dict[str, str] | None = None,
    ) -> None:
        """Describe it; `start` runs it.

        Args:
            arguments: what stands after `taskline`, e.g. ("worker", "module:registry").
            settings: handed over as environment variables.
            log: file that receives its output, appended over restarts.
            cwd: its working directory, where it finds the user's modules; None: this process's.
            environ: further variables.
        """
        self.arguments = tuple(arguments)
        self.log = log
        self._cwd = cwd
        self._environ = _clean(os.environ) | as_environment(settings) | (environ or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the running process."""
        return self._running().pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> Role:
        """Run it."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-m", "taskline", *self.arguments],
                cwd=self._cwd,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return self

    def check(self) -> None:
        """Be loud when it is gone.

        Raises:
            RoleDied: with the end of its log.
        """
        if self.exit_code is not None:
            raise RoleDied(
                f"`taskline {' '.join(self.arguments)}` ended with {self.exit_code}:\n{self.tail()}"
            )

    def wait_until(self, ready: Callable[[], bool], *, seconds: float, what: str) -> None:
        """Poll `ready` until it is true.

        Raises:
            RoleDied: the process ended, or time ran out.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise RoleDied(
                    f"`taskline {' '.join(self.arguments)}`: not {what} after {seconds:.0f} s:\n{self.tail()}"
                )
            time.sleep(0.05)

    def stop(self, *, seconds: float = _STOP_SECONDS) -> int:
        """SIGTERM, then wait; SIGKILL when it takes too long.

        Returns:
            The exit status (0: a clean stop).
        """
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """SIGKILL, at once."""
        process = self._running()
        process.kill()
        return process.wait()

    def signal(self, signum: signal.Signals) -> None:
        """Send it a signal, e.g. SIGSTOP."""
        self._running().send_signal(signum)

    def tail(self) -> str:
        """The end of its log."""
        try:
            return self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        except FileNotFoundError:
            return ""

    def __enter__(self) -> Role:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RoleDied(f"`taskline {' '.join(self.arguments)}` was never started")
        return self._process


def _clean(environ: os._Environ[str]) -> dict[str, str]:
    # The caller's own TASKLINE_ settings must not mix with the ones that are handed over.
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("TASKLINE_") or name == "TASKLINE_CACHE_DIR"
    }
