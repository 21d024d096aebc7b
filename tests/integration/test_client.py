"""The Python client and its commands on the whole service, on real servers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from http_system import HttpSystem, http_settings, http_system

from taskline.client import (
    AsyncClient,
    CancelRefused,
    Client,
    Forbidden,
    IdempotencyConflict,
    Submit,
    SubmittedTask,
)
from taskline.errors import InvalidPayload, LetterResolved, TaskNotFound
from taskline.state.keys import Scope
from taskline.state.status import TaskStatus

pytestmark = pytest.mark.servers

SECONDS = 60.0


@pytest.fixture(scope="module")
def system(
    servers: Any, keyspace: str, view_ready: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpSystem]:
    with http_system(http_settings(servers, keyspace), tmp_path_factory.mktemp("http")) as running:
        yield running


@pytest.fixture(scope="module")
def tenant() -> str:
    return f"c{uuid4().hex[:8]}"


@pytest.fixture
def client(system: HttpSystem, tenant: str) -> Iterator[Client]:
    with system.client(tenant) as made:
        yield made


def test_a_task_is_followed_from_its_submission_to_its_result(client: Client) -> None:
    accepted = client.submit("http.echo", {"n": 1}, priority="high", affinity_key="a")
    assert not accepted.replayed
    done = client.wait(accepted.task_id, SECONDS)
    assert (done.status, done.result, done.attempt) == (TaskStatus.COMPLETED, {"n": 1}, 1)
    assert done.created_at == accepted.created_at
    history = client.history(accepted.task_id)
    assert [each.event for each in history.events] == ["started", "succeeded"]
    assert [each.outcome for each in history.attempts] == ["succeeded"]
    assert client.get(accepted.task_id) == done


def test_a_delayed_task_is_scheduled_and_waits(client: Client) -> None:
    accepted = client.submit("http.echo", None, delay_seconds=1.0)
    assert accepted.status is TaskStatus.SCHEDULED
    assert accepted.scheduled_at is not None
    done = client.wait(accepted.task_id, SECONDS)
    assert done.started_at is not None
    assert done.started_at >= accepted.scheduled_at


def test_the_same_key_makes_one_task(client: Client) -> None:
    key = uuid4().hex
    one = client.submit("http.echo", {"n": 1}, idempotency_key=key)
    two = client.submit("http.echo", {"n": 1}, idempotency_key=key)
    assert (two.task_id, two.replayed) == (one.task_id, True)
    with pytest.raises(IdempotencyConflict):
        client.submit("http.echo", {"n": 2}, idempotency_key=key)


def test_many_go_in_and_are_found_again(system: HttpSystem) -> None:
    with system.client(f"m{uuid4().hex[:8]}") as client:
        began = time.monotonic()
        results = list(client.submit_many(Submit(task_type="http.echo", payload=n) for n in range(700)))
        assert all(isinstance(each, SubmittedTask) for each in results), results[:3]
        ids = [each.task_id for each in results if isinstance(each, SubmittedTask)]
        print(f"700 keyed submissions in {time.monotonic() - began:.2f} s")
        assert len(set(ids)) == 700
        client.wait(ids[-1], SECONDS)
        deadline = time.monotonic() + SECONDS
        while True:
            found = client.get_many(ids)
            if len(found.tasks) == 700 and all(task.ended for task in found.tasks.values()):
                break
            assert time.monotonic() < deadline, f"{len(found.tasks)} of 700"
        assert [found.tasks[task_id].result for task_id in ids] == list(range(700))
        assert sorted(task.task_id for task in client.list(page_size=150)) == sorted(ids)
        assert list(client.list(status="dead")) == []


def test_a_dead_letter_is_found_and_replayed_once(client: Client) -> None:
    accepted = client.submit("http.fail", {"secret": "boom"})
    dead = client.wait(accepted.task_id, SECONDS)
    assert dead.status is TaskStatus.DEAD
    assert dead.last_error is not None
    assert dead.last_error.message == "boom"
    deadline = time.monotonic() + SECONDS
    while accepted.task_id not in [letter.letter_id for letter in client.dead_letters(error="boom")]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    replayed = client.replay(accepted.task_id, payload={"secret": "again"})
    again = client.wait(replayed.task_id, SECONDS)
    assert (again.replay_of, again.status) == (accepted.task_id, TaskStatus.DEAD)
    # The letter has a row of its own, which may be marked after the task's.
    while accepted.task_id in [letter.letter_id for letter in client.dead_letters()]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert client.get(accepted.task_id).replayed_as == replayed.task_id
    with pytest.raises(LetterResolved) as resolved:
        client.replay(accepted.task_id)
    assert resolved.value.replayed_as == str(replayed.task_id)


def test_a_cancel_is_exact(client: Client) -> None:
    waiting = client.submit("http.echo", None, delay_seconds=3_600)
    for _ in range(2):
        done = client.cancel(waiting.task_id)
        assert (done.decided, done.status) == (True, TaskStatus.CANCELLED)
    assert client.wait(waiting.task_id, SECONDS).status is TaskStatus.CANCELLED
    ended = client.submit("http.echo", None)
    client.wait(ended.task_id, SECONDS)
    with pytest.raises(CancelRefused) as refused:
        client.cancel(ended.task_id)
    assert refused.value.task_status == "completed"


def test_what_is_refused_is_told(client: Client, system: HttpSystem, tenant: str) -> None:
    with pytest.raises(InvalidPayload, match="JSON"):
        client.submit("http.echo", float("nan"))
    task_id = client.submit("http.echo", None).task_id
    with system.client("somebody-else") as other, pytest.raises(TaskNotFound):
        other.get(task_id)
    with Client(system.api.url, system.key(tenant, Scope.SUBMIT)) as writer, pytest.raises(Forbidden) as no:
        writer.get(task_id)
    assert no.value.scope == "read"


def test_the_asyncio_client_waits_for_many_at_once(system: HttpSystem, tenant: str) -> None:
    key = system.key(tenant)

    async def body() -> list[Any]:
        async with AsyncClient(system.api.url, key) as client:
            accepted = await asyncio.gather(*(client.submit("http.echo", n) for n in range(50)))
            done = await asyncio.gather(*(client.wait(each.task_id, SECONDS) for each in accepted))
            assert "http.echo" in {each.name for each in await client.task_types()}
            listed = [task.task_id async for task in client.list(task_type="http.echo")]
            assert {each.task_id for each in accepted} <= set(listed)
            return [each.result for each in done]

    assert asyncio.run(body()) == list(range(50))


def test_the_commands_speak_to_the_api(
    system: HttpSystem, tenant: str, client: Client, tmp_path: Path
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TASKLINE_")}
    environ |= {"TASKLINE_API_URL": system.api.url, "TASKLINE_API_KEY": system.key(tenant)}

    def run(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "taskline", *arguments],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    task_id = str(client.submit("http.echo", {"n": 9}).task_id)
    assert json.loads(run("wait", task_id, "--timeout", "30", "--json"))["result"] == {"n": 9}
    assert "status\tcompleted" in run("status", task_id)
    listed = [json.loads(line) for line in run("list", "--type", "http.echo", "--json").splitlines()]
    assert task_id in [each["task_id"] for each in listed]
    error = run("status", "019ad6e2-7c00-7d3a-9b1e-0f6c3a52d481", code=1)
    assert error == "taskline: no task 019ad6e2-7c00-7d3a-9b1e-0f6c3a52d481\n"
