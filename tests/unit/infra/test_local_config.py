"""What is refused, and what the servers are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from taskline.infra.local.cassandra import CassandraServer
from taskline.infra.local.config import CassandraConfig, KafkaConfig, StackConfig
from taskline.infra.local.errors import InvalidStackConfig
from taskline.infra.local.java import Java
from taskline.infra.local.kafka import KafkaServer, cluster_id, new_cluster_id
from taskline.infra.local.registry import RegistryConfig, RegistryServer
from taskline.infra.local.service import Runtime, Server, Site
from taskline.infra.local.stack import LocalStack
from taskline.infra.local.templates import escape_property, maven_property, render, shipped

RUNTIME = Runtime(java=Java(home=Path("/jdk"), major=17, version="17.0.1"), jars=Path("/jars"))


def a_site(service: str, folder: Path) -> Site:
    ports = {"client": 20_001, "controller": 20_002, "storage": 20_003, "management": 20_004}
    return Site(stack_id="abc123", service=service, folder=folder, ports=ports)


def properties(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pairs = [line.split("=", 1) for line in lines]
    assert len({key for key, _ in pairs}) == len(pairs), "a key is set twice"
    return dict(pairs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: StackConfig(services=()),
        lambda: StackConfig(services=("kafka", "kafka")),
        lambda: StackConfig(services=("zookeeper",)),  # type: ignore[arg-type]
        lambda: StackConfig(ephemeral=True, directory=Path("/data")),
        lambda: StackConfig(kafka=KafkaConfig(port=1), cassandra=CassandraConfig(port=1)),
        lambda: StackConfig(kafka=KafkaConfig(heap_mb=0)),
        lambda: StackConfig(start_timeout_s=0),
        lambda: StackConfig(stop_grace_s=-1),
        lambda: LocalStack(StackConfig(directory=Path("/a,b"))),
    ],
)
def test_what_cannot_work_is_refused(make: object) -> None:
    with pytest.raises(InvalidStackConfig):
        make()  # type: ignore[operator]


def test_kafka_listens_on_the_loopback_only_and_creates_no_topics(tmp_path: Path) -> None:
    site = a_site("kafka", tmp_path)
    told = properties(KafkaServer(KafkaConfig()).properties(site))
    assert told["listeners"] == "PLAINTEXT://127.0.0.1:20001,CONTROLLER://127.0.0.1:20002"
    assert told["controller.quorum.bootstrap.servers"] == "127.0.0.1:20002"
    assert told["auto.create.topics.enable"] == "false"
    assert told["log.dirs"] == str(tmp_path / "data")
    assert told["group.min.session.timeout.ms"] == "1000"
    assert int(told["offsets.retention.minutes"]) >= 30 * 24 * 60
    assert int(told["message.max.bytes"]) > 2 * 1024 * 1024


def test_overrides_replace_or_add(tmp_path: Path) -> None:
    kafka = KafkaServer(KafkaConfig(overrides={"num.partitions": "7", "compression.type": "zstd"}))
    told = properties(kafka.properties(a_site("kafka", tmp_path)))
    assert (told["num.partitions"], told["compression.type"]) == ("7", "zstd")
    cassandra = CassandraServer(
        CassandraConfig(overrides={"auto_snapshot": "true", "read_request_timeout": "9s"})
    )
    settings = yaml.safe_load(cassandra.yaml(a_site("cassandra", tmp_path)))
    assert (settings["auto_snapshot"], settings["read_request_timeout"]) == (True, "9s")


def test_an_override_of_two_lines_is_refused() -> None:
    with pytest.raises(InvalidStackConfig, match="one line"):
        render("a=1\n", {}, overrides={"a": "2\nb=3"}, separator="=")


def test_cassandra_listens_on_the_loopback_only_and_is_its_own_seed(tmp_path: Path) -> None:
    settings = yaml.safe_load(CassandraServer(CassandraConfig()).yaml(a_site("cassandra", tmp_path)))
    assert (settings["rpc_address"], settings["native_transport_port"]) == ("127.0.0.1", 20_001)
    assert (settings["listen_address"], settings["storage_port"]) == ("127.0.0.1", 20_003)
    assert settings["seed_provider"][0]["parameters"][0]["seeds"] == "127.0.0.1:20003"
    assert settings["cluster_name"] == "taskline-abc123"


def test_commands_bear_their_marker_heap_and_files(tmp_path: Path) -> None:
    site = a_site("kafka", tmp_path / "with space")
    site.data.mkdir(parents=True)
    (site.data / "meta.properties").write_text("cluster.id=x\n")
    kafka = KafkaServer(KafkaConfig(heap_mb=300)).prepare(site, RUNTIME)
    assert kafka[0] == "/jdk/bin/java"
    assert {site.marker, "-Xmx300m", "-XX:+UseSerialGC", "/jars/*", "kafka.Kafka"} <= set(kafka)
    assert any(part.startswith("-Dlog4j2.configurationFile=file:///") and "%20" in part for part in kafka)

    other = a_site("cassandra", tmp_path)
    cassandra = CassandraServer(CassandraConfig(heap_mb=700)).prepare(other, RUNTIME)
    assert {other.marker, "-Xmx700m", "-javaagent:/jars/jamm-0.4.0.jar"} <= set(cassandra)
    assert not any("jmx" in part and "remote.port" in part for part in cassandra)
    assert other.marker != site.marker

    registry = RegistryServer(RegistryConfig()).prepare(a_site("registry", tmp_path), RUNTIME)
    assert registry[-2:] == ["-jar", "/jars/quarkus-run.jar"]
    assert "-Dquarkus.http.host=127.0.0.1" in registry


@pytest.mark.parametrize(
    ("service", "version"), [("kafka", "4.3."), ("cassandra", "5.0."), ("registry", "3.")]
)
def test_versions_are_pinned_in_the_poms(service: str, version: str) -> None:
    servers: dict[str, Server] = {
        "kafka": KafkaServer(KafkaConfig()),
        "cassandra": CassandraServer(CassandraConfig()),
        "registry": RegistryServer(RegistryConfig()),
    }
    server = servers[service]
    assert server.version.startswith(version)
    assert server.version in server.bundle.slug
    assert "SNAPSHOT" not in server.bundle.pom
    assert "LATEST" not in server.bundle.pom


def test_a_missing_property_is_named() -> None:
    with pytest.raises(ValueError, match=r"no property nothing\.version"):
        maven_property(shipped("kafka-pom.xml"), "nothing.version")


def test_cluster_ids(tmp_path: Path) -> None:
    ids = {new_cluster_id() for _ in range(300)}
    assert len(ids) == 300
    assert all(len(text) == 22 and not text.startswith("-") for text in ids)
    assert cluster_id(tmp_path) is None
    (tmp_path / "meta.properties").write_text("version=1\ncluster.id=abc_-1\nnode.id=1\n")
    assert cluster_id(tmp_path) == "abc_-1"


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_properties_are_escaped_so_that_java_reads_them_back(text: str) -> None:
    escaped = escape_property(text)
    assert escaped.isascii()
    unescaped = escaped.encode("ascii").decode("unicode_escape")
    assert unescaped.encode("utf-16", "surrogatepass").decode("utf-16") == text
