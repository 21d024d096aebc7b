"""The Cassandra node: one node, its own seed, no JMX."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cassandra import DriverException, ProtocolVersion
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable
from cassandra.policies import WhiteListRoundRobinPolicy

from taskline.infra.local.artifacts import Bundle
from taskline.infra.local.config import CassandraConfig, ServiceName
from taskline.infra.local.java import CASSANDRA_JAVA, JavaRequirement
from taskline.infra.local.ports import LOOPBACK, accepts_connections
from taskline.infra.local.service import CLIENT_PORT, Runtime, Site
from taskline.infra.local.templates import maven_property, render, shipped

# What the node reaches into, as its own start script has it.
_EXPORTS = (
    "java.base/java.lang.ref",
    "java.base/jdk.internal.misc",
    "java.base/jdk.internal.ref",
    "java.base/sun.nio.ch",
    "java.management.rmi/com.sun.jmx.remote.internal.rmi",
    "java.rmi/sun.rmi.registry",
    "java.rmi/sun.rmi.server",
    "java.sql/java.sql",
    "jdk.unsupported/sun.misc",
)
_OPENS = (
    "java.base/java.io",
    "java.base/java.lang",
    "java.base/java.lang.module",
    "java.base/java.lang.reflect",
    "java.base/java.math",
    "java.base/java.net",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.base/jdk.internal.loader",
    "java.base/jdk.internal.math",
    "java.base/jdk.internal.module",
    "java.base/jdk.internal.ref",
    "java.base/jdk.internal.reflect",
    "java.base/jdk.internal.util.jar",
    "java.base/sun.nio.ch",
    "jdk.management/com.sun.management.internal",
)

# Measures objects on the heap; the node will not start without it.
_JAMM = "jamm-0.4.0.jar"

_JVM_OPTIONS = (
    "-Xms256m",
    "-Xss512k",
    "-Djdk.attach.allowAttachSelf=true",
    "-Dcassandra-foreground=yes",
    # There is nobody else to hear from: no waiting for gossip or for the ring.
    "-Dcassandra.skip_wait_for_gossip_to_settle=0",
    "-Dcassandra.ring_delay_ms=1",
    *(f"--add-exports={package}=ALL-UNNAMED" for package in _EXPORTS),
    *(f"--add-opens={package}=ALL-UNNAMED" for package in _OPENS),
)


@dataclass(frozen=True)
class CassandraServer:
    """Runs Cassandra as one node."""

    config: CassandraConfig

    name: ServiceName = "cassandra"
    java: JavaRequirement = CASSANDRA_JAVA
    port_purposes: tuple[str, ...] = (CLIENT_PORT, "storage")

    @cached_property
    def bundle(self) -> Bundle:
        """Cassandra's jars."""
        pom = shipped("cassandra-pom.xml")
        version = maven_property(pom, "cassandra.version")
        return Bundle(
            title=f"Cassandra {version}", slug=f"cassandra-{version}", pom=pom, megabytes=70, landmark=_JAMM
        )

    @property
    def version(self) -> str:
        """Cassandra's release."""
        return maven_property(self.bundle.pom, "cassandra.version")

    @property
    def wanted_port(self) -> int | None:
        """The client port that was asked for."""
        return self.config.port

    def yaml(self, site: Site) -> str:
        """Render cassandra.yaml."""
        return render(
            shipped("cassandra.yaml"),
            {
                "cluster_name": _cluster_name(site),
                "port": site.ports[CLIENT_PORT],
                "storage_port": site.ports["storage"],
            },
            overrides=self.config.overrides,
            separator=": ",
        )

    def prepare(self, site: Site, runtime: Runtime) -> list[str]:
        """Write the configuration and give the node's command line; the node makes its folders by itself."""
        config, logging = site.folder / "cassandra.yaml", site.folder / "logback.xml"
        config.write_text(self.yaml(site), encoding="utf-8")
        logging.write_text(shipped("cassandra-logback.xml"), encoding="utf-8")
        options = (
            f"-javaagent:{runtime.jars / _JAMM}",
            f"-Dlogback.configurationFile={logging}",
            f"-Dcassandra.config={config.as_uri()}",
            f"-Dcassandra.storagedir={site.data}",
            f"-Dcassandra.logdir={site.log.parent}",
            *_JVM_OPTIONS,
        )
        return runtime.command(
            site,
            heap_mb=self.config.heap_mb,
            options=options,
            program=("-cp", f"{runtime.jars}/*", "org.apache.cassandra.service.CassandraDaemon"),
        )

    def probe(self, site: Site, *, timeout_s: float) -> str | None:
        """Connect and read system.local; the node must be this stack's."""
        port = site.ports[CLIENT_PORT]
        if not accepts_connections(port):
            return f"nothing listens on port {port}"
        cluster = Cluster(
            [LOOPBACK],
            port=port,
            protocol_version=ProtocolVersion.V5,
            connect_timeout=timeout_s,
            control_connection_timeout=timeout_s,
            execution_profiles={
                EXEC_PROFILE_DEFAULT: ExecutionProfile(
                    load_balancing_policy=WhiteListRoundRobinPolicy([LOOPBACK]), request_timeout=timeout_s
                )
            },
            schema_metadata_enabled=False,
            token_metadata_enabled=False,
        )
        try:
            row = cluster.connect().execute("SELECT release_version, cluster_name FROM system.local").one()
        except (DriverException, NoHostAvailable, OSError) as error:
            return f"no answer: {error}"
        finally:
            cluster.shutdown()
        if row is None or row.cluster_name != _cluster_name(site):
            return f"port {port} is answered by another Cassandra cluster"
        return None


def _cluster_name(site: Site) -> str:
    """Tells this stack's node from another's on a recycled port."""
    return f"taskline-{site.stack_id}"
