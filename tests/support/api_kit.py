"""The app on dependencies in memory, driven without a socket."""

from __future__ import annotations

import asyncio
import re
from asyncio import Future
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import orjson

from taskline.api import ApiDeps, ApiMetrics, Health, Submissions, create_app
from taskline.api.claims import Claims
from taskline.api.limits import RateLimits
from taskline.api.replacing import Replacing
from taskline.errors import UnknownTaskType
from taskline.infra.log import OutRecord, Position
from taskline.producers.cancelling import Canceller
from taskline.schemas.codec import Codec
from taskline.schemas.events import LifecycleEvent, Priority, TaskSubmitted, sequence_of
from taskline.schemas.ids import TaskId
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType
from taskline.settings import ApiSettings, ProducerSettings, Settings
from taskline.state.claims_memory import MemoryClaims
from taskline.state.keys import KeyReader
from taskline.state.keys_memory import MemoryKeys
from taskline.state.listing import Filter, Slice
from taskline.state.lists import TaskLists
from taskline.state.reader import StatusReader
from taskline.state.store import StoredTask, Write

NOW_MS = 1_795_964_645_120
MAX_PAYLOAD_BYTES = 2_000
MAX_BODY_BYTES = 10_000
CODEC = Codec()

PLACE = PayloadSchema.parse(
    {
        "type": "record",
        "name": "Place",
        "fields": [
            {"name": "iata", "type": "string"},
            {"name": "lat", "type": "double"},
            {"name": "runways", "type": "int", "default": 1},
        ],
    }
)
TYPES = (
    TaskType(name="geo.nearest", schema=PLACE, queue="geo", priority=Priority.LOW, timeout_ms=1_500),
    TaskType(name="any.json"),
)


class FixedClock:
    """Moves when a test moves it."""

    def __init__(self) -> None:
        self.ms = NOW_MS

    def now_ms(self) -> int:
        return self.ms


class FakeLog:
    """Acknowledges, fails, or stays silent."""

    def __init__(self) -> None:
        self.records: list[OutRecord] = []
        self.failure: Exception | None = None
        self.silent = False

    def append(self, record: OutRecord) -> Future[Position]:
        future: Future[Position] = asyncio.get_running_loop().create_future()
        self.records.append(record)
        if self.failure is not None:
            future.set_exception(self.failure)
        elif not self.silent:
            future.set_result(Position(topic=record.topic, partition=0, offset=len(self.records)))
        return future

    def submissions(self) -> list[TaskSubmitted]:
        return [CODEC.decode(record.value, TaskSubmitted) for record in self.records]


class FakeStore:
    """A view in memory."""

    def __init__(self) -> None:
        self.tasks: dict[TaskId, StoredTask] = {}
        self.failure: Exception | None = None
        self.silent = False
        self.reads = 0
        # Set when somebody waits for the silent store.
        self.asked = asyncio.Event()

    async def apply(self, writes: Sequence[Write]) -> None:
        raise AssertionError("the API only reads")

    async def read(self, task_id: TaskId) -> StoredTask | None:
        await self._answer()
        self.reads += 1
        return self.tasks.get(task_id)

    # One bucket holds everything, and its hints are the tenant only.
    bucket_ms = NOW_MS * 2

    async def buckets(self, wanted: Filter, *, newest: int, oldest: int, limit: int) -> Sequence[int]:
        await self._answer()
        return [0]

    async def slice(self, bucket: int, wanted: Filter, *, before: TaskId, since: TaskId, limit: int) -> Slice:
        ids = sorted((task_id for task_id in self.tasks if since <= task_id < before), reverse=True)
        return Slice(ids=ids, searched_to=None, partition_reads=1)

    async def read_many(self, task_ids: Sequence[TaskId]) -> Mapping[TaskId, StoredTask]:
        await self._answer()
        return {task_id: self.tasks[task_id] for task_id in task_ids if task_id in self.tasks}

    async def _answer(self) -> None:
        if self.silent:
            self.asked.set()
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure

    def put(self, submission: TaskSubmitted, *events: LifecycleEvent) -> None:
        self.tasks[submission.task_id] = StoredTask(
            submission=CODEC.encode(submission),
            events={sequence_of(7, index): CODEC.encode(event) for index, event in enumerate(events)},
        )


class FakeTypes:
    def __init__(self, types: Sequence[TaskType]) -> None:
        self._types = {each.name: each for each in types}
        self.failure: Exception | None = None

    def get(self, name: str) -> TaskType:
        if self.failure is not None:
            raise self.failure
        try:
            return self._types[name]
        except KeyError:
            raise UnknownTaskType(name, self._types) from None

    def names(self) -> Sequence[str]:
        if self.failure is not None:
            raise self.failure
        return sorted(self._types)


class Api:
    """The app, its fakes, and a client that checks each answer against the document."""

    def __init__(self, *, keys: KeyReader | None = None, **api: Any) -> None:
        settings = Settings(
            api=ApiSettings(
                **{"auth": "off", "read_your_writes_seconds": 0.0, "request_timeout_seconds": 5.0} | api
            ),
            producer=ProducerSettings(max_payload_bytes=MAX_PAYLOAD_BYTES),
        )
        self.log, self.store, self.types = FakeLog(), FakeStore(), FakeTypes(TYPES)
        self.clock = clock = FixedClock()
        self.metrics = ApiMetrics()
        self.claims = MemoryClaims()
        lists = TaskLists(self.store, CODEC, clock)
        patience = settings.api.request_timeout_seconds
        claims = Claims(self.claims, lists, patience_seconds=patience, delivery_seconds=patience, clock=clock)
        self.health = Health()
        for name in ("kafka", "view"):
            self.health.report(name, up=True)
        status = StatusReader(self.store, CODEC, settings.api, clock=clock)
        cancels = Canceller(self.log, status, CODEC, settings, worker="api", clock=clock)
        self.deps = ApiDeps(
            settings=settings.api,
            submissions=Submissions(
                self.log,
                self.types,
                CODEC,
                settings,
                clock=clock,
                claims=claims,
                replacing=Replacing(
                    cancels, retention_days=settings.producer.task_retention_days, clock=clock
                ),
            ),
            status=status,
            cancels=cancels,
            lists=lists,
            types=self.types,
            max_body_bytes=MAX_BODY_BYTES,
            keys=keys or MemoryKeys(),
            limits=RateLimits.of(settings.api, self.metrics),
            health=self.health,
            metrics=self.metrics,
            clock=clock,
        )
        self.app = create_app(self.deps)
        self._runner = asyncio.Runner()

    def run(self, coroutine: Any) -> Any:
        return self._runner.run(coroutine)

    def close(self) -> None:
        self._runner.close()

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.run(self.send(method, path, **options))

    def request_raw(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Without the checks: for pages that are not part of the API."""
        return self.run(self._send(method, path, **options))

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        response = await self._send(method, path, **options)
        self.check(method, path, response)
        return response

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    def submit(self, body: Any, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {"content-type": "application/json"} | options.pop("headers", {})
        return self.request("POST", "/tasks", content=content, headers=headers, **options)

    def check(self, method: str, path: str, response: httpx.Response) -> None:
        """Every answer is documented, and every error is a problem."""
        assert response.headers["x-request-id"]
        if response.status_code >= 400:
            assert response.headers["content-type"] == "application/problem+json"
            problem = response.json()
            assert problem["status"] == response.status_code
            assert problem["type"].startswith("urn:taskline:problem:")
            assert problem["title"]
            assert problem["detail"]
            assert problem["instance"] == f"urn:taskline:request:{response.headers['x-request-id']}"
            if response.status_code == 503:
                assert int(response.headers["retry-after"]) >= 1
        documented = self._documented(method, path.partition("?")[0])
        if documented is None:
            assert response.status_code in (404, 405)
        else:
            described = documented[str(response.status_code)].get("content", {})
            if response.status_code == 304:
                assert not described
                assert not response.content
                return
            assert response.headers["content-type"].partition(";")[0] in described

    def _documented(self, method: str, path: str) -> Mapping[str, Any] | None:
        for template, operations in self.app.openapi()["paths"].items():
            pattern = re.sub(r"\{\w+\}", "[^/]+", template)
            if re.fullmatch(pattern, path) and method.lower() in operations:
                return operations[method.lower()]["responses"]
        return None


def slug(response: httpx.Response) -> str:
    kind: str = response.json()["type"]
    return kind.removeprefix("urn:taskline:problem:")
