"""Whether the process can do its work: what it needs, and whether it is on its way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog

from taskline.api.metrics import ApiMetrics

log = structlog.get_logger(__name__)

KAFKA = "kafka"
VIEW = "view"
# What `/readyz?for=…` asks about: a process without Cassandra still accepts tasks.
PURPOSES: Mapping[str, frozenset[str]] = {"submit": frozenset({KAFKA}), "read": frozenset({VIEW})}


@dataclass(frozen=True, kw_only=True, slots=True)
class DependencyCheck:
    """What was last seen of one dependency."""

    up: bool
    # What is wrong, in words for the operator; None: nothing.
    detail: str | None = None


class Health:
    """The state of every dependency. Whoever watches one reports here; changes are logged."""

    def __init__(
        self, dependencies: Iterable[str] = (KAFKA, VIEW), *, metrics: ApiMetrics | None = None
    ) -> None:
        """Begin with every dependency unknown, which counts as down."""
        self._stopping = False
        self._on_stop: list[Callable[[], None]] = []
        self._metrics = metrics
        self._checks: dict[str, DependencyCheck] = {}
        for name in dependencies:
            self._checks[name] = DependencyCheck(up=False, detail="not reached yet")
            self._count(name)

    @property
    def stopping(self) -> bool:
        """Whether the process is on its way out."""
        return self._stopping

    def stop(self) -> None:
        """The process is on its way out."""
        self._stopping = True
        for told in self._on_stop:
            told()

    def on_stop(self, told: Callable[[], None]) -> None:
        """Call this when the process is on its way out."""
        self._on_stop.append(told)

    def checks(self, purpose: str | None = None) -> dict[str, DependencyCheck]:
        """The dependencies that a purpose of `PURPOSES` needs; None: all."""
        wanted = self._checks if purpose is None else PURPOSES[purpose]
        return {name: check for name, check in self._checks.items() if name in wanted}

    def report(self, name: str, *, up: bool, detail: str | None = None) -> None:
        """Say what was seen of a dependency."""
        before, now = self._checks[name], DependencyCheck(up=up, detail=detail)
        if before == now:
            return
        self._checks[name] = now
        self._count(name)
        if up:
            log.info("dependency up", dependency=name)
        else:
            log.warning("dependency down", dependency=name, detail=detail)

    def _count(self, name: str) -> None:
        if self._metrics is not None:
            self._metrics.dependency_up.labels(name).set(self._checks[name].up)
