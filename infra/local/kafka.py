"""The Kafka broker: one KRaft node, broker and controller in one process."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import uuid
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from taskline.infra.local.artifacts import Bundle
from taskline.infra.local.config import KafkaConfig, ServiceName
from taskline.infra.local.errors import ServerDied
from taskline.infra.local.java import KAFKA_JAVA, JavaRequirement
from taskline.infra.local.ports import LOOPBACK, accepts_connections
from taskline.infra.local.service import CLIENT_PORT, Runtime, Site
from taskline.infra.local.templates import escape_property, maven_property, render, shipped

# Three times the 1 MiB of a dispatch record: dead letters may be twice as large, and a batch adds its own overhead.
MESSAGE_MAX_BYTES = 3 * 1024 * 1024

# A fault test wants a dead member to be noticed in a second or two; Kafka's default refuses less than 6 s.
GROUP_MIN_SESSION_TIMEOUT_MS = 1_000

# 90 days: a stack that slept for a month (Kafka's default is 7 days) must not lose its place in the log.
OFFSETS_RETENTION_MINUTES = 90 * 24 * 60

# After a kill the controller refuses the restarted broker until the old one's session has run out; Kafka's default is
# 9 s. Shorter would fence a healthy broker on a machine that stalls.
BROKER_SESSION_TIMEOUT_MS = 3_000

# The collector with the smallest footprint: 512 MB on two cores gain nothing from G1's threads and remembered sets.
_JVM_OPTIONS = ("-XX:+UseSerialGC", "-Xss512k")

# To format an empty folder takes 2 to 3 s; a busy machine may need ten times that.
_FORMAT_TIMEOUT_S = 120.0
_FORMAT_HEAP_MB = 128


@dataclass(frozen=True)
class KafkaServer:
    """Runs Kafka as one node."""

    config: KafkaConfig

    name: ServiceName = "kafka"
    java: JavaRequirement = KAFKA_JAVA
    port_purposes: tuple[str, ...] = (CLIENT_PORT, "controller")

    @cached_property
    def bundle(self) -> Bundle:
        """Kafka's jars."""
        pom = shipped("kafka-pom.xml")
        version = maven_property(pom, "kafka.version")
        return Bundle(
            title=f"Kafka {version}",
            slug=f"kafka-{version}",
            pom=pom,
            megabytes=55,
            landmark=f"kafka_2.13-{version}.jar",
        )

    @property
    def version(self) -> str:
        """Kafka's release."""
        return maven_property(self.bundle.pom, "kafka.version")

    @property
    def wanted_port(self) -> int | None:
        """The client port that was asked for."""
        return self.config.port

    def properties(self, site: Site) -> str:
        """Render server.properties."""
        return render(
            shipped("kafka-server.properties"),
            {
                "port": site.ports[CLIENT_PORT],
                "controller_port": site.ports["controller"],
                "data_dir": escape_property(str(site.data)),
                "message_max_bytes": MESSAGE_MAX_BYTES,
                "group_min_session_timeout_ms": GROUP_MIN_SESSION_TIMEOUT_MS,
                "offsets_retention_minutes": OFFSETS_RETENTION_MINUTES,
                "broker_session_timeout_ms": BROKER_SESSION_TIMEOUT_MS,
            },
            overrides=self.config.overrides,
            separator="=",
        )

    def prepare(self, site: Site, runtime: Runtime) -> list[str]:
        """Write the configuration, format new storage, and give the broker's command line.

        Raises:
            ServerDied: The storage could not be formatted.
        """
        properties, logging = site.folder / "server.properties", site.folder / "log4j2.xml"
        properties.write_text(self.properties(site), encoding="latin-1", errors="backslashreplace")
        logging.write_text(shipped("kafka-log4j2.xml"), encoding="utf-8")
        options = (f"-Dlog4j2.configurationFile={logging.as_uri()}", *_JVM_OPTIONS)
        if not (site.data / "meta.properties").exists():
            _format(site, runtime, properties, options)
        return runtime.command(
            site,
            heap_mb=self.config.heap_mb,
            options=("-Xms128m", *options),
            program=("-cp", f"{runtime.jars}/*", "kafka.Kafka", str(properties)),
        )

    def probe(self, site: Site, *, timeout_s: float) -> str | None:
        """Ask for the metadata; they must come from this stack's broker and list it as live."""
        port = site.ports[CLIENT_PORT]
        if not accepts_connections(port):
            return f"nothing listens on port {port}"
        client = AdminClient(
            {
                "bootstrap.servers": f"{LOOPBACK}:{port}",
                "client.id": "taskline-local",
                "log_level": 0,
                "reconnect.backoff.max.ms": 200,
            }
        )
        try:
            metadata = client.list_topics(timeout=timeout_s)
        except KafkaException as error:
            return f"no metadata: {error.args[0]}"
        if metadata.cluster_id != cluster_id(site.data):
            return f"port {port} is answered by another Kafka cluster"
        return None if metadata.brokers else "the broker has not joined its cluster yet"


def new_cluster_id() -> str:
    """A cluster id in Kafka's own form: base64url of 16 bytes, without a leading dash (an option to a command line)."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode("ascii").rstrip("=")
        if not text.startswith("-"):
            return text


def cluster_id(data: Path) -> str | None:
    """The id that the storage was formatted with; None if it was not."""
    try:
        text = (data / "meta.properties").read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^cluster\.id=(\S+)", text, re.MULTILINE)
    return match.group(1) if match else None


def _format(site: Site, runtime: Runtime, properties: Path, options: tuple[str, ...]) -> None:
    """Format the data folder; one without meta.properties is empty or was left half-formatted."""
    shutil.rmtree(site.data, ignore_errors=True)
    tool = (
        "kafka.tools.StorageTool",
        "format",
        "--standalone",
        "-t",
        new_cluster_id(),
        "-c",
        str(properties),
    )
    command = runtime.command(
        site,
        heap_mb=_FORMAT_HEAP_MB,
        options=(*options, "-XX:TieredStopAtLevel=1"),
        program=("-cp", f"{runtime.jars}/*", *tool),
    )
    done = subprocess.run(  # noqa: S603 - a java found on this machine, arguments made here
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_FORMAT_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        shutil.rmtree(site.data, ignore_errors=True)
        message = f"Kafka's storage could not be formatted (exit {done.returncode}):\n{done.stdout}"
        raise ServerDied(message, service="kafka", log_tail=done.stdout)
