"""The type directory and `taskline types` on a real Kafka."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from taskline.errors import IncompatibleSchema, Unavailable, UnknownTaskType, WrongTopology
from taskline.infra.kafka.admin import create_topics
from taskline.infra.kafka.types import SKIPPED, TypeDirectory
from taskline.infra.local.config import StackConfig
from taskline.infra.local.errors import NotAvailable
from taskline.infra.local.stack import LocalStack
from taskline.infra.topics import Topics
from taskline.schemas.catalogue import Outcome
from taskline.schemas.codec import Codec
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType
from taskline.settings import Settings

pytestmark = pytest.mark.servers


def schema(*fields: dict[str, object]) -> PayloadSchema:
    return PayloadSchema.parse({"type": "record", "name": "Payload", "fields": list(fields)})


V1 = TaskType(name="geo.x", schema=schema({"name": "count", "type": "int"}))
V2 = TaskType(
    name="geo.x",
    schema=schema({"name": "count", "type": "long"}, {"name": "note", "type": "string", "default": "none"}),
)


@pytest.fixture
def opened(topics_created: Settings) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def directory(stack: ExitStack, settings: Settings) -> TypeDirectory:
    return stack.enter_context(TypeDirectory(settings))


def append(settings: Settings, *values: bytes | None) -> None:
    """Put raw bytes on the topic, as somebody's mistake would."""
    producer = Producer({"bootstrap.servers": settings.kafka.bootstrap_servers})
    failures = []
    for value in values:
        producer.produce(
            Topics(namespace=settings.kafka.namespace).types,
            value,
            partition=0,
            on_delivery=lambda error, _: failures.append(error) if error else None,
        )
    assert producer.flush(10) == 0
    assert failures == []


def test_what_one_registers_all_come_to_know(opened: ExitStack, topics_created: Settings) -> None:
    one, other = directory(opened, topics_created), directory(opened, topics_created)
    with pytest.raises(UnknownTaskType):
        other.get("geo.x")
    (registration,) = one.register([V1])
    assert registration.outcome is Outcome.ACCEPTED
    assert one.get("geo.x") == V1
    assert other.wait_for("geo.x") == V1
    late = directory(opened, topics_created)
    assert late.names() == ("geo.x",)


def test_registering_again_publishes_nothing(opened: ExitStack, topics_created: Settings) -> None:
    one = directory(opened, topics_created)
    one.register([V1, TaskType(name="plain")])
    before = one._tail.position
    outcomes = one.register([V1, TaskType(name="plain")])
    assert [each.outcome for each in outcomes] == [Outcome.UNCHANGED, Outcome.UNCHANGED]
    one.refresh()
    assert one._tail.position == before


def test_a_task_queued_under_v1_runs_under_v2(opened: ExitStack, topics_created: Settings) -> None:
    producer, worker = directory(opened, topics_created), directory(opened, topics_created)
    producer.register([V1])
    payload, fingerprint = producer.get("geo.x").encode({"count": 3})
    worker.register([V2])
    value = worker.get("geo.x").decode(payload, fingerprint, worker.find_writer_schema)
    assert value == {"count": 3, "note": "none"}


def test_an_incompatible_schema_is_refused_and_nothing_is_published(
    opened: ExitStack, topics_created: Settings
) -> None:
    one = directory(opened, topics_created)
    one.register([V1])
    before = one._tail.position
    broken = TaskType(name="geo.x", schema=schema({"name": "count", "type": "string"}))
    with pytest.raises(IncompatibleSchema, match="count"):
        one.register([TaskType(name="innocent"), broken])
    one.refresh()
    assert one._tail.position == before
    assert one.names() == ("geo.x",)


def test_the_log_settles_races(opened: ExitStack, topics_created: Settings) -> None:
    """Contradicting registrations at the same moment: one wins everywhere, and the others hear of it."""
    versions = [
        TaskType(name="t", schema=schema({"name": f"field_{index}", "type": "int"})) for index in range(4)
    ]
    directories = [directory(opened, topics_created) for _ in versions]
    winners, losers = [], []
    barrier = threading.Barrier(len(versions))

    def register(one: TypeDirectory, version: TaskType) -> None:
        barrier.wait()
        try:
            one.register([version])
        except IncompatibleSchema:
            losers.append(version)
        else:
            winners.append(version)

    threads = [
        threading.Thread(target=register, args=pair) for pair in zip(directories, versions, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert len(losers) == len(versions) - 1
    for one in directories:
        one.refresh()
        assert one.get("t") == winners[0]


def test_bad_bytes_are_skipped_and_counted(opened: ExitStack, topics_created: Settings) -> None:
    good = Codec().encode(TaskType(name="good").record(1))
    bad_name = Codec().encode(TaskType(name="good").record(1)).replace(b"good", b"g/od")
    before = SKIPPED.labels("undecodable")._value.get(), SKIPPED.labels("refused")._value.get()
    append(
        topics_created,
        b"",
        None,
        b"garbage",
        b"\x00\x00\x00\x00\x01",
        good[:-1],
        b"\xc3\x01unknown!",
        bad_name,
        good,
    )
    one = directory(opened, topics_created)
    assert one.names() == ("good",)
    after = SKIPPED.labels("undecodable")._value.get(), SKIPPED.labels("refused")._value.get()
    assert (after[0] - before[0], after[1] - before[1]) == (6, 1)


def test_an_unknown_fingerprint_is_looked_for_up_to_the_end(
    opened: ExitStack, topics_created: Settings
) -> None:
    reader, writer = directory(opened, topics_created), directory(opened, topics_created)
    writer.register([V1])
    assert V1.schema is not None
    assert reader.find_writer_schema(V1.schema.fingerprint) == V1.schema
    assert reader.find_writer_schema(b"12345678") is None


def test_no_topic_is_the_wrong_topology(settings: Settings) -> None:
    lost = TypeDirectory(settings)
    with pytest.raises(WrongTopology, match="taskline topics create"):
        lost.start()
    lost.close()


def test_no_broker_is_unavailable() -> None:
    nowhere = TypeDirectory(Settings.model_validate({"kafka": {"bootstrap_servers": "127.0.0.1:1"}}))
    with pytest.raises(Unavailable):
        nowhere.start(timeout_seconds=0.5)
    nowhere.close()


def test_waiting_for_what_never_comes(opened: ExitStack, topics_created: Settings) -> None:
    one = directory(opened, topics_created)
    with pytest.raises(Unavailable, match="never"):
        one.wait_for("never", timeout_seconds=0.1)
    one.close()
    with pytest.raises(Unavailable, match="closed"):
        one.wait_for("never", timeout_seconds=60)


@pytest.fixture
def own_kafka() -> Iterator[LocalStack]:
    """A broker of the test's own, to be killed."""
    try:
        with LocalStack(StackConfig(ephemeral=True, services=("kafka",))).running() as stack:
            yield stack
    except NotAvailable as reason:
        pytest.skip(f"no Kafka of our own: {reason}")


def test_a_broker_that_dies_and_comes_back(own_kafka: LocalStack) -> None:
    settings = Settings.model_validate(
        {"kafka": {"bootstrap_servers": own_kafka.bootstrap_servers}, "topics": {"dispatch_partitions": 1}}
    )
    create_topics(settings)
    with TypeDirectory(settings) as one, TypeDirectory(settings) as other:
        one.register([TaskType(name="before")])
        other.wait_for("before")
        own_kafka.kill("kafka")
        with pytest.raises(Unavailable):
            one.register([TaskType(name="meanwhile")], timeout_seconds=1.0)
        # What is known stays so.
        assert one.get("before") == other.get("before") == TaskType(name="before")
        own_kafka.start("kafka")
        one.register([TaskType(name="after")], timeout_seconds=60)
        assert other.wait_for("after", timeout_seconds=60) == TaskType(name="after")
        assert other.names() == ("after", "before")


def test_a_log_that_is_made_anew_is_read_anew(topics_created: Settings) -> None:
    """As after a reset of the cluster: the truth is what the log says now."""
    admin = AdminClient({"bootstrap.servers": topics_created.kafka.bootstrap_servers})
    topic = Topics(namespace=topics_created.kafka.namespace).types
    with TypeDirectory(topics_created) as one:
        one.register([TaskType(name="old"), TaskType(name="older")])
        admin.delete_topics([topic])[topic].result(30)
        deadline = time.monotonic() + 60
        while topic in admin.list_topics(timeout=10).topics:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        create_topics(topics_created)
        with TypeDirectory(topics_created) as other:
            other.register([TaskType(name="new")])
        assert one.wait_for("new", timeout_seconds=60) == TaskType(name="new")
        assert one.names() == ("new",)


def taskline(settings: Settings, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a shell runs it: its answer is on standard output, and nothing else is."""
    return subprocess.run(
        [sys.executable, "-c", "from taskline.cli import main; main()", "types", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("TASKLINE_")}
        | {
            "TASKLINE_KAFKA__BOOTSTRAP_SERVERS": settings.kafka.bootstrap_servers,
            "TASKLINE_KAFKA__NAMESPACE": settings.kafka.namespace,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_line(topics_created: Settings, tmp_path: Path) -> None:
    (tmp_path / "shop_tasks.py").write_text(
        "from taskline.schemas.payloads import PayloadSchema\n"
        "from taskline.schemas.types import TaskType\n"
        "class registry:\n"
        "    types = (TaskType(name='plain'), TaskType(name='typed', timeout_ms=1500, schema=PayloadSchema.parse(\n"
        "        {'type': 'record', 'name': 'P', 'fields': [{'name': 'a', 'type': 'int'}]})))\n"
    )

    def answer(*arguments: str) -> str:
        done = taskline(topics_created, tmp_path, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert answer("register", "shop_tasks:registry") == "accepted plain\naccepted typed\n"
    assert json.loads(answer("register", "shop_tasks:registry", "--json")) == [
        {"task_type": "plain", "outcome": "unchanged"},
        {"task_type": "typed", "outcome": "unchanged"},
    ]
    listed = [line.split("\t") for line in answer("list").splitlines()]
    assert listed[0] == ["plain", "default", "normal", "-", "3", "any JSON"]
    assert listed[1][3] == "1.5 s"
    shown = json.loads(answer("show", "typed", "--json"))
    assert shown["schemas"][0]["schema"]["fields"] == [{"name": "a", "type": "int"}]
    assert "timeout_ms: 1500" in answer("show", "typed")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "tiped"), "unknown task type 'tiped'"),
        (("register", "nowhere"), "give module:registry"),
        (("register", "nowhere:registry"), "No module named 'nowhere'"),
        (("register", "json:dumps"), "is no registry"),
    ],
)
def test_the_command_line_says_what_is_wrong(
    topics_created: Settings, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = taskline(topics_created, tmp_path, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert said in done.stderr
    assert "Traceback" not in done.stderr
