"""A real Redis for a test: Debian's redis-server, on a free port, gone when the test is over."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_SECONDS = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """One process that keeps nothing on disk."""

    def __init__(self, scratch: Path) -> None:
        self.port = free_port()
        self._scratch = scratch
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = [
            "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--dir", str(self._scratch),
        ]  # fmt: skip
        with (self._scratch / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self._process.poll() is None, (self._scratch / "redis.log").read_text()
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.02)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as link:
                link.sendall(b"PING\r\n")
                return link.recv(16).startswith(b"+PONG")
        except OSError:
            return False


@contextmanager
def running_redis(scratch: Path) -> Iterator[RedisServer]:
    """Skips the test where there is no redis-server; with CI set it fails instead."""
    if shutil.which("redis-server") is None:
        reason = "no redis-server here (Debian: apt-get install redis-server)"
        if os.environ.get("CI"):
            pytest.fail(f"CI needs a real Redis: {reason}")
        pytest.skip(reason)
    server = RedisServer(scratch)
    server.start()
    try:
        yield server
    finally:
        server.stop()
