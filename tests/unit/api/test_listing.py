"""GET /tasks: the edge of lists; what they find is in tests/unit/state/test_listing.py."""

from __future__ import annotations

from typing import Any

import pytest
from api_kit import NOW_MS, Api, slug
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from read_kit import event, submitted

from taskline.api.listing_models import TaskList
from taskline.errors import Unavailable
from taskline.schemas.events import DeadLettered, Succeeded, TaskSubmitted
from taskline.schemas.ids import new_task_id

NAMES = (
    "status",
    "task_type",
    "priority",
    "queue",
    "created_after",
    "created_before",
    "cursor",
    "limit",
    "ids",
)


def put(api: Api, age_ms: int, *events: type, **changes: Any) -> TaskSubmitted:
    task_id = new_task_id(NOW_MS - age_ms)
    task = submitted(task_id=task_id, root_id=task_id, **changes)
    own: dict[type, dict[str, Any]] = {
        Succeeded: {"execution": task_id, "result": b'{"km": 1}'},
        DeadLettered: {"reason": "permanent"},
    }
    api.store.put(task, *(event(kind, task, **own[kind]) for kind in events))
    return task


def listed(api: Api, query: str) -> dict[str, Any]:
    response = api.request("GET", f"/tasks?{query}")
    assert response.status_code == 200, response.text
    assert response.headers["cache-control"] == "no-store"
    answer: dict[str, Any] = response.json()
    TaskList.model_validate(answer)
    assert set(answer) == set(TaskList.model_fields)
    return answer


def ids(answer: dict[str, Any]) -> list[str]:
    return [task["task_id"] for task in answer["tasks"]]


def test_the_tenant_s_tasks_newest_first_without_results(api: Api) -> None:
    old, new = put(api, 2_000, Succeeded), put(api, 1_000)
    put(api, 0, tenant="other")
    answer = listed(api, "")
    assert ids(answer) == [str(new.task_id), str(old.task_id)]
    assert (answer["next_cursor"], answer["searched_to"]) == (None, None)
    single = api.request("GET", f"/tasks/{old.task_id}").json()
    del single["result"]
    assert answer["tasks"][1] == single


def test_each_filter_and_all_together(api: Api) -> None:
    dead = put(api, 3_000, DeadLettered, task_type="a.b", queue="q")
    put(api, 3_000, Succeeded, task_type="a.b", queue="q")
    put(api, 3_000, DeadLettered, task_type="c.d")
    filters = (
        "status=dead",
        "task_type=a.b",
        "queue=q",
        "priority=normal",
        "created_after=2026-11-29T15:04:02.120Z",
        "created_before=2026-11-29T15:04:02.121Z",
    )
    for each in filters:
        assert str(dead.task_id) in ids(listed(api, each))
    assert ids(listed(api, "&".join(filters))) == [str(dead.task_id)]
    for none in ("created_before=2026-11-29T15:04:02.120Z", "created_after=2026-11-29T15:04:02.121Z"):
        assert ids(listed(api, none)) == []
    assert ids(listed(api, "created_after=2026-11-29T17:04:02.120%2B02:00&status=dead&queue=q")) == [
        str(dead.task_id)
    ]


def test_pages_by_cursor_while_tasks_come_in(api: Api) -> None:
    tasks = [put(api, age) for age in range(1_000, 1_005)]
    first = listed(api, "limit=2")
    assert first["searched_to"] == listed(api, f"ids={tasks[1].task_id}")["tasks"][0]["created_at"]
    put(api, 0)
    second = listed(api, f"limit=3&cursor={first['next_cursor']}")
    assert ids(first) + ids(second) == [str(task.task_id) for task in tasks]


def test_a_cursor_of_another_list_is_a_bad_request(api: Api) -> None:
    for age in range(3):
        put(api, age)
    cursor = listed(api, "limit=1")["next_cursor"]
    for query in (f"status=dead&cursor={cursor}", "cursor=abc", f"cursor={cursor[:-2]}", "cursor=%C3%A9"):
        answer = api.request("GET", f"/tasks?{query}")
        assert (answer.status_code, slug(answer)) == (400, "invalid-cursor")


def test_tasks_by_id_in_the_order_asked_with_results(api: Api) -> None:
    first, second = put(api, 1_000, Succeeded), put(api, 2_000)
    foreign, unknown = put(api, 0, tenant="other"), new_task_id(NOW_MS)
    asked = [second, first, second, foreign]
    answer = listed(api, "ids=" + ",".join([*(str(task.task_id) for task in asked), str(unknown)]))
    assert ids(answer) == [str(second.task_id), str(first.task_id)]
    assert answer["unknown"] == [str(foreign.task_id), str(unknown)]
    assert answer["tasks"][1]["result"] == {"km": 1}
    assert answer["tasks"][1] == api.request("GET", f"/tasks/{first.task_id}").json()


def test_a_task_that_cannot_be_read_is_named(api: Api) -> None:
    good, bad = put(api, 1), put(api, 2)
    stored = api.store.tasks[bad.task_id]
    api.store.tasks[bad.task_id] = type(stored)(submission=stored.submission, events={0: b"\xc3\x01broken"})
    for query in ("", f"ids={good.task_id},{bad.task_id}"):
        answer = listed(api, query)
        assert (ids(answer), answer["unreadable"]) == ([str(good.task_id)], [str(bad.task_id)])
        assert answer["unknown"] == []


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("status=done", "completed"),
        ("priority=urgent", "normal"),
        ("state=dead", "unknown parameter"),
        ("statsu=dead", "'status'"),
        ("status=dead&status=dead", "twice"),
        ("limit=0", "from 1 to 200"),
        ("limit=201", "from 1 to 200"),
        ("limit=1e2", "from 1 to 200"),
        ("limit=", "from 1 to 200"),
        ("task_type=", "characters"),
        (f"queue={'x' * 256}", "characters"),
        ("created_after=yesterday", "RFC 3339"),
        ("created_after=2026-11-29T15:04:05", "UTC"),
        ("created_before=1764428645", "RFC 3339"),
        ("ids=019ad6e2-7c00-7d3a-9b1e-0f6c3a52d481&limit=3", "no other"),
        ("ids=" + ",".join(["019ad6e2-7c00-7d3a-9b1e-0f6c3a52d481"] * 101), "at most 100"),
    ],
)
def test_what_is_no_such_query_is_a_bad_request(api: Api, query: str, said: str) -> None:
    answer = api.request("GET", f"/tasks?{query}")
    assert (answer.status_code, slug(answer)) == (400, "bad-request")
    assert said in answer.json()["detail"]


@pytest.mark.parametrize("query", ["ids=", "ids=x", "ids=019ad6e2-7c00-7d3a-9b1e-0f6c3a52d481,"])
def test_ids_that_are_none(api: Api, query: str) -> None:
    answer = api.request("GET", f"/tasks?{query}")
    assert (answer.status_code, slug(answer)) == (400, "invalid-task-id")


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(NAMES) | st.text(max_size=5), st.text(max_size=20)), max_size=4))
def test_no_query_is_a_fault_of_the_server(api: Api, pairs: list[tuple[str, str]]) -> None:
    assert api.request("GET", "/tasks", params=pairs).status_code in (200, 400)


@pytest.mark.parametrize("query", ["", "ids=019ad6e2-7c00-7d3a-9b1e-0f6c3a52d481"])
def test_an_absent_view_is_a_503(api: Api, query: str) -> None:
    api.store.failure = Unavailable("refused")
    answer = api.request("GET", f"/tasks?{query}")
    assert (answer.status_code, slug(answer)) == (503, "view-unavailable")
