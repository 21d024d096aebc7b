"""The worker protocol's routes: who may call them, what they take, and which answer stands for what."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from taskline.api.gateway_app import create_gateway_app
from taskline.api.gateway_models import GATEWAY_MODELS
from taskline.api.gateway_problems import GATEWAY_PROBLEMS
from taskline.api.gateway_routes import GatewayRoutes
from taskline.api.health import Health
from taskline.api.metrics import ApiMetrics
from taskline.errors import OutcomeUnknown, StaleLease
from taskline.infra.role import SystemClock
from taskline.schemas.events import ErrorCategory
from taskline.schemas.ids import new_task_id
from taskline.settings import Settings
from taskline.state.keys import MintedKey, Scope, mint
from taskline.state.keys_memory import MemoryKeys
from taskline.workers.lease_outcomes import Extended, Said, Taken

NOW_MS = SystemClock().now_ms()
TASK = new_task_id(NOW_MS - 1_000)
TOKEN = "t" * 32
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "http-workers.md"
REPORTS = {"complete": {}, "fail": {"error_class": "E"}, "extend": {}}


class Outcomes:
    """Answers every report as it is told to, and remembers it."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.seen: list[tuple[Any, ...]] = []

    async def complete(self, *report: Any) -> Taken:
        return self._answer(report, Taken(outcome="completed"))

    async def fail(self, *report: Any) -> Taken:
        return self._answer(report, Taken(outcome="retry_scheduled", due_ms=NOW_MS))

    async def extend(self, *report: Any, seconds: float | None, said: Said | None) -> Extended:
        return self._answer((*report, seconds, said), Extended(remaining_seconds=60.0, cancel_requested=True))

    def _answer(self, report: tuple[Any, ...], answer: Any) -> Any:
        self.seen.append(report)
        if self.error is not None:
            raise self.error
        return answer


class Desk:
    """Has one task, or waits until its worker has left."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.released: list[Any] = []
        self.wait_for_departure = False

    async def fetch(self, worker: str, task_types: list[str], **options: Any) -> list[Any]:
        left = options.pop("left")
        self.asked.append({"worker": worker, "types": task_types, **options})
        while self.wait_for_departure and not left():  # noqa: ASYNC110 - a question, as the desk asks it
            await asyncio.sleep(0.01)
        return [
            SimpleNamespace(
                task_id=TASK, task_type="a", payload=b'{"x":1}', timeout_seconds=9.0, attempt=2, token=TOKEN
            )
        ]

    async def release(self, lent: list[Any], reason: str) -> None:
        self.released += lent


class Calls:
    def __init__(self, **api: Any) -> None:
        self.outcomes, self.desk, self.health = Outcomes(), Desk(), Health()
        settings = Settings.model_validate({"api": {"auth": "off", **api}, "gateway": {"max_batch": 7}})
        gateway: Any = SimpleNamespace(queue="gpu", outcomes=self.outcomes, desk=self.desk)
        routes = GatewayRoutes(gateway=gateway, settings=settings, health=self.health, clock=SystemClock())
        self.keys = MemoryKeys()
        self.app = create_gateway_app(routes, self.keys, ApiMetrics())

    def post(self, path: str, body: Any, key: str | None = None) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                return await client.post(f"/internal/tasks/{path}", json=body, headers=headers)

        return asyncio.run(call())

    def key(self, scope: Scope, *queues: str) -> str:
        minted: MintedKey = mint(tenant="t", scopes=[scope], queues=queues, now_ms=NOW_MS)
        asyncio.run(self.keys.add(minted.key))
        return minted.token


def slug(answer: httpx.Response) -> str:
    return str(answer.json()["type"]).removeprefix("urn:taskline:problem:")


def test_a_fetch_is_bounded_and_answered_with_the_tasks() -> None:
    calls = Calls()
    answer = calls.post(
        "fetch", {"worker_id": "w" * 100, "task_types": ["a"], "batch_size": 50, "wait_seconds": 600}
    )
    assert answer.json() == {
        "tasks": [
            {
                "task_id": str(TASK),
                "task_type": "a",
                "payload": {"x": 1},
                "timeout_seconds": 9.0,
                "attempt": 2,
                "lease_token": TOKEN,
            }
        ],
        "lease_duration_seconds": 60.0,
    }
    assert calls.desk.asked == [{"worker": "w" * 100, "types": ["a"], "limit": 7, "wait_seconds": 30.0}]
    assert calls.desk.released == []


def test_what_a_client_that_left_was_lent_is_taken_back() -> None:
    calls = Calls()
    calls.desk.wait_for_departure = True
    body = b'{"worker_id":"w","task_types":["a"]}'
    messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/internal/tasks/fetch",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "server": ("test", 80),
        "scheme": "http",
        "http_version": "1.1",
    }
    asyncio.run(calls.app(scope, receive, send))
    assert [each.task_id for each in calls.desk.released] == [TASK]
    assert sent[0]["status"] == 499


def test_a_stopping_process_lends_nothing_more() -> None:
    calls = Calls()
    calls.health.stop()
    answer = calls.post("fetch", {"worker_id": "w", "task_types": ["a"]})
    assert (answer.status_code, slug(answer)) == (503, "not-ready")


@pytest.mark.parametrize("kind", REPORTS)
def test_reports_are_answered_by_what_came_of_them(kind: str) -> None:
    calls, body = Calls(), {"lease_token": TOKEN, **REPORTS[kind]}
    assert calls.post(f"{TASK}/{kind}", body).status_code == 200
    calls.outcomes.error = StaleLease(TASK, "it ended without an outcome")
    stale = calls.post(f"{TASK}/{kind}", body)
    assert (stale.status_code, slug(stale), stale.json()["task_id"]) == (409, "stale-lease", str(TASK))
    calls.outcomes.error = OutcomeUnknown(TASK, "the view lags")
    unknown = calls.post(f"{TASK}/{kind}", body)
    assert (unknown.status_code, slug(unknown)) == (503, "report-unknown")
    assert unknown.headers["retry-after"] == "2"


def test_a_result_is_its_json_and_has_a_limit() -> None:
    calls = Calls()
    calls.post(f"{TASK}/complete", {"lease_token": TOKEN, "result": {"a": [1, None]}})
    calls.post(f"{TASK}/complete", {"lease_token": TOKEN})
    assert [report[2] for report in calls.outcomes.seen] == [b'{"a":[1,null]}', None]
    answer = calls.post(f"{TASK}/complete", {"lease_token": TOKEN, "result": "x" * 70_000})
    assert (answer.status_code, slug(answer)) == (413, "too-large")


@pytest.mark.parametrize(
    ("told", "category", "after", "retryable"),
    [
        ({}, ErrorCategory.UNKNOWN, None, True),
        ({"retry_after_seconds": 3}, ErrorCategory.TRANSIENT, 3.0, True),
        ({"permanent": True}, ErrorCategory.PERMANENT, None, False),
    ],
)
def test_a_failure_is_capped_and_judged_by_what_its_worker_says(
    told: dict[str, Any], category: ErrorCategory, after: float | None, retryable: bool
) -> None:
    calls = Calls()
    body = {"lease_token": TOKEN, "error_class": "E" * 999, "message": "m" * 9_999, **told}
    answer = calls.post(f"{TASK}/fail", body)
    assert answer.json()["outcome"] == "retry_scheduled"
    assert answer.json()["next_attempt_at"].endswith("Z")
    failure = calls.outcomes.seen[0][2]
    assert (failure.category, failure.retry_after_seconds, failure.retryable) == (category, after, retryable)
    assert (len(failure.info.error_class), len(failure.info.message)) == (256, 1_536)


def test_an_extension_is_bounded_and_tells_of_a_cancel() -> None:
    calls = Calls()
    told = {"lease_token": TOKEN, "seconds": 999_999, "progress": 0.5, "message": "half"}
    answer = calls.post(f"{TASK}/extend", told)
    assert answer.json() == {
        "task_id": str(TASK),
        "lease_remaining_seconds": 60.0,
        "cancel_requested": True,
    }
    assert calls.outcomes.seen == [(TASK, TOKEN, 3_600.0, Said(fraction=0.5, message="half"))]
    calls.post(f"{TASK}/extend", {"lease_token": TOKEN})
    assert calls.outcomes.seen[1] == (TASK, TOKEN, None, None)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("fetch", {"worker_id": "w"}, 422),
        ("fetch", {"worker_id": "w", "task_types": []}, 422),
        ("fetch", {"worker_id": "w", "task_types": ["ü"]}, 422),
        ("fetch", {"worker_id": "", "task_types": ["a"]}, 422),
        ("fetch", {"worker_id": "w", "task_types": ["a"], "batch_size": 0}, 422),
        ("fetch", {"worker_id": "w", "task_types": ["a"], "wait_seconds": -1}, 422),
        ("not-an-id/complete", {"lease_token": TOKEN}, 400),
        (f"{TASK}/complete", {}, 422),
        (f"{TASK}/complete", {"lease_token": TOKEN, "extra": 1}, 422),
        (f"{TASK}/fail", {"lease_token": TOKEN}, 422),
        (f"{TASK}/extend", {"lease_token": TOKEN, "seconds": 0}, 422),
        (f"{TASK}/extend", {"lease_token": TOKEN, "progress": 2}, 422),
        (f"{TASK}/extend", {"lease_token": TOKEN, "message": "m" * 501}, 422),
        (f"{TASK}/forget", {"lease_token": TOKEN}, 404),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_done(path: str, body: Any, status: int) -> None:
    calls = Calls()
    assert calls.post(path, body).status_code == status
    assert (calls.outcomes.seen, calls.desk.asked) == ([], [])


@pytest.mark.parametrize("path", ["fetch", *(f"{TASK}/{kind}" for kind in REPORTS)])
def test_only_keys_for_work_on_the_queue_are_let_in(path: str) -> None:
    calls = Calls(auth="keys")
    body = {"worker_id": "w", "task_types": ["a"]}
    if path != "fetch":
        body = {"lease_token": TOKEN, **REPORTS[path.split("/")[1]]}
    assert slug(calls.post(path, body)) == "unauthorized"
    assert slug(calls.post(path, body, calls.key(Scope.SUBMIT))) == "forbidden"
    assert slug(calls.post(path, body, calls.key(Scope.WORK, "default"))) == "wrong-queue"
    assert (calls.outcomes.seen, calls.desk.asked) == ([], [])
    assert calls.post(path, body, calls.key(Scope.WORK, "gpu", "default")).status_code == 200
    assert calls.post(path, body, calls.key(Scope.WORK)).status_code == 200


def test_the_document_has_every_route_with_its_problems() -> None:
    document = Calls().app.openapi()
    assert document["info"]["title"] == "Taskline workers"
    assert set(document["paths"]) == {
        "/internal/tasks/fetch",
        *(f"/internal/tasks/{{task_id}}/{kind}" for kind in REPORTS),
        "/healthz",
        "/readyz",
        "/metrics",
    }
    for kind in REPORTS:
        operation = document["paths"][f"/internal/tasks/{{task_id}}/{kind}"]["post"]
        assert {"200", "400", "401", "403", "409", "413", "422", "503"} <= set(operation["responses"])
    for model in GATEWAY_MODELS:
        assert model.__name__ in document["components"]["schemas"]
        for example in model.model_config.get("json_schema_extra", {}).get("examples", []):  # type: ignore[union-attr]
            model.model_validate_json(json.dumps(example))


def test_the_page_has_every_route_and_problem() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for path in Calls().app.openapi()["paths"]:
        if path.startswith("/internal"):
            assert f"`POST {path}`" in text
    for problem in GATEWAY_PROBLEMS:
        assert f"`{problem.slug}`" in text
