"""Batches and dedup windows on real servers, with a worker that runs what was accepted."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from api_process import eventually, running_api
from http_system import HttpSystem, http_settings, http_system

from taskline.client import Client

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

WINDOW_SECONDS = 600
ANSWER_SECONDS = 60.0
ENDED = ("completed", "dead", "cancelled", "expired")


@pytest.fixture(scope="module")
def system(
    servers: Any, keyspace: str, view_ready: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpSystem]:
    # Many threads and a whole system share few cores: a projector that is late is waited for.
    api = {"read_your_writes_seconds": 10.0}
    with http_system(http_settings(servers, keyspace, api=api), tmp_path_factory.mktemp("batch")) as running:
        yield running


@pytest.fixture
def tenant(system: HttpSystem) -> Iterator[httpx.Client]:
    """A new tenant's connection."""
    key = system.key(f"tenant-{secrets.token_hex(4)}")
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=system.api.url, headers=headers, timeout=60) as client:
        yield client


def post(client: httpx.Client, body: dict[str, Any]) -> httpx.Response:
    """Submit, again and again while the answer is a 503."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while (answer := client.post("/tasks", json=body)).status_code == 503:
        assert time.monotonic() < deadline, answer.text
        time.sleep(int(answer.headers["retry-after"]))
    return answer


def state(client: httpx.Client, task_id: str, *, wait: float = 0.0) -> Any:
    params = {"wait": wait} if wait else None
    return client.get(f"/tasks/{task_id}", params=params).json()


def window(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "task_type": "http.echo",
        "payload": {"n": number},
        "dedup_key": "ada",
        "dedup_window_seconds": WINDOW_SECONDS,
    } | changes


# ---- batches ------------------------------------------------------------------------------------------------------

# What the n-th of every ten tasks has besides, and how it is answered.
KINDS: dict[int, tuple[dict[str, Any], int]] = {
    1: ({"task_type": "http.ecko"}, 400),
    3: ({"delay_seconds": -1}, 422),
    4: ({"priorty": "high"}, 422),
    6: ({"payload": "x" * 1_100_000}, 413),
}


def item(number: int) -> tuple[dict[str, Any], int]:
    """The n-th task of the batch and its status: in each ten four that are wrong and two with keys."""
    body: dict[str, Any] = {"task_type": "http.echo", "payload": {"n": number}}
    kind = number % 10
    if kind == 6 and number > 10:
        # One that is too large is enough for a body.
        return body, 201
    if kind == 5:
        body["idempotency_key"] = f"key-{number}"
    if kind == 7:
        # Each is the task of one before it, whose key was for another payload.
        return body | {"idempotency_key": f"key-{number - 2}"}, 409
    change, status = KINDS.get(kind, ({}, 201))
    return body | change, status


def test_a_batch_of_500_is_answered_one_by_one(tenant: httpx.Client) -> None:
    bodies, expected = zip(*(item(number) for number in range(500)), strict=True)
    answer = tenant.post("/tasks/batch", json={"tasks": bodies})
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    # Of two requests under one key either may be first.
    told = [each["status"] for each in results]
    for number in range(7, 500, 10):
        told[number - 2 : number + 1 : 2] = sorted(told[number - 2 : number + 1 : 2])
    assert told == list(expected)
    accepted = {
        number: each["task"]["task_id"] for number, each in enumerate(results) if each["status"] == 201
    }
    assert len(set(accepted.values())) == len(accepted)
    # Each is its own task, and runs with its own payload.
    for number, task_id in accepted.items():
        ended = state(tenant, task_id, wait=30)
        assert (ended["status"], ended["result"]) == ("completed", {"n": number})
    # The same again: those with keys are the same tasks.
    again = tenant.post("/tasks/batch", json={"tasks": bodies}).json()["results"]
    for number, each in enumerate(again):
        if "idempotency_key" in bodies[number]:
            assert each["status"] == results[number]["status"]
            if number in accepted:
                assert (each["task"]["task_id"], each["replayed"]) == (accepted[number], True)
        elif number in accepted:
            assert each["task"]["task_id"] != accepted[number]


# ---- windows ------------------------------------------------------------------------------------------------------


def test_of_parallel_tasks_in_a_window_one_is_accepted_until_it_is_over(tenant: httpx.Client) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(
            pool.map(
                lambda number: tenant.post("/tasks", json=window(number, dedup_window_seconds=3)), range(60)
            )
        )
    begun = time.monotonic()
    assert Counter(each.status_code for each in answers) == {201: 1, 200: 59}
    assert len({each.json()["task_id"] for each in answers}) == 1
    first = answers[0].json()["task_id"]
    assert state(tenant, first, wait=30)["status"] == "completed"
    late = tenant.post("/tasks", json=window(61, dedup_window_seconds=3))
    if time.monotonic() - begun < 2:
        assert (late.status_code, late.json()["status"]) == (200, "completed")
    time.sleep(max(0.0, begun + 3.1 - time.monotonic()))
    after = tenant.post("/tasks", json=window(62, dedup_window_seconds=3)).json()
    assert after["task_id"] != first


def test_a_task_that_waits_makes_way_and_what_runs_or_is_over_does_not(tenant: httpx.Client) -> None:
    replace = {"dedup_mode": "replace"}
    later = [post(tenant, window(number, delay_seconds=3_600, **replace)) for number in range(4)]
    assert {each.status_code for each in later} == {201}
    ids = [each.json()["task_id"] for each in later]
    assert [state(tenant, each)["status"] for each in ids] == ["cancelled"] * 3 + ["scheduled"]
    running = window(5, task_type="http.sleep", payload={"seconds": 3})
    first = post(tenant, running | replace).json()["task_id"]
    eventually(lambda: state(tenant, first)["status"] == "running", "it runs")
    second = post(tenant, running | replace | {"payload": {"seconds": 0}})
    assert (second.status_code, second.json()["task_id"], second.json()["status"]) == (200, first, "running")
    assert state(tenant, first, wait=30)["status"] == "completed"
    third = post(tenant, running | replace)
    assert (third.status_code, third.json()["status"]) == (200, "completed")
    # The window of another task type, from the beginning of this test, was not touched.
    last = post(tenant, window(6, **replace)).json()["task_id"]
    assert state(tenant, ids[-1])["status"] == "cancelled"
    assert state(tenant, last, wait=30)["result"] == {"n": 6}


def test_two_replicas_that_replace_at_once_leave_one_task(
    system: HttpSystem, tmp_path_factory: pytest.TempPathFactory
) -> None:
    key = system.key(f"tenant-{secrets.token_hex(4)}")
    headers = {"authorization": f"Bearer {key}"}
    at_once = threading.Barrier(12)
    with (
        running_api(system.settings, tmp_path_factory.mktemp("second")) as other,
        httpx.Client(base_url=system.api.url, headers=headers, timeout=60) as one,
        httpx.Client(base_url=other.url, headers=headers, timeout=60) as two,
    ):
        eventually(other.ready, "the second is ready")

        def submit(number: int) -> httpx.Response:
            at_once.wait(30)
            body = window(number, delay_seconds=3_600, dedup_mode="replace")
            return post((one, two)[number % 2], body)

        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(submit, range(12)))
        assert {each.status_code for each in answers} == {201}
        ids = [each.json()["task_id"] for each in answers]
        assert len(set(ids)) == 12
        states = Counter(state(one, each)["status"] for each in ids)
        assert states == {"cancelled": 11, "scheduled": 1}


def test_the_client_replaces_too(system: HttpSystem) -> None:
    with Client(system.api.url, system.key(f"tenant-{secrets.token_hex(4)}")) as client:
        options: dict[str, Any] = {
            "dedup_key": "k",
            "dedup_window_seconds": WINDOW_SECONDS,
            "dedup_mode": "replace",
        }
        first = client.submit("http.echo", 1, delay_seconds=3_600, **options)
        second = client.submit("http.echo", 2, **options)
        assert not second.duplicate
        assert client.get(first.task_id).status == "cancelled"
        assert client.wait(second.task_id, 30).result == 2
        third = client.submit("http.echo", 3, **options)
        assert (third.duplicate, third.task_id, third.status) == (True, second.task_id, "completed")
