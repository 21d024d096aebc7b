"""The state file: what a stack's servers are and where, for other processes and for the next start.

It is written beside its place and renamed into it, so a reader sees the old one or the new one and never a part.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from taskline.infra.local.config import SERVICES, ServiceName
from taskline.infra.local.errors import UnreadableState
from taskline.infra.local.process import ProcessIdentity

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ServiceState:
    """One server as it was last started."""

    # The server's release.
    version: str
    # host:port for clients.
    address: str
    # All its ports by purpose.
    ports: Mapping[str, int]
    # Its process; None once it was stopped.
    process: ProcessIdentity | None


@dataclass(frozen=True, kw_only=True)
class StackState:
    """A stack as it was last seen."""

    # Random; part of the processes' markers and of Cassandra's cluster name.
    stack_id: str
    # The servers that were ever started in this folder.
    services: Mapping[ServiceName, ServiceState] = field(default_factory=dict)

    def with_service(self, name: ServiceName, service: ServiceState) -> StackState:
        """The state with one server's entry replaced."""
        return replace(self, services={**self.services, name: service})

    def without_process(self, name: ServiceName) -> StackState:
        """The state with one server marked as stopped; its ports stay known."""
        if name not in self.services:
            return self
        return self.with_service(name, replace(self.services[name], process=None))

    def to_json(self) -> dict[str, Any]:
        """The plain values that are stored."""
        return {
            "format": _FORMAT,
            "stack_id": self.stack_id,
            "services": {
                name: {
                    "version": service.version,
                    "address": service.address,
                    "ports": dict(service.ports),
                    "process": None
                    if service.process is None
                    else {
                        "pid": service.process.pid,
                        "started_at": service.process.started_at,
                        "marker": service.process.marker,
                    },
                }
                for name, service in self.services.items()
            },
        }


def write_state(path: Path, state: StackState) -> None:
    """Write the state file atomically.

    Raises:
        OSError: The folder cannot be written to.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as sink:
            json.dump(state.to_json(), sink, indent=2)
            sink.write("\n")
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_state(path: Path) -> StackState | None:
    """Read the state file; None if there is none.

    Raises:
        UnreadableState: It is not a state file of this format.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return _parse(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableState(
            f"{path} is not a state file of format {_FORMAT} ({error!r}); if no server of it runs, remove it",
            path=path,
        ) from error


def _parse(raw: Mapping[str, Any]) -> StackState:
    if raw["format"] != _FORMAT:
        raise ValueError(f"format {raw['format']!r}")
    services: dict[ServiceName, ServiceState] = {}
    for name, entry in raw["services"].items():
        if name not in SERVICES:
            raise ValueError(f"unknown server {name!r}")
        services[cast("ServiceName", name)] = ServiceState(
            version=str(entry["version"]),
            address=str(entry["address"]),
            ports={str(purpose): int(port) for purpose, port in entry["ports"].items()},
            process=None if entry["process"] is None else _parse_process(entry["process"]),
        )
    return StackState(stack_id=str(raw["stack_id"]), services=services)


def _parse_process(raw: Mapping[str, Any]) -> ProcessIdentity:
    return ProcessIdentity(
        pid=int(raw["pid"]), started_at=float(raw["started_at"]), marker=str(raw["marker"])
    )
