"""Whatever a caller sends, the answer is a success or a problem, and never a fault of the server."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from api_kit import Api
from api_projection import Projection
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taskline.api.models import TaskSubmission
from taskline.producers import cancelling

BYTES_OF_JSON = st.sampled_from(
    [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"1", b"e9", b"-", b"null", b"\xc3"]
)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**40), max_value=10**40)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FEW_KEYS = st.sampled_from(["a", "b", "", "k" * 200, "k" * 201]) | st.text(max_size=8)
INSTANTS = st.datetimes().map(lambda at: at.isoformat() + "Z") | st.sampled_from(
    ["2026-11-29T15:04:06Z", "2027-01-01T00:00:00+01:00", "2026-11-29", "now", "2026-13-01T00:00:00Z"]
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "task_type": st.sampled_from(["any.json", "geo.nearest", "geo.nearst", ""]),
    "payload": st.fixed_dictionaries({"iata": st.text(max_size=4), "lat": st.floats(allow_nan=False)}),
    "priority": st.sampled_from(["high", "normal", "low", "HIGH"]),
    "timeout_seconds": st.floats() | st.integers(),
    "max_retries": st.integers(),
    "affinity_key": FEW_KEYS,
    "delay_seconds": st.floats() | st.integers(-1, 400),
    "scheduled_at": INSTANTS,
    "start_by": INSTANTS,
    "idempotency_key": FEW_KEYS,
    "dedup_key": FEW_KEYS,
    "dedup_window_seconds": st.integers(0, 3_000_000) | st.floats(),
    "dedup_mode": st.sampled_from(["reject", "replace", "merge"]),
    # Of no submission.
    "queue": st.text(max_size=5),
}
# Few that are wholly right come about by chance; most of these are, and meet each other under two keys.
ONCE_ONLY = st.fixed_dictionaries(
    {"task_type": st.just("any.json"), "payload": st.integers(0, 2)},
    optional={
        "idempotency_key": st.sampled_from(["a", "b"]),
        "affinity_key": st.sampled_from(["a", "b"]),
        "dedup_key": st.sampled_from(["a", "b"]),
        "dedup_window_seconds": st.integers(1, 60),
        "dedup_mode": st.sampled_from(["reject", "replace", None]),
        "delay_seconds": st.sampled_from([0, 0.1, 60, 0.01]),
    },
)
SUBMISSIONS = st.fixed_dictionaries(
    {}, optional={name: likely | JSON_VALUES for name, likely in LIKELY.items()} | {"x": JSON_VALUES}
)
BODIES = (
    st.binary(max_size=200)
    | st.lists(BYTES_OF_JSON, max_size=40).map(b"".join)
    | JSON_VALUES.map(lambda value: json.dumps(value).encode())
    | SUBMISSIONS.map(lambda value: json.dumps(value).encode())
    | SUBMISSIONS.map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    | st.tuples(SUBMISSIONS, st.integers(0, 200)).map(lambda drawn: json.dumps(drawn[0]).encode()[: drawn[1]])
)
HEADERS = st.sampled_from(
    [
        {"content-type": "application/json"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "text/plain"},
        {"content-type": ";;;"},
        {"content-type": "application/json", "content-encoding": "br"},
        {"content-type": "application/json", "content-length": "-5"},
        {"content-type": "application/json", "traceparent": "\x7f" * 300, "x-request-id": "\x01"},
        {"content-type": "application/json", "idempotency-key": "a"},
        {"content-type": "application/json", "idempotency-key": '"'},
        {"content-type": "application/json", "idempotency-key": "\xff"},
        {},
    ]
)


class Direct:
    """Calls the app without a client between: thousands of requests in one loop."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def call(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": b"",
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
        }
        self.api.run(asyncio.wait_for(self.api.app(scope, receive, send), 10))
        start, end = sent
        return start["status"], dict(start["headers"]), end["body"]


@pytest.fixture(scope="module")
def direct() -> Iterator[Direct]:
    api = Api()
    # What is accepted is in the view, so that it can be found to be a duplicate, and replaced.
    Projection().attach(api)
    with pytest.MonkeyPatch.context() as patch:
        # No worker runs here that would have to learn of a notice first.
        patch.setattr(cancelling, "NOTICE_SPREAD_SECONDS", 0.0)
        yield Direct(api)
    api.close()


def expect_answer_or_problem(answer: tuple[int, dict[bytes, bytes], bytes], good: set[int]) -> None:
    status, headers, body = answer
    document = json.loads(body)
    assert headers[b"x-request-id"]
    assert status < 500
    if status in good:
        assert headers[b"content-type"] == b"application/json"
    else:
        assert status >= 400
        assert headers[b"content-type"] == b"application/problem+json"
        assert document["status"] == status


@settings(max_examples=1_500, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=BODIES)
def test_any_body(direct: Direct, body: bytes) -> None:
    answer = direct.call("POST", "/tasks", {"content-type": "application/json"}, body)
    expect_answer_or_problem(answer, {200, 201})


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=BODIES, headers=HEADERS)
def test_any_headers(direct: Direct, headers: dict[str, str], body: bytes) -> None:
    expect_answer_or_problem(direct.call("POST", "/tasks", headers, body), {200, 201})


def test_any_keys(direct: Direct) -> None:
    """Every field of a submission is made up here, and each answer that its keys can bring about comes."""
    assert set(LIKELY) - {"queue"} == set(TaskSubmission.model_fields)
    seen: Counter[int] = Counter()

    @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
    @given(submission=ONCE_ONLY)
    def submit(submission: dict[str, Any]) -> None:
        body = json.dumps(submission).encode()
        answer = direct.call("POST", "/tasks", {"content-type": "application/json"}, body)
        expect_answer_or_problem(answer, {200, 201})
        seen[answer[0]] += 1

    submit()
    assert {200, 201, 409, 422} <= set(seen), seen


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(tasks=st.lists(ONCE_ONLY | SUBMISSIONS | JSON_VALUES, min_size=1, max_size=8))
def test_any_batch(direct: Direct, tasks: list[object]) -> None:
    body = json.dumps({"tasks": tasks}).encode()
    answer = direct.call("POST", "/tasks/batch", {"content-type": "application/json"}, body)
    expect_answer_or_problem(answer, {200})
    if answer[0] == 200:
        results = json.loads(answer[2])["results"]
        assert len(results) == len(tasks)
        assert all(each["status"] < 500 for each in results)


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(max_size=60) | st.uuids().map(str), history=st.booleans())
def test_any_id(direct: Direct, text: str, history: bool) -> None:
    path = f"/tasks/{text}" + ("/history" if history else "")
    expect_answer_or_problem(direct.call("GET", path, {}, b""), {200})


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    method=st.sampled_from(["GET", "PUT", "PATCH", "DELETE", "HEAD", "TRACE", "POST"]),
    path=st.text(max_size=30),
)
def test_any_path(direct: Direct, method: str, path: str) -> None:
    status, headers, _ = direct.call(method, "/" + path, {}, b"")
    assert 400 <= status < 500 or path in ("docs", "openapi.json", "healthz", "readyz", "metrics")
    assert headers[b"x-request-id"]


def test_any_size(make_api: Callable[..., Api]) -> None:
    direct = Direct(make_api())
    for size in (1_999, 2_000, 2_001, 9_900, 10_000, 10_001, 50_000):
        body = json.dumps({"task_type": "any.json", "payload": "x" * size}).encode()
        expect_answer_or_problem(
            direct.call("POST", "/tasks", {"content-type": "application/json"}, body), {201}
        )
