"""How topics differ from their declaration: a pure comparison, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from taskline.infra.topics import TopicSpec

_UNLIMITED = -1
# Topic settings for which more than declared is as good; -1 is "without limit".
_AT_LEAST = frozenset({"max.message.bytes", "min.insync.replicas", "retention.bytes", "retention.ms"})
_UNLIMITED_AT_MINUS_ONE = frozenset({"retention.bytes", "retention.ms"})
# Set at creation, but no guarantee rests on them: operators may tune them.
TUNABLE = frozenset({"compression.type", "segment.ms"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedTopic:
    """A topic as the broker has it."""

    name: str
    partitions: int
    # The copies of the partition that has fewest.
    replication_factor: int
    # Partitions that nobody leads: neither written nor read for now.
    leaderless: tuple[int, ...] = ()
    config: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One difference that matters."""

    topic: str
    what: str
    # True: `taskline topics create` puts it right.
    mendable: bool

    def __str__(self) -> str:
        return f"topic {self.topic}: {self.what}"


def problems_of(spec: TopicSpec, observed: ObservedTopic | None) -> tuple[Problem, ...]:
    """What is wrong with a topic (nothing: an empty tuple)."""

    def problem(what: str, *, mendable: bool) -> Problem:
        return Problem(topic=spec.name, what=what, mendable=mendable)

    if observed is None:
        return (problem("does not exist", mendable=True),)
    found: list[Problem] = []
    if spec.fixed_partitions and observed.partitions != spec.partitions:
        found.append(
            problem(
                f"has {observed.partitions} partitions where {spec.partitions} are declared, and their number "
                "is fixed at creation (set it as it is, or begin a new namespace)",
                mendable=False,
            )
        )
    elif observed.partitions < spec.partitions:
        found.append(
            problem(
                f"has {observed.partitions} partitions where {spec.partitions} are declared", mendable=True
            )
        )
    if observed.replication_factor < spec.replication_factor:
        found.append(
            problem(
                f"has {observed.replication_factor} copies of a partition where {spec.replication_factor} are "
                "declared (reassign its partitions with Kafka's own tools)",
                mendable=False,
            )
        )
    if observed.leaderless:
        found.append(
            problem(
                f"partitions {', '.join(map(str, observed.leaderless))} have no leader (is a broker down?)",
                mendable=False,
            )
        )
    found += [
        problem(f"{name} is {observed.config.get(name)} where {value} is declared", mendable=True)
        for name, value in drifted(spec, observed).items()
    ]
    return tuple(found)


def drifted(spec: TopicSpec, observed: ObservedTopic) -> dict[str, str]:
    """The declared values of the topic settings that the broker has otherwise."""
    return {
        name: value
        for name, value in spec.config.items()
        if name not in TUNABLE and not _satisfied(name, value, observed.config.get(name))
    }


def _satisfied(name: str, declared: str, actual: str | None) -> bool:
    if actual == declared:
        return True
    if actual is None or name not in _AT_LEAST:
        return False
    if name in _UNLIMITED_AT_MINUS_ONE and _UNLIMITED in (int(declared), int(actual)):
        return int(actual) == _UNLIMITED
    return int(actual) >= int(declared)
