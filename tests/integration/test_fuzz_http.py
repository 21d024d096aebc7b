"""The API on real servers against a fuzzer, and one tenant's ids in another tenant's hands."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from http_system import HttpSystem, http_settings, http_system
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taskline.client import Client, TaskSnapshot
from taskline.schemas.ids import TaskId, created_at_ms, new_task_id

pytestmark = pytest.mark.servers

SECONDS = 60.0
# Of Schemathesis: the time in which it makes up requests, and a bound on all that it does.
FUZZ_SECONDS = 30
RUN_SECONDS = 150.0
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "ignored_auth",
    "unsupported_method",
    "allow_header_conformance",
)
# Made-up ids are no task's; most of those that are well-formed become ones that are.
REAL_IDS = """
import uuid, schemathesis

@schemathesis.hook
def map_path_parameters(context, path_parameters):
    try:
        made_up = uuid.UUID(path_parameters["task_id"]).int
    except (KeyError, TypeError, ValueError, AttributeError):
        return path_parameters
    real = DEAD if context.operation.path.startswith("/dead-letters") else IDS
    return path_parameters | {"task_id": (real * 4 + [path_parameters["task_id"]])[made_up % (len(real) * 4 + 1)]}
"""


@pytest.fixture(scope="module")
def system(
    servers: Any, keyspace: str, view_ready: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpSystem]:
    # Ids that are nobody's are asked for all the time: not to be waited for.
    api = {"read_your_writes_seconds": 0.0}
    with http_system(http_settings(servers, keyspace, api=api), tmp_path_factory.mktemp("fuzz")) as running:
        yield running


# ---- one tenant's ids in another's hands -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A tenant with tasks in many states, whose every text has the tenant's mark in it."""

    name: str
    mark: str
    key: str
    tasks: tuple[TaskId, ...]
    dead: tuple[TaskId, ...]
    cursors: tuple[str, ...]
    letter_cursor: str
    etags: tuple[str, ...]

    def states(self, url: str) -> list[TaskSnapshot]:
        with Client(url, self.key) as client:
            found = client.get_many(self.tasks)
        assert not found.unknown
        return [found.tasks[each] for each in self.tasks]


def settle(system: HttpSystem, name: str) -> Owner:
    mark = secrets.token_hex(12)
    key = system.key(name)
    with Client(system.api.url, key) as client:
        keys = {"idempotency_key": f"idem-{mark}", "affinity_key": f"aff-{mark}"}
        done = [client.submit("http.echo", {"secret": mark}, **keys)]  # type: ignore[arg-type]
        done += [client.submit("http.echo", {"secret": mark, "n": n}) for n in range(3)]
        dead = [client.submit("http.fail", {"secret": mark}) for _ in range(3)]
        later = [client.submit("http.echo", {"secret": mark}, delay_seconds=3_600) for _ in range(2)]
        dedup = client.submit(
            "http.echo", {"secret": mark}, delay_seconds=3_600, dedup_key="same", dedup_window_seconds=600
        )
        tasks = tuple(each.task_id for each in (*done, *dead, *later, dedup))
        deadline = time.monotonic() + SECONDS
        while client.get_many(tasks).unknown:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for each in (*done, *dead):
            client.wait(each.task_id, SECONDS)
        while len(letters := list(client.dead_letters())) < len(dead):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert {letter.letter_id for letter in letters} == {each.task_id for each in dead}
        pages = (client.list_page(limit=2), client.list_page(limit=1, status="dead"))
        letter_page = client.dead_letters_page(limit=1)
    with httpx.Client(base_url=system.api.url, headers={"authorization": f"Bearer {key}"}) as http:
        etags = tuple(http.get(f"/tasks/{each}").headers["etag"] for each in tasks)
    cursors = tuple(page.next_cursor for page in pages if page.next_cursor)
    assert len(cursors) == 2
    assert letter_page.cursor is not None
    return Owner(
        name=name,
        mark=mark,
        key=key,
        tasks=tasks,
        dead=tuple(each.task_id for each in dead),
        cursors=cursors,
        letter_cursor=letter_page.cursor,
        etags=etags,
    )


@pytest.fixture(scope="module")
def owners(system: HttpSystem) -> tuple[Owner, Owner]:
    names = [f"{name}-{secrets.token_hex(4)}" for name in ("ours", "theirs")]
    return settle(system, names[0]), settle(system, names[1])


@pytest.fixture(scope="module")
def intruder(system: HttpSystem, owners: tuple[Owner, Owner]) -> Iterator[httpx.Client]:
    """The second tenant, at the first one's door."""
    headers = {"authorization": f"Bearer {owners[1].key}"}
    with httpx.Client(base_url=system.api.url, headers=headers, timeout=30) as client:
        yield client


VARYING = frozenset({"x-request-id", "date"})


def seen(response: httpx.Response, task_id: TaskId) -> tuple[int, dict[str, str], str]:
    """All that a caller can see of an answer, but for what names the request and the id that was asked for."""
    body = response.text.replace(str(task_id), "<id>")
    headers = {name: value for name, value in response.headers.items() if name not in VARYING}
    body = re.sub(r"urn:taskline:request:[\w-]+", "<request>", body)
    if "content-length" in headers:
        headers["content-length"] = str(int(headers["content-length"]) - len(response.text) + len(body))
    return response.status_code, headers, body


def never_was(like: TaskId) -> TaskId:
    """An id of the same age that is nobody's."""
    return new_task_id(created_at_ms(like))


def leaks(response: httpx.Response, owner: Owner, asked: TaskId | None = None) -> list[str]:
    text = response.text + repr(response.headers)
    others = {str(each) for each in owner.tasks} - {str(asked)}
    return [each for each in (owner.mark, owner.name, owner.key, *others, *owner.etags) if each in text]


REQUESTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("GET", "/tasks/{id}", {}),
    ("GET", "/tasks/{id}?wait=0.05", {}),
    ("GET", "/tasks/{id}/history", {}),
    ("DELETE", "/tasks/{id}", {}),
    ("DELETE", "/tasks/{id}?running=abort", {}),
    ("GET", "/dead-letters/{id}", {}),
    ("POST", "/dead-letters/{id}/replay", {}),
    ("POST", "/dead-letters/{id}/replay", {"json": {"payload": {"secret": "x"}}}),
    ("POST", "/dead-letters/{id}/discard", {"json": {"note": "gone"}}),
)


def test_another_tenant_s_task_looks_like_one_that_never_was(
    system: HttpSystem, owners: tuple[Owner, Owner], intruder: httpx.Client
) -> None:
    victim = owners[0]
    before, letters = victim.states(system.api.url), letters_of(system, victim)
    for task_id, etag in zip(victim.tasks, victim.etags, strict=True):
        nobody = never_was(task_id)
        for method, path, options in REQUESTS:
            for headers in ({}, {"if-none-match": etag}, {"if-none-match": "*"}):
                answers = [
                    intruder.request(method, path.format(id=each), headers=headers, **options)
                    for each in (task_id, nobody)
                ]
                assert answers[0].status_code == 404, answers[0].text
                assert seen(answers[0], task_id) == seen(answers[1], nobody)
                assert leaks(answers[0], victim, task_id) == []
    # Nothing of it had an effect.
    assert victim.states(system.api.url) == before
    assert letters_of(system, victim) == letters


def letters_of(system: HttpSystem, owner: Owner) -> list[Any]:
    with Client(system.api.url, owner.key) as client:
        return list(client.dead_letters(resolved=True))


def test_lists_and_look_ups_hold_nothing_of_another_tenant(
    owners: tuple[Owner, Owner], intruder: httpx.Client
) -> None:
    victim, own = owners
    mixed = [each for pair in zip(victim.tasks, own.tasks, strict=True) for each in pair]
    answer = intruder.get("/tasks", params={"ids": ",".join(map(str, mixed))})
    document = answer.json()
    assert [UUID(each["task_id"]) for each in document["tasks"]] == list(own.tasks)
    assert {UUID(each) for each in document["unknown"]} == set(victim.tasks)
    assert victim.mark not in answer.text

    lists: list[dict[str, Any]] = [{"limit": limit} for limit in (1, 2, 200)]
    lists += [{"status": status} for status in ("completed", "dead", "scheduled", "pending", "cancelled")]
    lists += [{"task_type": name} for name in ("http.echo", "http.fail")]
    # A cursor says where to go on, and is no way into another tenant's list.
    lists += [{"cursor": victim.cursors[0]}, {"cursor": victim.cursors[1], "status": "dead"}]
    for params in lists:
        answer = intruder.get("/tasks", params=params)
        assert answer.status_code in ((200, 400) if "cursor" in params else (200,))
        assert leaks(answer, victim) == []
        for task in answer.json().get("tasks", []):
            assert UUID(task["task_id"]) in own.tasks
    for params in (
        {},
        {"resolved": "true"},
        {"error": victim.mark},
        {"task_type": "http.fail"},
        {"cursor": victim.letter_cursor},
    ):
        answer = intruder.get("/dead-letters", params=params)
        assert answer.status_code in ((200, 400) if "cursor" in params else (200,))
        assert leaks(answer, victim) == []
        for letter in answer.json().get("dead_letters", []):
            assert UUID(letter["letter_id"]) in own.dead


def test_a_bulk_replay_reaches_nothing_of_another_tenant(
    system: HttpSystem, owners: tuple[Owner, Owner], intruder: httpx.Client
) -> None:
    victim = owners[0]
    before = letters_of(system, victim)
    for body in (
        {"filter": {}, "dry_run": True},
        {"filter": {"error": victim.mark}},
        {"filter": {"error": victim.mark}, "cursor": victim.letter_cursor},
    ):
        answer = intruder.post("/dead-letters/replay", json=body)
        assert answer.status_code in (200, 400)
        assert [each for each in leaks(answer, victim) if each != victim.mark] == []
        assert not {UUID(each["letter_id"]) for each in answer.json().get("results", [])} & set(victim.dead)
    assert letters_of(system, victim) == before


def test_the_same_keys_of_two_tenants_have_nothing_to_do_with_each_other(
    owners: tuple[Owner, Owner], intruder: httpx.Client
) -> None:
    victim, own = owners
    body = {
        "task_type": "http.echo",
        "payload": {"secret": own.mark},
        "idempotency_key": f"idem-{victim.mark}",
        "affinity_key": f"aff-{victim.mark}",
    }
    answer = intruder.post("/tasks", json=body)
    assert answer.status_code == 201
    assert "idempotency-replayed" not in answer.headers
    assert UUID(answer.json()["task_id"]) not in victim.tasks
    # Each tenant's window holds its own task.
    answer = intruder.post(
        "/tasks",
        json={
            "task_type": "http.echo",
            "payload": None,
            "dedup_key": "same",
            "dedup_window_seconds": 600,
        },
    )
    assert answer.json()["duplicate"] is True
    assert UUID(answer.json()["task_id"]) == own.tasks[-1]


WORDS = st.sampled_from(["", "0", "1", "true", "abort", "*", "dead", "http.fail", "../", "%00", "é", "[]"])
NAMES = st.sampled_from(
    [
        "ids",
        "cursor",
        "status",
        "task_type",
        "limit",
        "wait",
        "running",
        "resolved",
        "error",
        "reason",
        "after",
        "before",
        "created_after",
        "created_before",
        "tenant",
        "queue",
    ]
)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_request_brings_out_another_tenant_s_marks(
    owners: tuple[Owner, Owner], intruder: httpx.Client, data: st.DataObject
) -> None:
    victim, own = owners
    task_id = data.draw(st.sampled_from(victim.tasks))
    values = st.sampled_from(
        [
            str(task_id),
            str(task_id).upper(),
            f"{own.tasks[0]},{task_id}",
            *victim.cursors,
            victim.letter_cursor,
        ]
    )
    method = data.draw(st.sampled_from(["GET", "GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS"]))
    template = data.draw(
        st.sampled_from(
            [
                "/tasks",
                "/tasks/{id}",
                "/tasks/{id}/history",
                "/tasks/batch",
                "/dead-letters",
                "/dead-letters/{id}",
                "/dead-letters/{id}/replay",
                "/dead-letters/{id}/discard",
                "/dead-letters/replay",
                "/task-types",
            ]
        )
    )
    path = template.format(id=data.draw(st.sampled_from([str(task_id), str(task_id).upper()])))
    params = data.draw(st.dictionaries(NAMES, values | WORDS, max_size=3))
    headers = data.draw(
        st.sampled_from(
            [{}, {"if-none-match": ",".join(victim.etags)}, {"x-tenant": victim.name}, {"x-request-id": "r"}]
        )
    )
    body: Any = None
    if method == "POST":
        submission = {"task_type": "http.echo", "payload": 1, "idempotency_key": f"idem-{victim.mark}"}
        body = data.draw(
            st.sampled_from(
                [
                    {"filter": {"task_type": "http.fail", "error": victim.mark[:5]}, "dry_run": True},
                    {"payload": {"secret": "x"}},
                    {"tasks": [submission, {"tenant": victim.name}]},
                    {"ids": [str(task_id)]},
                ]
            )
        )
    answer = intruder.request(method, path, params=params, headers=headers, json=body)
    assert answer.status_code < 500, answer.text
    echoed = str(task_id) in answer.request.url.path or str(task_id) in str(answer.request.url)
    found = set(leaks(answer, victim, task_id if echoed or str(task_id).upper() in path else None))
    # What the request itself said may be said back.
    said = str(answer.request.url) + repr(headers) + repr(body)
    assert not {each for each in found if each not in said}


def test_other_tenants_tasks_are_untouched_after_all(system: HttpSystem, owners: tuple[Owner, Owner]) -> None:
    victim = owners[0]
    statuses = [str(each.status) for each in victim.states(system.api.url)]
    assert statuses == ["completed"] * 4 + ["dead"] * 3 + ["scheduled"] * 3
    assert all(letter.resolution is None for letter in letters_of(system, victim))


# ---- a fuzzer ----------------------------------------------------------------------------------------------------


def test_a_fuzzer_finds_no_fault_of_the_server_and_no_answer_that_is_not_documented(
    system: HttpSystem, tmp_path: Path
) -> None:
    """Schemathesis over all operations, with ids of real tasks in many states among those that it makes up."""
    victim = settle(system, f"fuzzed-{secrets.token_hex(4)}")
    ids = [str(each) for each in (*victim.tasks, never_was(victim.tasks[0]))]
    dead = [str(each) for each in (*victim.dead, victim.tasks[0])]
    (tmp_path / "hooks.py").write_text(f"IDS = {ids!r}\nDEAD = {dead!r}\n{REAL_IDS}")
    (tmp_path / "schemathesis.toml").write_text('hooks = "hooks.py"\n')
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TASKLINE_")}
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            "--config-file=schemathesis.toml",
            "run",
            f"{system.api.url}/openapi.json",
            f"--header=Authorization:Bearer {victim.key}",
            "--phases=examples,coverage,fuzzing,stateful",
            f"--checks={','.join(CHECKS)}",
            "--continue-on-failure",
            "--no-shrink",
            "--max-examples=40",
            f"--max-time={FUZZ_SECONDS}",
            "--request-timeout=20",
            "--seed=1",
            "--warnings=off",
        ],
        cwd=tmp_path,
        env=environ | {"NO_COLOR": "1", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    report = done.stdout[-20_000:] + done.stderr[-2_000:]
    assert done.returncode == 0, report
    operations = re.search(r"Selected: (\d+)/(\d+)\s+Tested: (\d+)", done.stdout)
    assert operations is not None, report
    assert len(set(operations.groups())) == 1, report
    cases = re.search(r"(\d+) generated", done.stdout)
    assert cases is not None, report
    assert int(cases.group(1)) > 300, report
    assert [line for line in system.api.log() if line.get("level") == "error"] == []
    # Of the real ids, some were cancelled, replayed and discarded.
    metrics = system.api.client.get("/metrics").text
    for route in ("/tasks/{task_id}", "/dead-letters/{task_id}", "/tasks/{task_id}/history"):
        assert re.search(
            rf'taskline_api_requests_total{{[^}}]*route="{re.escape(route)}"[^}}]*status="200"', metrics
        ), route
