"""The whole of the worker protocol on real servers: gateways, projector and delay role as processes, and workers of any kind."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from api_process import environment, eventually

from taskline import Settings, Submission, TaskHandle, TaskProducer
from taskline.infra.kafka.admin import create_topics
from taskline.infra.kafka.requests import admin_client
from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.local.roles import Role
from taskline.infra.role import SystemClock
from taskline.schemas.codec import Codec
from taskline.schemas.ids import TaskId
from taskline.schemas.types import TaskType
from taskline.state.cassandra import CassandraStore
from taskline.state.fold import TaskHistory
from taskline.state.reader import StatusReader
from taskline.state.status import TaskState

WORKER = Path(__file__).parents[2] / "examples" / "http_worker" / "worker.mjs"
START_SECONDS = 60.0
DELETE_SECONDS = 30.0


def gateway_settings(servers: Any, keyspace: str, **gateway: Any) -> Settings:
    return Settings.model_validate(
        {
            "kafka": {
                "bootstrap_servers": servers.bootstrap_servers,
                "namespace": f"t{secrets.token_hex(4)}.",
                "session_timeout_ms": 6_000,
            },
            "topics": {"dispatch_partitions": 2, "lanes": 3, "dlq_partitions": 1, "delay_partitions": 1},
            "delay": {"tiers": ("200ms", "1s", "5s")},
            "worker": {"retry_base_seconds": 0.3, "retry_multiplier": 1.0},
            "cassandra": {
                "contact_points": servers.contact_points,
                "port": servers.cassandra_port,
                "keyspace": keyspace,
            },
            "api": {"auth": "off", "shutdown_delay_seconds": 0.0},
            "gateway": gateway,
            "telemetry": {"log_format": "json"},
        }
    )


@dataclass(kw_only=True)
class GatewayProcess:
    """One replica."""

    role: Role
    announcement: Path
    url: str = ""
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    def start(self) -> None:
        self.announcement.unlink(missing_ok=True)
        self.role.start()
        self.role.wait_until(self.announcement.exists, seconds=START_SECONDS, what="listening")
        self.url = self.announcement.read_text().strip()

        def ready() -> bool:
            return self.client.get(f"{self.url}/readyz").status_code == 200

        self.role.wait_until(ready, seconds=START_SECONDS, what="ready")

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.client.post(f"{self.url}/internal/tasks/{path}", json=body)

    def fetch(self, *task_types: str, batch: int = 1, wait: float = 10.0) -> list[dict[str, Any]]:
        wanted = {
            "worker_id": "test",
            "task_types": list(task_types),
            "batch_size": batch,
            "wait_seconds": wait,
        }
        answer = self.post("fetch", wanted)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["tasks"])

    def report(self, task: dict[str, Any], kind: str, **told: Any) -> httpx.Response:
        return self.post(f"{task['task_id']}/{kind}", {"lease_token": task["lease_token"], **told})


class GatewaySystem:
    """A queue, its gateways, and what is in its view."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self._folder = folder
        self._runner = asyncio.Runner()
        self._stack = ExitStack()
        self._gateways = 0

    def __enter__(self) -> GatewaySystem:
        create_topics(self.settings)
        self._directory = self._stack.enter_context(TypeDirectory(self.settings))
        self._producer = self._stack.enter_context(TaskProducer(self.settings, self._directory))
        self._store = self._runner.run(CassandraStore.connect(self.settings))
        self._reader = StatusReader(self._store, Codec(), self.settings.api, clock=SystemClock())
        for name in ("projector", "delay"):
            role = Role((name,), self.settings, log=self._folder / f"{name}.log")
            self._stack.enter_context(role)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._runner.run(self._store.close())
        self._runner.close()
        with admin_client(self.settings.kafka) as admin:
            listed = admin.list_topics(timeout=DELETE_SECONDS).topics
            names = [name for name in listed if name.startswith(self.settings.kafka.namespace)]
            for deleted in admin.delete_topics(names).values():
                deleted.result(DELETE_SECONDS)

    def register(self, *types: TaskType) -> None:
        self._directory.register(types)

    def taskline(self, *arguments: str) -> str:
        """What a command prints; the types that it registers are known here then."""
        done = subprocess.run(
            [sys.executable, "-m", "taskline", *arguments],
            env=environment(self.settings),
            capture_output=True,
            text=True,
            check=True,
        )
        self._directory.refresh()
        return done.stdout

    def submit(self, task_type: str, payload: Any, **options: Any) -> TaskHandle:
        return self._producer.submit(task_type, payload, **options)

    def submit_many(self, items: Iterable[Submission]) -> list[TaskHandle]:
        handles = list(self._producer.submit_many(items))
        assert all(isinstance(handle, TaskHandle) for handle in handles)
        return handles  # type: ignore[return-value]  # just asserted

    def gateway(self) -> GatewayProcess:
        """One more replica, started; it is stopped in the end if it still runs."""
        self._gateways += 1
        announcement = self._folder / f"gateway-{self._gateways}.url"
        role = Role(
            ("gateway", "--port", "0", "--announce", str(announcement)),
            self.settings,
            log=self._folder / f"gateway-{self._gateways}.log",
        )
        self._stack.callback(role.stop)
        process = GatewayProcess(role=role, announcement=announcement)
        self._stack.callback(process.client.close)
        process.start()
        return process

    @contextmanager
    def node_worker(self, url: str, name: str = "node", **environ: str) -> Iterator[subprocess.Popen[bytes]]:
        """The reference worker, running; asked to stop in the end."""
        log = (self._folder / f"{name}.log").open("ab")
        own = {"TASKLINE_GATEWAY": url, "WORKER_ID": name, **environ}
        process = subprocess.Popen(
            ["node", str(WORKER)], env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT
        )
        log.close()
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
                process.wait()

    def log_of(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def status(self, task_id: TaskId) -> TaskState:
        return self._runner.run(self._reader.get(task_id, tenant="default"))

    def history(self, task_id: TaskId) -> TaskHistory:
        return self._runner.run(self._reader.history(task_id, tenant="default"))

    def histories(self, task_ids: Iterable[TaskId]) -> list[TaskHistory]:
        async def read() -> list[TaskHistory]:
            return [await self._reader.history(task_id, tenant="default") for task_id in task_ids]

        return self._runner.run(read())

    def await_ended(self, handles: Iterable[TaskHandle], seconds: float) -> list[TaskState]:
        """The tasks' states once all have ended."""
        deadline = time.monotonic() + seconds
        ended: list[TaskState] = []
        for handle in handles:
            left = max(1.0, deadline - time.monotonic())

            def over(task_id: TaskId = handle.task_id) -> TaskState | None:
                state = self.status(task_id)
                return state if state.status.ended else None

            ended.append(eventually(over, f"task {handle.task_id} has ended", left))
        return ended
