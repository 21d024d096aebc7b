"""POST /tasks/batch: each task by itself, all of them together."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest
from api_kit import MAX_PAYLOAD_BYTES, Api, slug

from taskline.errors import DeliveryFailed, DeliveryUnknown
from taskline.infra.log import OutRecord, Position
from taskline.schemas.types import TaskType

GOOD = {"task_type": "geo.nearest", "payload": {"iata": "LAX", "lat": 33.9}}
ANY = {"task_type": "any.json", "payload": 1}
WRONG = {"task_type": "geo.nearst", "payload": {}}


def batch(api: Api, tasks: object, **headers: str) -> httpx.Response:
    return api.request(
        "POST",
        "/tasks/batch",
        content=orjson.dumps({"tasks": tasks}),
        headers={"content-type": "application/json"} | headers,
    )


def results(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200
    found: list[dict[str, Any]] = response.json()["results"]
    return found


def without_instance(problem: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in problem.items() if name != "instance"}


def test_the_results_are_in_the_order_of_the_tasks(api: Api) -> None:
    tasks = [ANY | {"payload": number} for number in range(500)]
    answered = results(batch(api, tasks))
    assert [each["status"] for each in answered] == [201] * 500
    in_log = api.log.submissions()
    assert [orjson.loads(each.payload) for each in in_log] == list(range(500))
    assert [each["task"]["task_id"] for each in answered] == [str(each.task_id) for each in in_log]


@pytest.mark.parametrize(
    "task",
    [
        GOOD,
        ANY | {"delay_seconds": 5},
        WRONG,
        GOOD | {"payload": {"iata": 7}},
        ANY | {"priorty": "high"},
        ANY | {"payload": "x" * MAX_PAYLOAD_BYTES},
        ANY | {"dedup_key": "k"},
        [],
        None,
        {},
    ],
)
def test_each_task_is_answered_as_if_it_had_come_alone(make_api: Callable[..., Api], task: object) -> None:
    alone = make_api().submit(orjson.dumps(task))
    before, answered, after = results(batch(make_api(), [GOOD, task, GOOD]))
    assert (before["status"], after["status"]) == (201, 201)
    assert answered["status"] == alone.status_code
    if alone.status_code == 201:
        assert answered["task"] | {"task_id": 0} == alone.json() | {"task_id": 0}
        assert answered["replayed"] is False
    else:
        assert without_instance(answered["problem"]) == without_instance(alone.json())
        assert answered["problem"]["instance"].startswith("urn:taskline:request:")


def test_all_are_handed_to_the_log_before_the_first_acknowledgement(api: Api) -> None:
    futures: list[Future[Position]] = []
    append = api.log.append
    api.log.silent = True

    def hold(record: OutRecord) -> Future[Position]:
        futures.append(append(record))
        if len(futures) == 200:
            for number, future in enumerate(futures):
                future.set_result(Position(topic="t", partition=0, offset=number))
        return futures[-1]

    api.log.append = hold  # type: ignore[method-assign]
    assert {each["status"] for each in results(batch(api, [ANY] * 200))} == {201}


def test_what_the_log_does_not_take_is_said_of_each(make_api: Callable[..., Api]) -> None:
    api = make_api(request_timeout_seconds=0.1)
    append = api.log.append
    failures = {1: DeliveryFailed("no"), 2: DeliveryUnknown("timed out")}

    def some(record: OutRecord) -> Future[Position]:
        number = len(api.log.records)
        if number == 3:
            api.log.records.append(record)
            return asyncio.get_running_loop().create_future()
        api.log.failure = failures.get(number)
        return append(record)

    api.log.append = some  # type: ignore[method-assign]
    answered = results(batch(api, [ANY] * 5))
    assert [each["status"] for each in answered] == [201, 503, 503, 503, 201]
    kinds = [each["problem"]["type"].rpartition(":")[2] for each in answered[1:4]]
    assert kinds == ["not-accepted", "delivery-unknown", "delivery-unknown"]
    assert all(each["retry_after"] >= 1 for each in answered[1:4])
    unknown = [each["problem"]["task_id"] for each in answered[2:4]]
    assert unknown == [str(each.task_id) for each in api.log.submissions()[2:4]]


def test_keys_of_single_tasks_hold(api: Api) -> None:
    keyed = ANY | {"idempotency_key": "a"}
    windowed = ANY | {"dedup_key": "d", "dedup_window_seconds": 60}
    tasks = [keyed, keyed, keyed | {"payload": 2}, ANY, windowed, windowed]
    answered = results(batch(api, tasks))
    assert [each["status"] for each in answered] == [201, 201, 409, 201, 201, 200]
    first, second = answered[:2]
    assert first["task"] == second["task"]
    assert [first["replayed"], second["replayed"]] == [False, True]
    assert answered[5]["task"]["duplicate"] is True
    assert answered[5]["task"]["task_id"] == answered[4]["task"]["task_id"]
    assert len(api.log.records) == 3
    again = results(batch(api, [keyed]))
    assert again[0]["task"] == first["task"]
    assert api.submit(keyed).json() == first["task"]


def test_a_fault_in_one_task_is_that_task_s(api: Api) -> None:
    get = api.types.get

    def broken(name: str) -> TaskType:
        if name == "broken":
            raise ZeroDivisionError
        return get(name)

    api.types.get = broken  # type: ignore[method-assign]
    tasks = [ANY, ANY | {"task_type": "broken"}, ANY | {"task_type": "broken", "idempotency_key": "k"}]
    answered = results(batch(api, tasks))
    assert [each["status"] for each in answered] == [201, 500, 500]
    assert answered[1]["problem"]["type"] == "urn:taskline:problem:internal-error"


@pytest.mark.parametrize("tasks", [[], [ANY] * 501, {}, None, "x", 5])
def test_what_is_no_batch_is_refused_as_a_whole(api: Api, tasks: object) -> None:
    response = batch(api, tasks)
    assert (response.status_code, slug(response)) == (422, "invalid-fields")
    assert response.json()["errors"][0]["pointer"] == "/tasks"
    assert not api.log.records


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"null"])
def test_what_is_no_object_is_malformed(api: Api, body: bytes) -> None:
    response = api.request("POST", "/tasks/batch", content=body, headers={"content-type": "application/json"})
    assert (response.status_code, slug(response)) == (422, "malformed-body")


def test_the_header_is_no_batch_s(api: Api) -> None:
    response = batch(api, [ANY], **{"idempotency-key": "k"})
    assert (response.status_code, slug(response)) == (422, "invalid-fields")
    assert "idempotency_key" in response.json()["detail"]
    assert not api.log.records


def test_a_body_over_the_limit_is_too_large(make_api: Callable[..., Api]) -> None:
    api = make_api(max_batch_bytes=20_000)
    assert batch(api, [ANY | {"payload": "x" * 1_000}] * 15).status_code == 200
    response = batch(api, [ANY | {"payload": "x" * 1_000}] * 30)
    assert (response.status_code, slug(response)) == (413, "too-large")
    assert response.json()["limit_bytes"] == 20_000


def test_each_task_counts_against_the_rate_limit(make_api: Callable[..., Api]) -> None:
    api = make_api(rate_limit_submissions_per_tenant="5/minute")
    assert results(batch(api, [ANY, WRONG, ANY]))[2]["status"] == 201
    refused = batch(api, [ANY] * 3)
    assert (refused.status_code, slug(refused)) == (429, "rate-limited")
    assert slug(batch(api, [ANY] * 6)) == "invalid-fields"
    assert batch(api, [ANY] * 2).status_code == 200
    assert len(api.log.records) == 4


def test_the_trace_context_goes_with_each(api: Api) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    batch(api, [ANY, ANY | {"idempotency_key": "k"}], traceparent=parent)
    assert [each.traceparent for each in api.log.submissions()] == [parent, parent]
