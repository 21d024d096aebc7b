"""What can be seen of a stack from outside."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from taskline.infra.local.config import ServiceName
from taskline.infra.local.crew import Crew
from taskline.infra.local.process import find
from taskline.infra.local.service import Site, StackServer
from taskline.infra.local.state import ServiceState

# running = answers by its protocol; silent = the process lives but does not answer; paused = frozen; stopped = no process.
Condition = Literal["running", "silent", "paused", "stopped"]

# A healthy server answers in milliseconds.
_PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class ServiceStatus:
    """One server."""

    name: ServiceName
    condition: Condition
    # Its release.
    version: str
    # host:port for clients; where it was, if it is stopped.
    address: str
    pid: int | None = None
    # Memory that it holds, in MB.
    resident_mb: int | None = None
    # How long its process has lived, in seconds.
    uptime_s: int | None = None


@dataclass(frozen=True, kw_only=True)
class StackStatus:
    """A stack."""

    # Its folder; None for an ephemeral one that is not running.
    directory: Path | None
    # Its servers, as far as they were ever started.
    services: tuple[ServiceStatus, ...]

    @property
    def running(self) -> bool:
        """Whether there are servers and all of them answer."""
        return bool(self.services) and all(service.condition == "running" for service in self.services)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `taskline local status --json` prints them."""
        return {
            "directory": None if self.directory is None else str(self.directory),
            "running": self.running,
            "services": [asdict(service) for service in self.services],
        }


def stack_status(crew: Crew) -> StackStatus:
    """Look at the processes of a stack and ask those servers that run.

    Raises:
        UnreadableState: The state file is damaged.
    """
    state = crew.load()
    services = () if state is None else state.services.items()
    return StackStatus(
        directory=crew.directory,
        services=tuple(
            _status(crew.servers[name], crew.site(state, name, service.ports), service)
            for name, service in services
            if state is not None
        ),
    )


def _status(server: StackServer, site: Site, service: ServiceState) -> ServiceStatus:
    process = None if service.process is None else find(service.process)
    if process is not None:
        try:
            return ServiceStatus(
                name=server.name,
                condition=_condition(process, server, site),
                version=service.version,
                address=service.address,
                pid=process.pid,
                resident_mb=process.memory_info().rss // 2**20,
                uptime_s=int(time.time() - process.create_time()),
            )
        except psutil.NoSuchProcess:  # ended meanwhile
            pass
    return ServiceStatus(
        name=server.name, condition="stopped", version=service.version, address=service.address
    )


def _condition(process: psutil.Process, server: StackServer, site: Site) -> Condition:
    if process.status() == psutil.STATUS_STOPPED:
        return "paused"
    return "running" if server.probe(site, timeout_s=_PROBE_TIMEOUT_S) is None else "silent"
