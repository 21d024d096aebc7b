"""The API as a process, on real servers."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_process import ApiProcess, Gate, eventually, running_api, spawn
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from taskline.infra.kafka.admin import create_topics
from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import Priority, Started, Succeeded, TaskSubmitted, sequence_of
from taskline.schemas.ids import bucket_of, lane_of, new_task_id
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType
from taskline.settings import Settings
from taskline.state.cassandra import CassandraStore
from taskline.state.status import TaskStatus
from taskline.state.store import EventsWrite, SubmissionWrite, Write

pytestmark = pytest.mark.servers

CODEC = Codec()
PLACE = {"type": "record", "name": "Place", "fields": [{"name": "iata", "type": "string"}]}
NEAREST = TaskType(name="geo.nearest", schema=PayloadSchema.parse(PLACE))
ANY = TaskType(name="any.json")


def changed(settings: Settings, **sections: dict[str, Any]) -> Settings:
    values = settings.model_dump()
    for section, changes in sections.items():
        values[section] |= changes
    return Settings.model_validate(values)


@pytest.fixture(scope="module")
def shared_settings(servers: Any, keyspace: str, view_ready: None) -> Settings:
    """For tests that leave nothing behind."""
    settings = Settings.model_validate(
        {
            "kafka": {
                "bootstrap_servers": servers.bootstrap_servers,
                "namespace": f"t{secrets.token_hex(4)}.",
            },
            "topics": {"dispatch_partitions": 3, "lanes": 3, "dlq_partitions": 1},
            "cassandra": {
                "contact_points": servers.contact_points,
                "port": servers.cassandra_port,
                "keyspace": keyspace,
            },
            "api": {"auth": "off"},
            "telemetry": {"log_format": "json"},
        }
    )
    create_topics(settings)
    register(settings, NEAREST, ANY)
    return settings


@pytest.fixture(scope="module")
def shared_api(shared_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    with running_api(shared_settings, tmp_path_factory.mktemp("api")) as process:
        eventually(process.ready, "the API is ready")
        yield process


@pytest.fixture
def api_settings(topics_created: Settings, view_ready: None) -> Settings:
    register(topics_created, NEAREST, ANY)
    return changed(topics_created, api={"shutdown_delay_seconds": 0.0}, telemetry={"log_format": "json"})


@pytest.fixture
def api(api_settings: Settings, tmp_path: Path) -> Iterator[ApiProcess]:
    with running_api(api_settings, tmp_path) as process:
        eventually(process.ready, "the API is ready")
        yield process


def register(settings: Settings, *types: TaskType) -> None:
    directory = TypeDirectory(settings)
    directory.start()
    try:
        directory.register(types)
    finally:
        directory.close()


def dispatched(settings: Settings, priority: Priority, queue: str = "default") -> list[TaskSubmitted]:
    """What is on a dispatch topic."""
    topic = Topics(namespace=settings.kafka.namespace).dispatch(queue, priority)
    consumer = Consumer(
        {
            "bootstrap.servers": settings.kafka.bootstrap_servers,
            "group.id": "unused",
            "enable.auto.commit": False,
        }
    )
    found = []
    try:
        for partition in range(settings.topics.dispatch_partitions):
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
            consumer.assign([TopicPartition(topic, partition, low)])
            for _ in range(low, high):
                message = consumer.poll(10)
                assert message is not None
                assert message.error() is None
                found.append(CODEC.decode(message.value(), TaskSubmitted))
    finally:
        consumer.close()
    return found


def project(settings: Settings, *writes: Write) -> None:
    """Put into the view what a projector would."""

    async def main() -> None:
        store = await CassandraStore.connect(settings)
        try:
            await store.apply(writes)
        finally:
            await store.close()

    asyncio.run(main())


def place(settings: Settings, task: TaskSubmitted) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "lane": lane_of(task.task_id, settings.topics.lanes),
        "bucket": bucket_of(task.task_id, settings.cassandra.bucket_seconds * 1000),
        "ttl_seconds": 3_600,
    }


def submission_write(settings: Settings, task: TaskSubmitted) -> SubmissionWrite:
    return SubmissionWrite(
        **place(settings, task),
        submission=CODEC.encode(task),
        tenant=task.tenant,
        task_type=task.task_type,
        queue=task.queue,
        priority=task.priority,
        status=TaskStatus.PENDING,
    )


def completion_write(settings: Settings, task: TaskSubmitted, result: bytes) -> EventsWrite:
    common: dict[str, Any] = {
        "task_id": task.task_id,
        "tenant": task.tenant,
        "attempt": 1,
        "worker": "w",
        "at": 1_795_964_645_000,
        "retain_until": task.retain_until,
        "execution": new_task_id(1_795_964_645_000),
    }
    started = Started(**common, source_topic="t", source_partition=0, source_offset=0)
    succeeded = Succeeded(**common, result=result)
    return EventsWrite(
        **place(settings, task),
        events={sequence_of(1, 0): CODEC.encode(started), sequence_of(1, 1): CODEC.encode(succeeded)},
        tenant=task.tenant,
        status=TaskStatus.COMPLETED,
    )


def slug(response: httpx.Response) -> str:
    assert response.headers["content-type"] == "application/problem+json"
    kind: str = response.json()["type"]
    return kind.removeprefix("urn:taskline:problem:")


def test_a_task_from_its_submission_to_its_result(api_settings: Settings, api: ApiProcess) -> None:
    response = api.submit("geo.nearest", {"iata": "LAX"}, priority="high")
    assert response.status_code == 201
    (task,) = dispatched(api_settings, Priority.HIGH)
    assert response.headers["location"] == f"/tasks/{task.task_id}"

    with ThreadPoolExecutor() as pool:
        # Asked before the view has it: the answer waits for the projector.
        early = pool.submit(api.client.get, response.headers["location"])
        project(api_settings, submission_write(api_settings, task))
        assert early.result().json()["status"] == "pending"

    project(api_settings, completion_write(api_settings, task, b'{"nearest":"HHR"}'))
    answer = api.client.get(response.headers["location"]).json()
    assert (answer["status"], answer["result"]) == ("completed", {"nearest": "HHR"})
    history = api.client.get(response.headers["location"] + "/history").json()
    assert [row["outcome"] for row in history["attempts"]] == ["succeeded"]
    assert [row["event"] for row in history["events"]] == ["started", "succeeded"]


def test_what_is_wrong_is_said_and_nothing_enters_the_log(api_settings: Settings, api: ApiProcess) -> None:
    answers = [
        api.submit("geo.nearst", {"iata": "LAX"}),
        api.submit("geo.nearest", {"iata": 5}),
        api.submit("geo.nearest", {"iata": "LAX"}, priorty="high"),
        api.client.post("/tasks", content=b"{", headers={"content-type": "application/json"}),
        api.client.post("/tasks", content=b"{}"),
        api.submit("any.json", "x" * api_settings.producer.max_payload_bytes),
    ]
    assert [(answer.status_code, slug(answer)) for answer in answers] == [
        (400, "unknown-task-type"),
        (400, "invalid-payload"),
        (422, "invalid-fields"),
        (422, "malformed-body"),
        (415, "unsupported-media-type"),
        (413, "too-large"),
    ]
    assert not any(dispatched(api_settings, priority) for priority in Priority)


def test_a_huge_body_is_refused_early_and_its_sender_hears_of_it(shared_api: ApiProcess) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(320):
            yield b"x" * 65_536

    headers = {"content-type": "application/json"}
    for content in (b"x" * 20_000_000, endless()):
        response = shared_api.client.post("/tasks", content=content, headers=headers)
        assert (response.status_code, slug(response)) == (413, "too-large")
    assert shared_api.submit("any.json", 1).status_code == 201


def test_connections_that_do_not_speak_http(shared_api: ApiProcess) -> None:
    host, port = httpx.URL(shared_api.url).host, httpx.URL(shared_api.url).port
    assert port is not None
    for sent, status in (
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", b"400"),
        (b"GET /" + b"x" * 70_000, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000, b"431"),
    ):
        with socket.create_connection((host, port), timeout=30) as connection:
            connection.sendall(sent)
            answer = connection.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b"application/problem+json" in answer


def test_a_client_that_offers_to_upgrade_is_served_as_usual(shared_api: ApiProcess) -> None:
    # As Java's HttpClient does by default.
    headers = {
        "connection": "Upgrade, HTTP2-Settings",
        "upgrade": "h2c",
        "http2-settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    }
    body = {"task_type": "any.json", "payload": 1}
    for _ in range(2):
        assert shared_api.client.post("/tasks", json=body, headers=headers).status_code == 201
        assert shared_api.client.get("/healthz", headers=headers).status_code == 200


def test_a_new_type_is_known_soon(api_settings: Settings, api: ApiProcess) -> None:
    assert slug(api.submit("late.type", 1)) == "unknown-task-type"
    register(api_settings, TaskType(name="late.type"))
    eventually(lambda: api.submit("late.type", 1).status_code == 201, "the type is known", 10)
    names = [each["name"] for each in api.client.get("/task-types").json()["task_types"]]
    assert names == ["any.json", "geo.nearest", "late.type"]


def test_without_cassandra_tasks_are_accepted_and_reads_say_503(
    api_settings: Settings, tmp_path: Path
) -> None:
    gate = Gate(api_settings.cassandra.contact_points[0], api_settings.cassandra.port)
    gated = changed(api_settings, cassandra={"port": gate.port, "request_timeout_seconds": 2.0})
    try:
        with running_api(gated, tmp_path) as api:
            eventually(lambda: api.ready("submit"), "submissions are possible")
            accepted = api.submit("any.json", {"n": 1})
            assert accepted.status_code == 201
            location = accepted.headers["location"]
            began = time.monotonic()
            response = api.client.get(location)
            assert (response.status_code, slug(response)) == (503, "view-unavailable")
            assert int(response.headers["retry-after"]) >= 1
            assert time.monotonic() - began < 20
            state = api.client.get("/readyz")
            assert (state.status_code, slug(state)) == (503, "not-ready")
            assert state.json()["checks"]["kafka"]["up"]
            assert not state.json()["checks"]["view"]["up"]

            gate.open()
            eventually(api.ready, "the view is found by itself", 60)
            (task,) = dispatched(api_settings, Priority.NORMAL)
            project(api_settings, submission_write(api_settings, task))
            assert api.client.get(location).status_code == 200

            gate.shut()
            eventually(lambda: not api.ready("read"), "its loss is noticed", 60)
            assert api.client.get(location).status_code == 503
            assert api.submit("any.json", {"n": 2}).status_code == 201
            gate.open()
            eventually(lambda: api.client.get(location).status_code == 200, "it is found again", 60)
    finally:
        gate.close()


def test_a_view_that_was_not_made_is_named_and_found_once_it_is(
    api_settings: Settings, tmp_path: Path
) -> None:
    from taskline.state.migrations import migrate

    elsewhere = changed(api_settings, cassandra={"keyspace": api_settings.cassandra.keyspace + "_late"})
    with running_api(elsewhere, tmp_path) as api:
        eventually(lambda: api.ready("submit"), "submissions are possible")
        eventually(
            lambda: "taskline view migrate" in str(api.client.get("/readyz").json()["detail"]),
            "the command is named",
        )
        migrate(elsewhere)
        eventually(api.ready, "the view is found", 60)


def test_without_kafka_nothing_is_accepted_until_it_comes(api_settings: Settings, tmp_path: Path) -> None:
    host, _, port = api_settings.kafka.bootstrap_servers.partition(",")[0].rpartition(":")
    gate = Gate(host, int(port))
    gated = changed(api_settings, kafka={"bootstrap_servers": f"127.0.0.1:{gate.port}"})
    try:
        with running_api(gated, tmp_path) as api:
            response = api.submit("any.json", 1)
            assert (response.status_code, slug(response)) == (503, "types-unavailable")
            assert api.client.get("/healthz").status_code == 200
            assert not api.client.get("/readyz").json()["checks"]["kafka"]["up"]
            gate.open()
            eventually(lambda: api.submit("any.json", 1).status_code == 201, "Kafka is found by itself", 90)
    finally:
        gate.close()


def test_what_the_broker_refuses_is_certainly_not_accepted(api_settings: Settings, api: ApiProcess) -> None:
    topic = Topics(namespace=api_settings.kafka.namespace).dispatch("default", Priority.LOW)
    set_config(api_settings, topic, "max.message.bytes", "100")
    response = api.submit("any.json", "x" * 1_000, priority="low")
    assert (response.status_code, slug(response)) == (503, "not-accepted")
    assert api.submit("any.json", 1).status_code == 201, "the other topics go on"
    assert not dispatched(api_settings, Priority.LOW)


def set_config(settings: Settings, topic: str, name: str, value: str) -> None:
    admin = AdminClient({"bootstrap.servers": settings.kafka.bootstrap_servers})
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(30)


def test_wrong_topics_are_refused_at_the_start(settings: Settings, tmp_path: Path) -> None:
    process = spawn(settings, tmp_path, "--port", "0", "--announce", str(tmp_path / "url"))
    assert process.wait(60) == 1
    assert "taskline topics create" in (tmp_path / "api.log").read_text()
    assert not (tmp_path / "url").exists()


def test_a_taken_port_is_refused_at_the_start(
    shared_api: ApiProcess, shared_settings: Settings, tmp_path: Path
) -> None:
    process = spawn(shared_settings, tmp_path, "--port", str(httpx.URL(shared_api.url).port))
    assert process.wait(60) == 2
    assert "in use" in (tmp_path / "api.log").read_text()


def test_the_log_says_where_it_listens(shared_api: ApiProcess) -> None:
    (line,) = [line for line in shared_api.log() if line["event"] == "listening"]
    assert line["url"] == shared_api.url
    assert line["port"] == httpx.URL(shared_api.url).port


def test_a_stop_loses_no_request(api_settings: Settings, tmp_path: Path) -> None:
    """Readiness goes first, what is in flight is answered, and what was accepted is in the log."""
    lingering = changed(api_settings, api={"shutdown_delay_seconds": 1.0})
    with running_api(lingering, tmp_path) as api:
        eventually(api.ready, "the API is ready")
        accepted: list[str] = []
        broken: list[Exception] = []

        def submit_for_ever() -> None:
            with httpx.Client(base_url=api.url, timeout=30) as client:
                while True:
                    try:
                        response = client.post("/tasks", json={"task_type": "any.json", "payload": 1})
                    except httpx.ConnectError:
                        return
                    except httpx.HTTPError as error:
                        broken.append(error)
                        return
                    assert response.status_code == 201
                    accepted.append(response.json()["task_id"])

        with ThreadPoolExecutor(8) as pool:
            submitters = [pool.submit(submit_for_ever) for _ in range(4)]
            eventually(lambda: len(accepted) > 20, "tasks are accepted")
            # An id minted now: the answer waits for the projector, longer than the delay.
            young = new_task_id(time.time_ns() // 1_000_000)
            waiting = pool.submit(httpx.get, f"{api.url}/tasks/{young}", timeout=30)
            time.sleep(0.2)
            api.ask_to_stop()
            eventually(lambda: "stopping" in httpx.get(f"{api.url}/readyz").text, "readiness goes first", 5)
            assert waiting.result().status_code == 404
            for submitter in submitters:
                submitter.result()
        assert api.wait() == 0
        # A connection that was idle when the server closed it is the client's to repeat; no answer was cut off.
        assert all(isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) for error in broken)
    in_log = {str(task.task_id) for task in dispatched(api_settings, Priority.NORMAL)}
    assert set(accepted) <= in_log
