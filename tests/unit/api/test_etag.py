"""Entity tags, conditional reads and what is kept of ended tasks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from api_kit import NOW_MS, Api
from hypothesis import given
from hypothesis import strategies as st
from read_kit import event, started, submitted

from taskline.api.ended import EndedCache, Kept
from taskline.api.etag import Rendered, etag_of, none_match
from taskline.schemas.events import DeadLettered, Succeeded, TaskSubmitted
from taskline.schemas.ids import TaskId, new_task_id

OWN = etag_of(b"own")


@pytest.mark.parametrize(
    ("header", "sent"),
    [
        (None, True),
        ("", True),
        ("*", False),
        (OWN, False),
        (f"W/{OWN}", False),
        (f'"other", {OWN}', False),
        (f'"a,b",{OWN},W/"c"', False),
        ('"other"', True),
        (OWN.strip('"'), True),
        (OWN[:-1], True),
    ],
)
def test_if_none_match(header: str | None, sent: bool) -> None:
    assert none_match(header, OWN) is sent


@given(st.text())
def test_no_header_breaks_it(header: str) -> None:
    assert none_match(header, OWN) is (OWN not in header and header.strip() != "*")


def completed(api: Api, **changes: object) -> TaskSubmitted:
    task, execution = submitted(**changes), new_task_id(NOW_MS)
    api.store.put(task, started(task, execution), event(Succeeded, task, execution=execution, result=b"1"))
    return task


def test_a_state_has_the_same_tag_until_it_changes(api: Api) -> None:
    task = submitted()
    api.store.put(task)
    first = api.request("GET", f"/tasks/{task.task_id}")
    tag = first.headers["etag"]
    again = api.request("GET", f"/tasks/{task.task_id}", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    for name in ("etag", "cache-control", "vary"):
        assert again.headers[name] == first.headers[name]
    api.store.put(task, started(task, new_task_id(NOW_MS)))
    changed = api.request("GET", f"/tasks/{task.task_id}", headers={"if-none-match": tag})
    assert (changed.status_code, changed.json()["status"]) == (200, "running")
    assert changed.headers["etag"] != tag


def test_only_what_cannot_change_may_be_kept_by_the_client(api: Api) -> None:
    dead = submitted()
    api.store.put(dead, event(DeadLettered, dead, reason="permanent"))
    done = completed(api)
    soon_gone = completed(api, retain_until=NOW_MS + 90_500)
    asked = [api.request("GET", f"/tasks/{task.task_id}") for task in (dead, done, soon_gone)]
    assert [answer.headers["cache-control"] for answer in asked] == [
        "private, no-cache",
        "private, max-age=3600",
        "private, max-age=90",
    ]


def test_an_ended_task_is_read_once_and_a_dead_one_each_time(api: Api) -> None:
    dead, done = submitted(), completed(api)
    api.store.put(dead, event(DeadLettered, dead, reason="permanent"))
    for task, reads in ((done, 1), (dead, 3)):
        api.store.reads = 0
        answers = [api.request("GET", f"/tasks/{task.task_id}") for _ in range(3)]
        assert api.store.reads == reads
        assert len({(answer.content, answer.headers["etag"]) for answer in answers}) == 1


def test_without_a_cache_every_read_is_one(make_api: Callable[..., Api]) -> None:
    api = make_api(ended_cache_bytes=0)
    task = completed(api)
    for _ in range(3):
        api.request("GET", f"/tasks/{task.task_id}")
    assert api.store.reads == 3


def kept(size: int, *, tenant: str = "a", retain_until: int = 100) -> Kept:
    return Kept(tenant=tenant, rendered=Rendered.of(b"x" * size), retain_until=retain_until)


def test_what_is_kept_is_given_to_its_tenant_until_its_retention_is_over() -> None:
    cache, task_id = EndedCache(10_000), new_task_id(NOW_MS)
    cache.put(task_id, kept(10))
    assert cache.get(task_id, tenant="a", now_ms=99) == kept(10).rendered
    assert cache.get(task_id, tenant="b", now_ms=99) is None
    assert cache.get(task_id, tenant="a", now_ms=100) is None
    assert len(cache) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 3_000)), max_size=60))
def test_the_cache_keeps_the_most_recently_used_within_its_size(calls: list[tuple[bool, int, int]]) -> None:
    cache = EndedCache(5_000)
    model: dict[TaskId, Kept] = {}
    ids = [TaskId(int=number) for number in range(10)]
    for put, number, size in calls:
        task_id = ids[number]
        if put:
            model.pop(task_id, None)
            model[task_id] = kept(size)
            cache.put(task_id, kept(size))
            while sum(each.size_bytes for each in model.values()) > 5_000:
                del model[next(iter(model))]
        else:
            found = cache.get(task_id, tenant="a", now_ms=0)
            assert found == (model[task_id].rendered if task_id in model else None)
            if task_id in model:
                model[task_id] = model.pop(task_id)
    assert len(cache) == len(model)
