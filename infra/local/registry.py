"""A schema registry for tests: Apicurio, in memory, with the Confluent API under `/apis/ccompat/v7`.

It needs Java 21 or newer, unlike the stack, and is not a part of it: Taskline runs without a registry. Its content ends
with it, and it ends with the process that started it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from taskline.infra.local.artifacts import Bundle
from taskline.infra.local.config import START_TIMEOUT_S
from taskline.infra.local.errors import NotRunning, ServerDied
from taskline.infra.local.java import APICURIO_JAVA, JavaRequirement
from taskline.infra.local.launcher import Launched, launch, lost_a_port, wait_ready
from taskline.infra.local.ports import LOOPBACK, accepts_connections, assign
from taskline.infra.local.process import end
from taskline.infra.local.service import CLIENT_PORT, Runtime, Site, runtime_for
from taskline.infra.local.templates import maven_property, shipped
from taskline.infra.local.watch import start_reaper

_API = "/apis/ccompat/v7"

# Free ports are chosen outside the kernel's own range: to lose one is rare.
_PORT_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class RegistryConfig:
    """The schema registry of a test."""

    # HTTP port on 127.0.0.1; None = any free one.
    port: int | None = None
    # Java heap in MB.
    heap_mb: int = 256
    # How long it may take until it answers, in seconds; the download does not count.
    start_timeout_s: float = START_TIMEOUT_S


@dataclass(frozen=True)
class RegistryServer:
    """Runs Apicurio Registry in memory."""

    config: RegistryConfig

    java: JavaRequirement = APICURIO_JAVA
    port_purposes: tuple[str, ...] = (CLIENT_PORT, "management")

    @cached_property
    def bundle(self) -> Bundle:
        """Its archive, unpacked."""
        pom = shipped("registry-pom.xml")
        version = maven_property(pom, "apicurio.version")
        return Bundle(
            title=f"Apicurio Registry {version}",
            slug=f"apicurio-{version}",
            pom=pom,
            megabytes=160,
            landmark="quarkus-run.jar",
            goal="unpack-dependencies",
        )

    @property
    def version(self) -> str:
        """Apicurio's release."""
        return maven_property(self.bundle.pom, "apicurio.version")

    @property
    def wanted_port(self) -> int | None:
        """The HTTP port that was asked for."""
        return self.config.port

    def prepare(self, site: Site, runtime: Runtime) -> list[str]:
        """Give the command line; there is nothing to prepare."""
        options = (
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",  # it lives for minutes: a quick start is worth more than fast code
            f"-Dquarkus.http.host={LOOPBACK}",
            f"-Dquarkus.http.port={site.ports[CLIENT_PORT]}",
            f"-Dquarkus.management.host={LOOPBACK}",
            f"-Dquarkus.management.port={site.ports['management']}",
            "-Dquarkus.log.file.enable=true",
            f"-Dquarkus.log.file.path={site.log}",
            "-Dapicurio.storage.kind=sql",
            f"-Dapicurio.datasource.url=jdbc:h2:mem:{site.stack_id}",
        )
        return runtime.command(
            site,
            heap_mb=self.config.heap_mb,
            options=options,
            program=("-jar", str(runtime.jars / "quarkus-run.jar")),
        )

    def probe(self, site: Site, *, timeout_s: float) -> str | None:
        """List the subjects."""
        port = site.ports[CLIENT_PORT]
        if not accepts_connections(port):
            return f"nothing listens on port {port}"
        try:
            with urllib.request.urlopen(f"{_url(port)}/subjects", timeout=timeout_s) as response:  # noqa: S310 - http
                json.load(response)
        except (OSError, ValueError) as error:
            return f"no answer: {error}"
        return None


class SchemaRegistry:
    """A schema registry on this machine.

    Example:
        with SchemaRegistry().running() as registry:
            client = SchemaRegistryClient({"url": registry.url})
    """

    def __init__(self, config: RegistryConfig | None = None) -> None:
        """Describe a registry; nothing is started yet."""
        self.config = RegistryConfig() if config is None else config
        self._server = RegistryServer(self.config)
        self._launched: Launched | None = None

    @property
    def url(self) -> str:
        """The base URL of its Confluent-compatible API.

        Raises:
            NotRunning: It is not running.
        """
        if self._launched is None:
            raise NotRunning("the schema registry is not running")
        return _url(self._launched.site.ports[CLIENT_PORT])

    @contextmanager
    def running(self) -> Iterator[SchemaRegistry]:
        """Start it, wait until it answers, and end it at last.

        Raises:
            NotAvailable: There is no Java 21 or newer, no Maven, or no network for the first download.
            PortInUse: The port asked for is taken.
            ServerDied: It ended by itself.
            NotReady: It did not answer in time.
        """
        runtime = runtime_for(self._server)
        stack_id, folder = (
            uuid.uuid4().hex[:12],
            Path(tempfile.mkdtemp(prefix="taskline-registry-")).resolve(),
        )
        reaper = start_reaper(stack_id, folder)
        try:
            self._launched = self._start(stack_id, folder, runtime)
            yield self
        finally:
            if self._launched is not None:
                end(self._launched.process, grace_s=0.0)
                self._launched = None
            end(reaper, grace_s=0.0)
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self, stack_id: str, folder: Path, runtime: Runtime) -> Launched:
        fixed = {} if self.config.port is None else {CLIENT_PORT: self.config.port}
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            ports = assign(self._server.port_purposes, fixed=fixed, earlier={}, exclude=frozenset())
            site = Site(stack_id=stack_id, service="registry", folder=folder, ports=ports)
            launched = launch(self._server, site, runtime)
            try:
                wait_ready([launched], timeout_s=self.config.start_timeout_s)
            except BaseException as error:
                end(launched.process, grace_s=0.0)
                if isinstance(error, ServerDied) and lost_a_port(error) and attempt < _PORT_ATTEMPTS:
                    continue
                raise
            return launched
        raise AssertionError("the last attempt returns or raises")


def _url(port: int) -> str:
    return f"http://{LOOPBACK}:{port}{_API}"
