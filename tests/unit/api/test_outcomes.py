"""What became of submissions and cancels, as the numbers tell it."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from api_kit import NOW_MS, Api

from taskline.errors import DeliveryUnknown, QueueFull
from taskline.schemas.events import CancelRequested, LifecycleEvent, Priority, Succeeded, TaskSubmitted
from taskline.schemas.ids import new_task_id

ANY = {"task_type": "any.json", "payload": 1}
KEYED = ANY | {"idempotency_key": "order-17"}
WINDOWED = ANY | {"dedup_key": "nightly", "dedup_window_seconds": 60}
JSON = {"content-type": "application/json"}


def submitted(api: Api) -> dict[tuple[str, str], float]:
    """Tasks by way and outcome."""
    (family,) = api.metrics.submitted.collect()
    return {
        (sample.labels["via"], sample.labels["outcome"]): sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def cancels(api: Api) -> dict[str, float]:
    (family,) = api.metrics.cancels.collect()
    return {
        sample.labels["outcome"]: sample.value for sample in family.samples if sample.name.endswith("_total")
    }


def waits(api: Api) -> float:
    for line in api.request("GET", "/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if name == "taskline_api_claim_waits_total":
            return float(value)
    raise AssertionError("no such metric")


def test_each_submission_is_counted_once_by_what_its_caller_was_told(api: Api) -> None:
    for body in (ANY, KEYED, KEYED, KEYED | {"payload": 2}, WINDOWED, WINDOWED, ANY | {"task_type": "no"}):
        api.submit(body)
    api.submit(b"{")
    assert submitted(api) == {
        ("single", "accepted"): 3,
        ("single", "replayed"): 1,
        ("single", "idempotency-conflict"): 1,
        ("single", "duplicate"): 1,
        ("single", "unknown-task-type"): 1,
        ("single", "malformed-body"): 1,
    }


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [(DeliveryUnknown("late"), "delivery-unknown"), (QueueFull("full"), "not-accepted")],
)
def test_what_kafka_did_not_acknowledge_is_counted(api: Api, failure: Exception, outcome: str) -> None:
    api.log.failure = failure
    api.submit(ANY)
    assert submitted(api) == {("single", outcome): 1}


def test_a_fault_is_counted_as_one(api: Api) -> None:
    api.types.failure = RuntimeError("a bug")
    assert api.submit(ANY).status_code == 500
    assert submitted(api) == {("single", "internal-error"): 1}


def test_the_tasks_of_a_batch_are_counted_one_by_one(api: Api) -> None:
    tasks = [ANY, KEYED, WINDOWED, {"task_type": "no", "payload": 1}, ANY | {"priorty": "high"}, ANY]
    content = orjson.dumps({"tasks": tasks})
    assert api.request("POST", "/tasks/batch", content=content, headers=JSON).status_code == 200
    assert submitted(api) == {
        ("batch", "accepted"): 4,
        ("batch", "unknown-task-type"): 1,
        ("batch", "invalid-fields"): 1,
    }


def test_what_waits_for_another_one_with_its_key_is_counted_once(api: Api) -> None:
    before = waits(api)
    api.log.silent = True

    async def race() -> None:
        async def post() -> Any:
            return await api.send("POST", "/tasks", content=orjson.dumps(KEYED), headers=JSON)

        first = asyncio.create_task(post())
        await asyncio.sleep(0.05)
        assert api.log.records
        second = asyncio.create_task(post())
        # Long enough for several looks at the claim.
        await asyncio.sleep(0.2)
        first.cancel()
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)

    api.run(race())
    assert waits(api) == before + 1


def task(api: Api, *events: type[LifecycleEvent]) -> str:
    """A task in the view to which these have happened; its id."""
    task_id = new_task_id(NOW_MS - 60_000)
    common: dict[str, Any] = {
        "task_id": task_id,
        "tenant": "default",
        "retain_until": NOW_MS + 86_400_000,
    }
    submission = TaskSubmitted(
        **common,
        task_type="any.json",
        queue="geo",
        priority=Priority.NORMAL,
        payload=b"{}",
        max_retries=3,
        root_id=task_id,
    )
    more: dict[type[LifecycleEvent], dict[str, Any]] = {
        CancelRequested: {"request_id": task_id, "abort": False},
        Succeeded: {"execution": task_id},
    }
    happened = [each(**common, attempt=1, worker="w", at=NOW_MS, **more[each]) for each in events]
    api.store.put(submission, *happened)
    return f"/tasks/{task_id}"


@pytest.mark.parametrize(
    ("happened", "status", "outcome"),
    [(CancelRequested, 200, "cancelled"), (Succeeded, 409, "refused")],
)
def test_a_cancel_is_counted_by_what_came_of_it(
    api: Api, happened: type[LifecycleEvent], status: int, outcome: str
) -> None:
    assert api.request("DELETE", task(api, happened)).status_code == status
    assert cancels(api) == {outcome: 1}


def test_a_cancel_that_the_view_does_not_show_in_time_is_counted_as_requested() -> None:
    api = Api(request_timeout_seconds=0.3)
    try:
        assert api.request("DELETE", task(api)).status_code == 202
        assert cancels(api) == {"requested": 1}
    finally:
        api.close()


def test_a_cancel_without_an_acknowledgement_is_counted_as_unknown(api: Api) -> None:
    api.log.failure = DeliveryUnknown("late")
    assert api.request("DELETE", task(api)).status_code == 503
    assert cancels(api) == {"unknown": 1}


def test_a_cancel_of_no_task_is_counted_by_its_status_only(api: Api) -> None:
    assert api.request("DELETE", f"/tasks/{new_task_id(NOW_MS - 60_000)}").status_code == 404
    assert cancels(api) == {}
