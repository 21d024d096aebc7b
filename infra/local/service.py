"""What a stack needs to know about a server: how it is prepared, started and asked whether it is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from taskline.infra.local.artifacts import Bundle, ensure_bundle
from taskline.infra.local.config import ServiceName
from taskline.infra.local.java import Java, JavaRequirement, find_java

# The purpose of the port that clients use; every server has one.
CLIENT_PORT = "client"


def stack_mark(stack_id: str) -> str:
    """How the markers of all of a stack's processes begin; Java takes them for a system property."""
    return f"-Dtaskline.stack={stack_id}."


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a server lives: its folder and its ports."""

    # The stack's random name.
    stack_id: str
    # The server's name.
    service: str
    # The server's own folder; absolute.
    folder: Path
    # Its ports by purpose.
    ports: Mapping[str, int]

    @property
    def marker(self) -> str:
        """The argument by which the server's process is known again."""
        return stack_mark(self.stack_id) + self.service

    @property
    def data(self) -> Path:
        """Where the server keeps its data."""
        return self.folder / "data"

    @property
    def log(self) -> Path:
        """The server's own log, rotated by it."""
        return self.folder / "logs" / "server.log"

    @property
    def output(self) -> Path:
        """What the JVM printed: early errors, crash notices."""
        return self.folder / "logs" / "output.log"

    @property
    def scratch(self) -> Path:
        """For native libraries that the JVM unpacks; else they pile up in the system's folder."""
        return self.folder / "tmp"


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What a server runs on."""

    java: Java
    # The folder of its jars.
    jars: Path

    def command(
        self, site: Site, *, heap_mb: int, options: tuple[str, ...], program: tuple[str, ...]
    ) -> list[str]:
        """A command line: what all servers share, then the options, then the program (main class, arguments)."""
        return [
            str(self.java.executable),
            site.marker,
            f"-Xmx{heap_mb}m",
            "-XX:+ExitOnOutOfMemoryError",
            "-XX:-UsePerfData",  # no files in the system's temporary folder, a faster start
            "-Djava.awt.headless=true",
            "-Djava.net.preferIPv4Stack=true",
            "-Dfile.encoding=UTF-8",
            f"-Djava.io.tmpdir={site.scratch}",
            f"-XX:ErrorFile={site.folder / 'logs' / 'crash-%p.log'}",
            f"-Dtaskline.log.file={site.log}",
            *options,
            *program,
        ]


class Server(Protocol):
    """A server that can be run."""

    @property
    def java(self) -> JavaRequirement:
        """The Java it runs on."""

    @property
    def bundle(self) -> Bundle:
        """Its jars."""

    @property
    def version(self) -> str:
        """Its release."""

    @property
    def wanted_port(self) -> int | None:
        """The client port that was asked for by number, if any."""

    @property
    def port_purposes(self) -> tuple[str, ...]:
        """What it needs ports for; `client` is one of them."""

    def prepare(self, site: Site, runtime: Runtime) -> list[str]:
        """Write its configuration, format its storage if that is new, and give the command that starts it."""

    def probe(self, site: Site, *, timeout_s: float) -> str | None:
        """Ask it by its own protocol; None if it answered and is this stack's, else what is missing."""


class StackServer(Server, Protocol):
    """A server that belongs to a stack."""

    @property
    def name(self) -> ServiceName:
        """Its name within the stack."""


def runtime_for(server: Server) -> Runtime:
    """Find the Java and the jars of a server; jars are fetched if need be.

    Raises:
        NotAvailable: This machine cannot run it; the message says what is missing.
    """
    java = find_java(server.java)
    return Runtime(java=java, jars=ensure_bundle(server.bundle, java_home=java.home))
