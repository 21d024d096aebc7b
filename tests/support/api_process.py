"""`taskline api` as a process of its own, and a TCP gate that opens and closes a way to a server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from taskline.settings import Settings, as_environment

START_SECONDS = 60.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.05


def environment(settings: Settings) -> dict[str, str]:
    """The test process's own variables, with these settings and no others."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TASKLINE_")}
    return own | as_environment(settings)


def eventually(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """Poll until the condition is true, or fail."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(POLL_SECONDS)
    return found


@dataclass(kw_only=True)
class ApiProcess:
    process: subprocess.Popen[bytes]
    url: str
    log_file: Path
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def submit(self, task_type: str, payload: object, **options: object) -> httpx.Response:
        return self.client.post("/tasks", json={"task_type": task_type, "payload": payload} | options)

    def log(self) -> list[dict[str, Any]]:
        lines = self.log_file.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def ready(self, purpose: str | None = None) -> bool:
        return self.client.get("/readyz", params={"for": purpose} if purpose else None).status_code == 200

    def ask_to_stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self.process.wait(STOP_SECONDS)


def spawn(settings: Settings, scratch: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with (scratch / "api.log").open("wb") as log_file:
        return subprocess.Popen(
            [sys.executable, "-m", "taskline", "api", *arguments],
            env=environment(settings),
            stdout=log_file,
            stderr=log_file,
        )


@contextmanager
def running_api(settings: Settings, scratch: Path) -> Iterator[ApiProcess]:
    """The API on a free port, with its port open; stopped at the end if it still runs."""
    announcement = scratch / "url"
    process = spawn(settings, scratch, "--port", "0", "--announce", str(announcement))
    log_file = scratch / "api.log"
    try:

        def announced() -> bool:
            assert process.poll() is None, log_file.read_text(encoding="utf-8")
            return announcement.exists()

        eventually(announced, "the API's port is open", START_SECONDS)
        api = ApiProcess(process=process, url=announcement.read_text().strip(), log_file=log_file)
        with api.client:
            yield api
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()
            process.wait()


class Gate:
    """A port of its own that leads to a server while it is open, and refuses connections while it is shut."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.port = self._loop.run_until_complete(self._reserve())
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def open(self) -> None:
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)

    def shut(self) -> None:
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(10)

    def close(self) -> None:
        self.shut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _reserve(self) -> int:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return port

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _shut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        writers = [writer]
        try:
            back, forth = await asyncio.open_connection(*self._target)
            writers.append(forth)
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, forth))
                group.create_task(_pump(back, writer))
        except (OSError, asyncio.CancelledError):
            # The server is away, or the gate was shut: both ends see their connection broken.
            pass
        finally:
            self._serving.discard(task)
            for each in writers:
                each.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
