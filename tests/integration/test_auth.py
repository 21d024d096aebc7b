"""API keys on a real Cassandra, and two API processes that look them up there."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from api_process import ApiProcess, Gate, environment, eventually, running_api

from taskline.infra.kafka.types import TypeDirectory
from taskline.producers.submission import SubmitOptions, build_submission
from taskline.schemas.codec import Codec
from taskline.schemas.ids import TaskId, bucket_of, lane_of
from taskline.schemas.types import TaskType
from taskline.settings import Settings
from taskline.state.cassandra import CassandraStore
from taskline.state.keys import Scope, mint
from taskline.state.keys_cassandra import open_keys
from taskline.state.status import TaskStatus
from taskline.state.store import SubmissionWrite

pytestmark = pytest.mark.servers

CACHE_SECONDS = 2.0
# Between the end of the cache's time and the answer: the key is read again first.
SLACK_SECONDS = 2.0


@pytest.fixture
def locked(topics_created: Settings, view_ready: None) -> Settings:
    with TypeDirectory(topics_created) as directory:
        directory.register([TaskType(name="any.json")])
    return with_api(topics_created, auth="keys", key_cache_seconds=CACHE_SECONDS, shutdown_delay_seconds=0.0)


def with_api(settings: Settings, **changes: object) -> Settings:
    telemetry = settings.telemetry.model_copy(update={"log_format": "json"})
    return settings.model_copy(
        update={"api": settings.api.model_copy(update=changes), "telemetry": telemetry}
    )


@pytest.fixture
def replicas(locked: Settings, tmp_path: Path) -> Iterator[tuple[ApiProcess, ApiProcess]]:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with running_api(locked, folders[0]) as one, running_api(locked, folders[1]) as two:
        eventually(one.ready, "the first is ready")
        eventually(two.ready, "the second is ready")
        yield one, two


def keys(settings: Settings, *arguments: str) -> Any:
    """What `taskline keys … --json` says."""
    said = subprocess.run(
        [sys.executable, "-m", "taskline", "keys", *arguments, "--json"],
        env=environment(settings),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(said.stdout)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def submit(api: ApiProcess, token: str | None) -> Any:
    return api.client.post(
        "/tasks",
        json={"task_type": "any.json", "payload": {"n": 1}},
        headers={} if token is None else bearer(token),
    )


def test_a_revoked_key_stops_within_the_cache_s_time_in_every_process(
    locked: Settings, replicas: tuple[ApiProcess, ApiProcess]
) -> None:
    made = keys(locked, "create", "--tenant", "acme", "--scope", "submit", "--scope", "read", "--name", "ci")
    assert (made["tenant"], made["scopes"], made["name"]) == ("acme", ["read", "submit"], "ci")
    token = made["key"]
    assert token.startswith(f"tk_{made['prefix']}_")
    for api in replicas:
        assert submit(api, None).status_code == 401
        assert submit(api, f"{token[:-2]}xx").status_code == 401
        accepted = submit(api, token)
        assert accepted.status_code == 201
    forbidden = replicas[0].client.post("/dead-letters/replay", json={"filter": {}}, headers=bearer(token))
    assert (forbidden.status_code, forbidden.json()["scope"]) == (403, "admin")

    revoked = keys(locked, "revoke", made["prefix"])
    began = time.monotonic()
    assert revoked["revoked_at"] is not None
    for api in replicas:
        eventually(lambda api=api: submit(api, token).status_code == 401, "the key is refused")
        assert time.monotonic() - began < CACHE_SECONDS + SLACK_SECONDS
    assert keys(locked, "revoke", made["prefix"]) == revoked
    listed = [key for key in keys(locked, "list", "--tenant", "acme") if key["prefix"] == made["prefix"]]
    assert listed == [revoked]
    assert "key" not in revoked
    for api in replicas:
        text = api.log_file.read_text(encoding="utf-8")
        assert token not in text
        assert token.split("_", 2)[2] not in text
        assert made["prefix"] in text


def put_task(settings: Settings, tenant: str) -> TaskId:
    """A task of the tenant in the view, as the projector would put it there."""
    now_ms = time.time_ns() // 1_000_000
    task = build_submission(
        TaskType(name="any.json"), {}, SubmitOptions(tenant=tenant), now_ms=now_ms, settings=settings.producer
    )
    write = SubmissionWrite(
        task_id=task.task_id,
        lane=lane_of(task.task_id, settings.topics.lanes),
        bucket=bucket_of(task.task_id, settings.cassandra.bucket_seconds * 1000),
        ttl_seconds=3_600,
        submission=Codec().encode(task),
        tenant=tenant,
        task_type=task.task_type,
        queue=task.queue,
        priority=task.priority,
        status=TaskStatus.PENDING,
    )

    async def body() -> None:
        store = await CassandraStore.connect(settings)
        try:
            await store.apply([write])
        finally:
            await store.close()

    asyncio.run(body())
    return task.task_id


def test_one_tenant_s_task_is_nothing_to_another(
    locked: Settings, replicas: tuple[ApiProcess, ApiProcess]
) -> None:
    ours = keys(locked, "create", "--tenant", "ours", "--scope", "read")["key"]
    theirs = keys(locked, "create", "--tenant", "theirs", "--scope", "read")["key"]
    task_id = put_task(locked, "ours")
    for api in replicas:
        for path in (f"/tasks/{task_id}", f"/tasks/{task_id}/history"):
            assert api.client.get(path, headers=bearer(ours)).status_code == 200
            hidden = api.client.get(path, headers=bearer(theirs))
            assert hidden.status_code == 404
            assert hidden.json()["type"].endswith(":task-not-found")
        assert submit(api, theirs).status_code == 403


def test_keys_that_were_seen_outlast_cassandra_and_no_others(locked: Settings, tmp_path: Path) -> None:
    seen = keys(locked, "create", "--tenant", "acme", "--scope", "submit")["key"]
    unseen = keys(locked, "create", "--tenant", "acme", "--scope", "submit")["key"]
    gate = Gate(locked.cassandra.contact_points[0], locked.cassandra.port)
    gate.open()
    through = locked.model_copy(
        update={
            "cassandra": locked.cassandra.model_copy(
                update={"contact_points": ("127.0.0.1",), "port": gate.port}
            )
        }
    )
    try:
        with running_api(through, tmp_path) as api:
            eventually(api.ready, "the API is ready")
            assert submit(api, seen).status_code == 201
            gate.shut()
            time.sleep(CACHE_SECONDS + 0.5)
            for _ in range(5):
                began = time.monotonic()
                assert submit(api, seen).status_code == 201
                assert time.monotonic() - began < SLACK_SECONDS
            away = submit(api, unseen)
            assert away.status_code == 503
            assert away.json()["type"].endswith(":keys-unavailable")
            assert int(away.headers["retry-after"]) >= 1
            gate.open()
            eventually(lambda: submit(api, unseen).status_code == 201, "the other key is known", 60)
    finally:
        gate.close()


def test_the_table_keeps_a_key_as_it_was_made(locked: Settings) -> None:
    async def body() -> None:
        async with open_keys(locked) as store:
            tenant = f"t{secrets.token_hex(4)}"
            whole = mint(
                tenant=tenant, scopes=Scope, queues=("geo", "default"), name="всё", expires_at=2**50, now_ms=5
            ).key
            plain = mint(tenant=tenant, scopes=(Scope.READ,), now_ms=6).key
            for key in (whole, plain):
                assert await store.add(key)
                assert await store.find(key.prefix) == key
            assert not await store.add(replace(whole, tenant="thief", secret_hash=plain.secret_hash))
            assert await store.find(whole.prefix) == whole
            assert [key for key in await store.keys() if key.tenant == tenant] == [whole, plain]
            revoked = await store.revoke(whole.prefix, 9)
            assert revoked == replace(whole, revoked_at=9)
            assert await store.revoke(whole.prefix, 10) == revoked == await store.find(whole.prefix)
            assert await store.revoke("nobody00", 10) is None
            assert await store.find("nobody00") is None

    asyncio.run(body())


def test_keys_that_make_no_sense_are_not_made(locked: Settings) -> None:
    for arguments, says in (
        (("create", "--tenant", "", "--scope", "read"), "tenant"),
        (("create", "--tenant", "t", "--scope", "read", "--expires-in", "soon"), "is no duration"),
        (("create", "--tenant", "t", "--scope", "read", "--queue", "geo"), "queues"),
        (("revoke", "nobody00"), "there is no key"),
    ):
        said = subprocess.run(
            [sys.executable, "-m", "taskline", "keys", *arguments],
            env=environment(locked),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert said.returncode == 1
        assert says in said.stderr
        assert "Traceback" not in said.stderr
        assert not said.stdout
