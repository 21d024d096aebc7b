"""Probes, metrics, request ids, and what surrounds every request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest
from api_kit import NOW_MS, Api, slug

from taskline.api.late import LateTypes, LateView
from taskline.errors import Unavailable
from taskline.schemas.ids import new_task_id

UNKNOWN = str(new_task_id(NOW_MS - 3_600_000))


def test_alive_and_ready(api: Api) -> None:
    assert api.request("GET", "/healthz").json() == {"status": "alive"}
    answer = api.request("GET", "/readyz").json()
    assert answer["status"] == "ready"
    assert answer["checks"]["kafka"] == {"up": True, "detail": None}


def test_not_ready_says_what_is_away(api: Api) -> None:
    api.health.report("view", up=False, detail="run `taskline view migrate`")
    response = api.request("GET", "/readyz")
    assert (response.status_code, slug(response)) == (503, "not-ready")
    assert response.json()["checks"] == {
        "kafka": {"up": True, "detail": None},
        "view": {"up": False, "detail": "run `taskline view migrate`"},
    }
    assert "taskline view migrate" in response.json()["detail"]
    assert api.request("GET", "/readyz?for=submit").status_code == 200
    assert api.request("GET", "/readyz?for=read").status_code == 503
    assert api.request("GET", "/healthz").status_code == 200


def test_ready_for_what_is_checked(api: Api) -> None:
    response = api.request("GET", "/readyz?for=lunch")
    assert (response.status_code, slug(response)) == (400, "bad-request")


def test_a_stopping_process_is_not_ready_but_serves(api: Api) -> None:
    api.health.stop()
    response = api.request("GET", "/readyz?for=submit")
    assert response.status_code == 503
    assert "stopping" in response.json()["detail"]
    assert api.submit({"task_type": "any.json", "payload": 1}).status_code == 201


def test_requests_are_counted_by_route_template(api: Api) -> None:
    for _ in range(3):
        api.request("GET", f"/tasks/{UNKNOWN}")
    api.request("GET", "/nowhere")
    api.request("DELETE", "/tasks")
    response = api.request("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    page = response.text
    assert 'taskline_api_requests_total{method="GET",route="/tasks/{task_id}",status="404"} 3.0' in page
    assert 'taskline_api_requests_total{method="GET",route="(none)",status="404"} 1.0' in page
    assert re.search(r'taskline_api_requests_total\{method="DELETE",route="[^"]+",status="405"\} 1\.0', page)
    assert 'taskline_api_request_seconds_count{method="GET",route="/tasks/{task_id}"} 3.0' in page
    assert "taskline_api_requests_in_flight 1.0" in page
    assert UNKNOWN not in page


def test_made_up_methods_make_no_labels(api: Api) -> None:
    for n in range(5):
        response = api.request(f"BREW{n}", "/tasks")
        assert (response.status_code, slug(response)) == (405, "method-not-allowed")
        assert response.headers["allow"]
    page = api.request("GET", "/metrics").text
    assert "BREW" not in page
    assert 'method="OTHER"' in page


@pytest.mark.parametrize(
    ("given", "kept"),
    [("req-1", True), ("a/b:c=@+._-", True), ("", False), ("x" * 129, False), ("a b", False), ("ü", False)],
)
def test_request_ids_are_echoed_if_they_can_be(api: Api, given: str, kept: bool) -> None:
    response = api.request("GET", "/healthz", headers={"x-request-id": given.encode()})
    assert (response.headers["x-request-id"] == given) is kept
    assert re.fullmatch(r"[!-~]{1,128}", response.headers["x-request-id"])


def test_two_requests_have_two_ids(api: Api) -> None:
    first, second = (api.request("GET", "/healthz").headers["x-request-id"] for _ in range(2))
    assert first != second


@pytest.mark.parametrize("path", ["/", "/nowhere", "/tasks/", "/tasks/a/b/c", "//", "/%2e%2e/etc"])
def test_other_paths_lead_nowhere(api: Api, path: str) -> None:
    response = api.request("GET", path)
    assert response.status_code in (404, 405, 400)


def test_beyond_its_limit_the_process_refuses_but_stays_visible(make_api: Callable[..., Api]) -> None:
    api = make_api(max_requests_in_flight=1)
    api.store.silent = True

    async def scenario() -> None:
        held = asyncio.ensure_future(api.send("GET", f"/tasks/{UNKNOWN}"))
        await api.store.asked.wait()
        refused = await api.send("GET", f"/tasks/{UNKNOWN}")
        assert (refused.status_code, slug(refused)) == (503, "overloaded")
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await api.send("GET", path)).status_code == 200
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        api.store.silent = False
        assert (await api.send("GET", f"/tasks/{UNKNOWN}")).status_code == 404

    api.run(scenario())


def test_before_the_types_are_read_nothing_is_called_unknown(api: Api) -> None:
    late = LateTypes()
    with pytest.raises(Exception, match="no task type is known") as raised:
        late.get("any.json")
    api.types.failure = raised.value
    response = api.submit({"task_type": "any.json", "payload": 1})
    assert (response.status_code, slug(response)) == (503, "types-unavailable")
    assert api.request("GET", "/task-types").status_code == 503
    late.source = api.types
    api.types.failure = None
    assert late.get("any.json").name == "any.json"
    assert "any.json" in late.names()


def test_before_the_view_is_connected_it_is_unavailable(api: Api) -> None:
    late = LateView()
    task_id = new_task_id(NOW_MS)
    for question in (late.get, late.history):
        with pytest.raises(Unavailable):
            api.run(question(task_id, tenant="default"))


def test_the_client_that_leaves_is_counted_and_harms_nobody(api: Api) -> None:
    sent: list[object] = []

    async def gone() -> dict[str, object]:
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/tasks",
        "raw_path": b"/tasks",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
    }
    api.run(api.app(scope, gone, send))
    assert 'status="499"} 1.0' in api.request("GET", "/metrics").text
