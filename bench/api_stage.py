"""What benchmarks of the API stand on: topics, a view with tasks in it, a key, and the API as a process of its own."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import psutil

from bench.http_load import Target, UnexpectedAnswer, closed, get
from taskline.errors import Unavailable
from taskline.infra.kafka.admin import create_topics
from taskline.infra.kafka.requests import admin_client
from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.topics import topology
from taskline.schemas.codec import Codec
from taskline.schemas.events import Priority, Started, Succeeded, TaskSubmitted, sequence_of
from taskline.schemas.ids import TaskId, bucket_of, lane_of, new_task_id
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType
from taskline.settings import Settings, as_environment, load_settings
from taskline.state.cassandra import CassandraStore
from taskline.state.keys import Scope, mint
from taskline.state.keys_cassandra import open_keys
from taskline.state.migrations import migrate
from taskline.state.session import connect, open_cluster
from taskline.state.status import TaskStatus
from taskline.state.store import EventsWrite, SubmissionWrite, Write

TENANT = "bench"
START_SECONDS = 60.0
# Tasks that are stored at once, and how often it is tried.
FILL_CHUNK, FILL_ATTEMPTS = 1_000, 10
PAYLOAD = {"iata": "LAX", "name": "Los Angeles International", "latitude": 33.94, "longitude": -118.4}
SCHEMA = {
    "type": "record",
    "name": "Airport",
    "fields": [
        {"name": name, "type": "string" if isinstance(value, str) else "double"}
        for name, value in PAYLOAD.items()
    ],
}
AIRPORT = TaskType(name="bench.airport", schema=PayloadSchema.parse(SCHEMA))


@contextmanager
def stage() -> Iterator[Settings]:
    """Topics and a keyspace of this run's own, which go when it is over."""
    name = f"bench{secrets.token_hex(4)}"
    base = load_settings()
    settings = base.model_copy(
        update={
            "kafka": base.kafka.model_copy(update={"namespace": f"{name}."}),
            "cassandra": base.cassandra.model_copy(update={"keyspace": name}),
            "api": base.api.model_copy(update={"port": 0, "shutdown_delay_seconds": 0.0, "auth": "keys"}),
        }
    )
    create_topics(settings)
    migrate(settings)
    try:
        register(settings)
        yield settings
    finally:
        remove(settings)


async def new_key(settings: Settings) -> str:
    """A key that may do everything."""
    minted = mint(tenant=TENANT, scopes=tuple(Scope), now_ms=time.time_ns() // 1_000_000)
    async with open_keys(settings) as keys:
        await keys.add(minted.key)
    return minted.token


def remove(settings: Settings) -> None:
    """The topics and the keyspace that were made for this run."""
    with admin_client(settings.kafka) as admin:
        for deleted in admin.delete_topics([spec.name for spec in topology(settings)]).values():
            deleted.result(30)
    cluster = open_cluster(settings.cassandra)
    try:
        connect(cluster).execute(f"DROP KEYSPACE {settings.cassandra.keyspace}", timeout=60)
    finally:
        cluster.shutdown()


def register(settings: Settings) -> None:
    directory = TypeDirectory(settings)
    directory.start()
    try:
        directory.register([AIRPORT])
    finally:
        directory.close()


async def fill(settings: Settings, tasks: int, *, ended: bool) -> list[TaskId]:
    """Running or completed tasks in the view, as a projector would have put them there."""
    codec = Codec()
    now_ms = time.time_ns() // 1_000_000 - 60_000
    store = await CassandraStore.connect(settings)
    ids = [new_task_id(now_ms + n % 20_000) for n in range(tasks)]
    try:
        for chunk in batched(ids, FILL_CHUNK):
            await put(
                store,
                [
                    write
                    for task_id in chunk
                    for write in writes(settings, codec, task_id, now_ms, ended=ended)
                ],
            )
    finally:
        await store.close()
    return ids


async def put(store: CassandraStore, wanted: Sequence[Write]) -> None:
    """Store them, as often as it takes: they are idempotent, and a Cassandra that has just started on a busy machine is slow."""
    for attempt in range(FILL_ATTEMPTS):
        try:
            await store.apply(wanted)
        except Unavailable:
            if attempt == FILL_ATTEMPTS - 1:
                raise
            await asyncio.sleep(1)
        else:
            return


def batched(ids: Sequence[TaskId], size: int) -> Iterator[Sequence[TaskId]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]


def writes(
    settings: Settings, codec: Codec, task_id: TaskId, now_ms: int, *, ended: bool
) -> tuple[Write, Write]:
    payload, fingerprint = AIRPORT.encode(PAYLOAD)
    retain_until = now_ms + 86_400_000
    submission = TaskSubmitted(
        task_id=task_id,
        tenant=TENANT,
        task_type=AIRPORT.name,
        queue=AIRPORT.queue,
        priority=Priority.NORMAL,
        payload=payload,
        payload_fingerprint=fingerprint,
        retain_until=retain_until,
        max_retries=3,
        root_id=task_id,
    )
    execution = new_task_id(now_ms)
    lane = lane_of(task_id, settings.topics.lanes)
    bucket = bucket_of(task_id, settings.cassandra.bucket_seconds * 1000)
    started = Started(
        task_id=task_id,
        tenant=TENANT,
        attempt=1,
        worker="bench-worker-1",
        at=now_ms,
        retain_until=retain_until,
        execution=execution,
        source_topic="tasks.normal",
        source_partition=0,
        source_offset=0,
    )
    succeeded = Succeeded(
        task_id=task_id,
        tenant=TENANT,
        attempt=1,
        worker="bench-worker-1",
        at=now_ms + 5,
        retain_until=retain_until,
        execution=execution,
        result=orjson.dumps({"nearest": "HHR", "km": 6.1}),
    )
    return (
        SubmissionWrite(
            task_id=task_id,
            lane=lane,
            bucket=bucket,
            ttl_seconds=3_600,
            submission=codec.encode(submission),
            tenant=TENANT,
            task_type=AIRPORT.name,
            queue=AIRPORT.queue,
            priority=Priority.NORMAL,
            status=TaskStatus.PENDING,
        ),
        EventsWrite(
            task_id=task_id,
            lane=lane,
            bucket=bucket,
            ttl_seconds=3_600,
            events={sequence_of(0, 0): codec.encode(started)}
            | ({sequence_of(0, 1): codec.encode(succeeded)} if ended else {}),
            tenant=TENANT,
            status=TaskStatus.COMPLETED if ended else TaskStatus.RUNNING,
        ),
    )


@contextmanager
def api_process(settings: Settings) -> Iterator[tuple[str, int, psutil.Process]]:
    """The API, ready, as a process of its own: host, port, process."""
    with tempfile.TemporaryDirectory() as scratch:
        announcement = Path(scratch) / "url"
        command = [sys.executable, "-m", "taskline", "api", "--announce", str(announcement)]
        environ = dict(os.environ) | as_environment(settings) | {"TASKLINE_TELEMETRY__LOG_LEVEL": "warning"}
        with subprocess.Popen(command, env=environ) as child:
            try:
                deadline = time.monotonic() + START_SECONDS
                while not announcement.exists() or not ready(announcement.read_text().strip()):
                    if child.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit("the API did not become ready")
                    time.sleep(0.1)
                parts = urlsplit(announcement.read_text().strip())
                yield parts.hostname or "", parts.port or 0, psutil.Process(child.pid)
            finally:
                child.terminate()


def ready(url: str) -> bool:
    parts = urlsplit(url)
    try:
        closed(Target(host=parts.hostname or "", port=parts.port or 0, status=200), [get("/readyz")])
    except (OSError, EOFError, UnexpectedAnswer):
        return False
    return True
