"""A real ephemeral stack: used, broken, mended, and gone without a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, Session
from cassandra.policies import WhiteListRoundRobinPolicy
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

from taskline.infra.local import LocalStack, NotAvailable, SchemaRegistry, StackConfig
from taskline.infra.local.errors import NotRunning

pytestmark = pytest.mark.servers

TOPIC = "local-stack"
RECORDS = [f"record {number}".encode() for number in range(100)]


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    stack = LocalStack(StackConfig(ephemeral=True))
    try:
        stack.start()
    except NotAvailable as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))
    yield stack
    stack.stop()


@pytest.fixture
def session(stack: LocalStack) -> Iterator[Session]:
    profile = ExecutionProfile(load_balancing_policy=WhiteListRoundRobinPolicy(list(stack.contact_points)))
    cluster = Cluster(
        list(stack.contact_points),
        port=stack.cassandra_port,
        protocol_version=5,
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
    )
    yield cluster.connect()
    cluster.shutdown()


def produce(stack: LocalStack, records: list[bytes]) -> None:
    errors: list[object] = []
    producer = Producer(
        {"bootstrap.servers": stack.bootstrap_servers, "acks": "all", "enable.idempotence": True}
    )
    for record in records:
        producer.produce(TOPIC, record, on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(30) == 0
    assert errors == [None] * len(records)


def consume_all(stack: LocalStack) -> list[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": stack.bootstrap_servers,
            "group.id": "local-stack",
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
        }
    )
    try:
        partition = TopicPartition(TOPIC, 0, 0)
        _, high = consumer.get_watermark_offsets(partition, timeout=30)
        consumer.assign([partition])
        values: list[bytes] = []
        deadline = time.monotonic() + 30
        while len(values) < high and time.monotonic() < deadline:
            for message in consumer.consume(100, 1.0):
                assert message.error() is None
                values.append(message.value() or b"")
        return values
    finally:
        consumer.close()


def test_kafka_keeps_its_data_and_port_over_kill_and_stop(stack: LocalStack) -> None:
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
    for future in admin.create_topics([NewTopic(TOPIC, 1, 1)]).values():
        future.result(30)
    produce(stack, RECORDS)
    assert consume_all(stack) == RECORDS
    address, before = stack.bootstrap_servers, kafka_pid(stack)

    stack.kill("kafka")
    assert not psutil.pid_exists(before)
    assert condition(stack, "kafka") == "stopped"
    assert condition(stack, "cassandra") == "running"
    with pytest.raises(NotRunning):
        _ = stack.bootstrap_servers
    with pytest.raises(NotRunning):
        stack.pause("kafka")

    assert stack.start("kafka") == ("kafka",)
    assert stack.bootstrap_servers == address
    assert kafka_pid(stack) != before
    assert consume_all(stack) == RECORDS

    produce(stack, [b"after the kill"])
    assert stack.stop("kafka") == ("kafka",)
    assert stack.start() == ("kafka",)
    assert stack.bootstrap_servers == address
    assert consume_all(stack) == [*RECORDS, b"after the kill"]


def test_a_paused_broker_answers_nothing_and_goes_on(stack: LocalStack) -> None:
    stack.pause("kafka")
    try:
        assert condition(stack, "kafka") == "paused"
        with pytest.raises(KafkaException):
            AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0}).list_topics(
                timeout=1.5
            )
    finally:
        stack.resume("kafka")
    assert AdminClient({"bootstrap.servers": stack.bootstrap_servers}).list_topics(timeout=30).brokers
    assert condition(stack, "kafka") == "running"


def test_a_misspelt_topic_is_not_created(stack: LocalStack) -> None:
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
    assert admin.list_topics("no-such-topic", timeout=30).topics["no-such-topic"].error is not None
    assert "no-such-topic" not in admin.list_topics(timeout=30).topics


def test_cql(stack: LocalStack, session: Session) -> None:
    session.execute(
        "CREATE KEYSPACE local_stack WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}"
    )
    session.execute("CREATE TABLE local_stack.pairs (k int PRIMARY KEY, v text)")
    session.execute("INSERT INTO local_stack.pairs (k, v) VALUES (1, 'one')")
    assert session.execute("SELECT v FROM local_stack.pairs WHERE k = 1").one().v == "one"
    version = session.execute("SELECT release_version FROM system.local").one().release_version
    shown = {service.name: service.version for service in stack.status().services}
    assert shown["cassandra"] == version


def test_cassandra_keeps_its_schema_and_data_over_a_kill(stack: LocalStack) -> None:
    port = stack.cassandra_port
    stack.kill("cassandra")
    stack.start("cassandra")
    assert stack.cassandra_port == port
    with Cluster(list(stack.contact_points), port=port, protocol_version=5) as cluster:
        row = cluster.connect().execute("SELECT v FROM local_stack.pairs WHERE k = 1").one()
    assert row.v == "one"


def test_only_the_loopback_is_listened_on(stack: LocalStack) -> None:
    for service in stack.status().services:
        assert service.pid is not None
        listening = [
            connection.laddr.ip
            for connection in psutil.Process(service.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening
        assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_nothing_is_left_behind(stack: LocalStack) -> None:
    """The last test with the stack: it ends it."""
    directory = stack.directory
    pids = [service.pid for service in stack.status().services]
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert set(pids) <= before
    assert set(stack.stop()) == {"kafka", "cassandra"}
    assert not directory.exists()
    left = {child.pid for child in psutil.Process().children(recursive=True)}
    assert not [pid for pid in pids if pid is None or psutil.pid_exists(pid)]
    assert not {pid for pid in left & before if _is_run_with(pid, str(directory))}
    assert stack.stop() == ()


def test_the_schema_registry_registers_and_leaves_nothing_behind() -> None:
    try:
        with SchemaRegistry().running() as registry, SchemaRegistryClient({"url": registry.url}) as client:
            text = '{"type": "record", "name": "Pair", "fields": [{"name": "k", "type": "int"}]}'
            number = client.register_schema("local-stack-value", Schema(text, "AVRO"))
            assert json.loads(str(client.get_schema(number).schema_str)) == json.loads(text)
            (pid,) = [
                child.pid
                for child in psutil.Process().children()
                if _is_run_with(child.pid, "quarkus-run.jar")
            ]
    except NotAvailable as reason:  # it is optional, and its Java is newer than the stack's
        pytest.skip(str(reason))
    assert not psutil.pid_exists(pid)
    with pytest.raises(NotRunning):
        _ = registry.url


def test_a_zombie_among_the_children_is_not_taken_for_a_server() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended and not reaped: a zombie
        assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
        assert not _is_run_with(child.pid, "-c")


def _is_run_with(pid: int, text: str) -> bool:
    try:
        return any(text in part for part in psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:  # ended, or a zombie that an earlier test's launcher has not reaped yet
        return False


def kafka_pid(stack: LocalStack) -> int:
    pid = next(service.pid for service in stack.status().services if service.name == "kafka")
    assert pid is not None
    return pid


def condition(stack: LocalStack, name: str) -> str:
    return next(service.condition for service in stack.status().services if service.name == name)
