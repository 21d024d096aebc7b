"""CPU time that the API process spends on a status read and on a submission.

    TASKLINE_KAFKA__BOOTSTRAP_SERVERS=… TASKLINE_CASSANDRA__PORT=… python -m bench.api_read

The client's own time, Kafka's and Cassandra's do not count: the figure is user + system time of the `taskline api` process,
over several connections that each wait for one answer before the next question.
"""

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

import click
import orjson
import psutil

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
from taskline.state.migrations import migrate
from taskline.state.session import connect, open_cluster
from taskline.state.status import TaskStatus
from taskline.state.store import EventsWrite, SubmissionWrite, Write

CONNECTIONS = 16
ROUNDS = 5
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


@click.command()
@click.option("--requests", default=5_000, show_default=True, help="Measured requests of each kind.")
@click.option("--tasks", default=1_000, show_default=True, help="Different tasks that are read.")
def main(requests: int, tasks: int) -> None:
    """Measure."""
    name = f"bench{secrets.token_hex(4)}"
    base = load_settings()
    settings = base.model_copy(
        update={
            "kafka": base.kafka.model_copy(update={"namespace": f"{name}."}),
            "cassandra": base.cassandra.model_copy(update={"keyspace": name}),
            "api": base.api.model_copy(update={"port": 0, "shutdown_delay_seconds": 0.0, "auth": "off"}),
        }
    )
    create_topics(settings)
    migrate(settings)
    try:
        measure(settings, requests, tasks)
    finally:
        remove(settings)


def measure(settings: Settings, requests: int, tasks: int) -> None:
    register(settings)
    ids = asyncio.run(fill(settings, tasks))
    with api_process(settings) as (url, process):
        host, port = urlsplit(url).hostname or "", urlsplit(url).port or 0
        reads = [get(f"/tasks/{task_id}") for task_id in ids]
        submission = post("/tasks", orjson.dumps({"task_type": AIRPORT.name, "payload": PAYLOAD}))
        for title, kinds, status in (
            ("liveness (server and framework only)", [get("/healthz")], 200),
            ("status read", reads, 200),
            ("submission", [submission], 201),
        ):
            asyncio.run(drive(host, port, kinds, requests // ROUNDS, status))
            rounds = [measured(process, host, port, kinds, requests // ROUNDS, status) for _ in range(ROUNDS)]
            # The best round: what disturbs a measurement on a shared machine only ever adds.
            cpu, rate = min(rounds)
            others = ", ".join(f"{each:.0f}" for each, _ in rounds)
            print(f"{title:38} {cpu:7.0f} µs of CPU {rate:7.0f}/s   (rounds: {others})", flush=True)


def measured(
    process: psutil.Process, host: str, port: int, kinds: Sequence[bytes], requests: int, status: int
) -> tuple[float, float]:
    """CPU µs of the process per request, and requests per second."""
    before, began = process.cpu_times(), time.perf_counter()
    asyncio.run(drive(host, port, kinds, requests, status))
    seconds, after = time.perf_counter() - began, process.cpu_times()
    cpu = (after.user - before.user) + (after.system - before.system)
    return cpu / requests * 1e6, requests / seconds


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


async def fill(settings: Settings, tasks: int) -> list[TaskId]:
    """Completed tasks in the view, as a projector would have put them there."""
    codec = Codec()
    now_ms = time.time_ns() // 1_000_000 - 60_000
    store = await CassandraStore.connect(settings)
    ids = [new_task_id(now_ms + n) for n in range(tasks)]
    try:
        await store.apply([write for task_id in ids for write in writes(settings, codec, task_id, now_ms)])
    finally:
        await store.close()
    return ids


def writes(settings: Settings, codec: Codec, task_id: TaskId, now_ms: int) -> tuple[Write, Write]:
    payload, fingerprint = AIRPORT.encode(PAYLOAD)
    retain_until = now_ms + 86_400_000
    submission = TaskSubmitted(
        task_id=task_id,
        tenant="default",
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
        tenant="default",
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
        tenant="default",
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
            tenant="default",
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
            events={
                sequence_of(0, 0): codec.encode(started),
                sequence_of(0, 1): codec.encode(succeeded),
            },
            tenant="default",
            status=TaskStatus.COMPLETED,
        ),
    )


@contextmanager
def api_process(settings: Settings) -> Iterator[tuple[str, psutil.Process]]:
    """The API, ready, as a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        announcement = Path(scratch) / "url"
        command = [sys.executable, "-m", "taskline", "api", "--announce", str(announcement)]
        environ = dict(os.environ) | as_environment(settings) | {"TASKLINE_TELEMETRY__LOG_LEVEL": "warning"}
        with subprocess.Popen(command, env=environ) as child:
            try:
                deadline = time.monotonic() + 60
                while not announcement.exists() or not ready(announcement.read_text().strip()):
                    if child.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit("the API did not become ready")
                    time.sleep(0.1)
                yield announcement.read_text().strip(), psutil.Process(child.pid)
            finally:
                child.terminate()


def ready(url: str) -> bool:
    parts = urlsplit(url)
    try:
        asyncio.run(drive(parts.hostname or "", parts.port or 0, [get("/readyz")], 1, 200))
    except (OSError, UnexpectedAnswer):
        return False
    return True


class UnexpectedAnswer(Exception):
    """An answer that makes the figure meaningless."""


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: bench\r\naccept: application/json\r\nuser-agent: bench\r\n\r\n".encode()


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\naccept: application/json\r\nuser-agent: bench\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def drive(host: str, port: int, kinds: Sequence[bytes], requests: int, status: int) -> None:
    """Send so many requests, taking turns among `kinds`."""
    turns = iter(range(requests))

    async def one() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            for turn in turns:
                writer.write(kinds[turn % len(kinds)])
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                body = await reader.readexactly(length)
                if head[9:12] != b"%d" % status:
                    raise UnexpectedAnswer(body)
        finally:
            writer.close()
            await writer.wait_closed()

    await asyncio.gather(*(one() for _ in range(min(CONNECTIONS, requests))))


if __name__ == "__main__":
    main()
