"""GET /tasks/{id}, its history, and /task-types."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import structlog
from api_kit import NOW_MS, PLACE, Api, slug
from read_kit import event, started, submitted

from taskline.api.models import AttemptView, EventView, TaskHistoryView, TaskTypeList, TaskView
from taskline.errors import ProducerClosed, Unavailable, UnknownSchema
from taskline.schemas.events import (
    DeadLettered,
    Failed,
    Released,
    Succeeded,
)
from taskline.schemas.ids import new_task_id

UNKNOWN = "019ad6e2-7c00-7d3a-9b1e-0f6c3a52d481"


def test_a_task_that_waits(api: Api) -> None:
    task = submitted(not_before=NOW_MS + 1)
    api.store.put(task)
    response = api.request("GET", f"/tasks/{task.task_id}")
    assert response.status_code == 200
    assert response.headers["cache-control"] == "private, no-cache"
    answer = response.json()
    TaskView.model_validate(answer)
    assert set(answer) == set(TaskView.model_fields)
    assert answer == {
        "task_id": str(task.task_id),
        "task_type": "geo.nearest",
        "status": "scheduled",
        "priority": "normal",
        "queue": "geo",
        "created_at": "2026-11-29T15:03:05.120Z",
        "scheduled_at": "2026-11-29T15:04:05.121Z",
        "started_at": None,
        "completed_at": None,
        "attempt": 0,
        "retry_count": 0,
        "max_retries": 3,
        "next_attempt_at": None,
        "last_error": None,
        "result": None,
        "reason": None,
        "worker": None,
        "progress": None,
        "root_id": str(task.task_id),
        "replay_of": None,
        "generation": 0,
        "replayed_as": None,
        "retain_until": "2026-11-30T15:04:05.120Z",
    }


def test_a_completed_task_shows_its_result_to_the_digit(api: Api) -> None:
    task, execution = submitted(), new_task_id(NOW_MS)
    api.store.put(
        task,
        started(task, execution),
        event(Succeeded, task, execution=execution, result=b'{"km": 6.10, "n": 18446744073709551615}'),
    )
    response = api.request("GET", f"/tasks/{task.task_id}")
    answer = response.json()
    assert answer["status"] == "completed"
    assert answer["completed_at"] == answer["started_at"] == "2026-11-29T15:03:15.120Z"
    assert (answer["attempt"], answer["retry_count"], answer["worker"]) == (1, 0, "w-1")
    assert b'"result":{"km": 6.10, "n": 18446744073709551615}' in response.content


def test_a_result_that_is_not_json_does_not_break_the_answer(api: Api) -> None:
    task, execution = submitted(), new_task_id(NOW_MS)
    api.store.put(task, event(Succeeded, task, execution=execution, result=b'{"km": '))
    answer = api.request("GET", f"/tasks/{task.task_id}").json()
    assert (answer["status"], answer["result"]) == ("completed", None)


def test_a_dead_task_says_why_and_its_history_has_every_execution(api: Api) -> None:
    task = submitted()
    first, second = new_task_id(NOW_MS), new_task_id(NOW_MS)
    failure = {"error_class": "ValueError", "message": "no such place", "retryable": True}
    api.store.put(
        task,
        started(task, first),
        event(Released, task, execution=first, reason="shutdown"),
        started(task, second, attempt=2, source_offset=2),
        event(Failed, task, execution=second, attempt=2, traceback="Traceback…", **failure),
        event(DeadLettered, task, attempt=2, reason="failed"),
    )
    state = api.request("GET", f"/tasks/{task.task_id}").json()
    assert (state["status"], state["reason"], state["retry_count"]) == ("dead", "failed", 1)
    assert state["last_error"] == {
        "class": "ValueError",
        "message": "no such place",
        "attempt": 2,
        "at": "2026-11-29T15:03:15.120Z",
        "retryable": True,
        "category": "unknown",
    }
    response = api.request("GET", f"/tasks/{task.task_id}/history")
    assert response.status_code == 200
    history = response.json()
    TaskHistoryView.model_validate(history)
    assert set(history) == set(TaskHistoryView.model_fields)
    assert set(history["attempts"][0]) == set(AttemptView.model_fields)
    assert set(history["events"][0]) <= set(EventView.model_fields)
    assert [(row["outcome"], row["reason"], row["attempt"]) for row in history["attempts"]] == [
        ("released", "shutdown", 1),
        ("failed", None, 2),
    ]
    assert history["attempts"][1]["error"]["traceback"] == "Traceback…"
    assert [row["event"] for row in history["events"]] == [
        "started",
        "released",
        "started",
        "failed",
        "dead_lettered",
    ]
    assert [(row["offset"], row["index"]) for row in history["events"]] == [(7, n) for n in range(5)]
    assert history["events"][3]["error"] == "ValueError"


@pytest.mark.parametrize("suffix", ["", "/history"])
def test_unknown_and_foreign_tasks_look_the_same(api: Api, suffix: str) -> None:
    foreign = submitted(tenant="other")
    api.store.put(foreign)
    unseen = new_task_id(NOW_MS)
    answers = [
        api.request("GET", f"/tasks/{task_id}{suffix}") for task_id in (UNKNOWN, foreign.task_id, unseen)
    ]
    assert {(answer.status_code, slug(answer)) for answer in answers} == {(404, "task-not-found")}


@pytest.mark.parametrize("suffix", ["", "/history"])
@pytest.mark.parametrize(
    "task_id",
    [
        "42",
        "%20",
        "..%2f..",
        "%00",
        "%F0%9F%98%80",
        "0f6c3a52-d481-4d3a-9b1e-0f6c3a52d481",
        "{019ad6e2-7c00-7d3a-9b1e-0f6c3a52d481}",
        "019ad6e27c007d3a9b1e0f6c3a52d481",
        "ffffffff-ffff-7d3a-9b1e-0f6c3a52d481",
        "x" * 5_000,
    ],
)
def test_what_is_not_a_task_id_is_a_bad_request(api: Api, task_id: str, suffix: str) -> None:
    response = api.request("GET", f"/tasks/{task_id}{suffix}")
    assert (response.status_code, slug(response)) in {(400, "invalid-task-id"), (404, "not-found")}
    if "2f" not in task_id:
        assert response.status_code == 400


@pytest.mark.parametrize("suffix", ["", "/history"])
def test_an_absent_view_is_a_503_in_bounded_time(make_api: Callable[..., Api], suffix: str) -> None:
    api = make_api(request_timeout_seconds=0.05)
    for failure, silent in (
        (Unavailable("refused"), False),
        (UnknownSchema("00ff"), False),
        (None, True),
    ):
        api.store.failure, api.store.silent = failure, silent
        response = api.request("GET", f"/tasks/{UNKNOWN}{suffix}")
        assert (response.status_code, slug(response)) == (503, "view-unavailable")


def test_a_fault_of_the_server_is_logged_and_leaks_nothing(api: Api) -> None:
    for failure in (RuntimeError("password=hunter2"), ProducerClosed("hunter2")):
        api.store.failure = failure
        with structlog.testing.capture_logs() as logged:
            response = api.request("GET", f"/tasks/{UNKNOWN}", headers={"x-request-id": "req-1"})
        (entry,) = [each for each in logged if each["log_level"] == "error"]
        assert (entry["request_id"], entry["route"]) == ("req-1", "/tasks/{task_id}")
        assert (response.status_code, slug(response)) == (500, "internal-error")
        assert "hunter2" not in response.text
        assert response.json()["instance"] == "urn:taskline:request:req-1"


def test_the_task_types_with_their_schemas(api: Api) -> None:
    response = api.request("GET", "/task-types")
    assert response.status_code == 200
    TaskTypeList.model_validate(response.json())
    anything, nearest = response.json()["task_types"]
    assert anything == {
        "name": "any.json",
        "queue": "default",
        "priority": "normal",
        "timeout_seconds": None,
        "max_retries": 3,
        "payload_schema": None,
    }
    assert nearest["timeout_seconds"] == 1.5
    assert nearest["payload_schema"]["name"] == "Place"
    assert PLACE.source
