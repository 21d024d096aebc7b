"""The topology on a real cluster: create it, check it, describe it.

Invariant: a role that starts after `check_topology` finds every topic with the declared guarantees, and every worker
group with a place to begin, so that `auto.offset.reset=error` never has to guess. Nothing here deletes a
topic, shrinks one, or changes the number of lanes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from taskline.errors import InvalidSettings, WrongTopology
from taskline.infra.kafka.drift import ObservedTopic, Problem, drifted, problems_of
from taskline.infra.kafka.offsets import GroupTopic, Seed, committed, seed_offsets
from taskline.infra.kafka.requests import (
    CHECK_TIMEOUT_SECONDS,
    CREATE_TIMEOUT_SECONDS,
    TopicRequests,
    admin_client,
)
from taskline.infra.topics import Topics, TopicSpec, topology, waiting_topics
from taskline.schemas.events import Priority
from taskline.settings import Settings

CREATE_COMMAND = "taskline topics create"
SEED_COMMAND = "taskline topics create --seed earliest|latest"
DESCRIBE_COMMAND = "taskline topics describe"


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateReport:
    """What `create_topics` changed; all empty: everything was in place."""

    created: tuple[str, ...] = ()
    # topic → (partitions before, after)
    grown: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # topic → topic setting → new value
    altered: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # Groups that were given a place to begin.
    seeded: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicDescription:
    """One declared topic beside what the broker has (None: it does not exist)."""

    spec: TopicSpec
    observed: ObservedTopic | None
    problems: tuple[Problem, ...]


def create_topics(
    settings: Settings, *, seed: Seed | None = None, timeout_seconds: float = CREATE_TIMEOUT_SECONDS
) -> CreateReport:
    """Make the declared topology: idempotent, and safe to run beside working roles.

    Missing topics are created, dispatch and dead-letter topics grown, drifted topic settings set again, and worker
    groups of new (or empty) topics are seeded at their beginning. Returns when all topics have leaders.

    Args:
        settings: what to make, and where.
        seed: where worker groups begin that have no offsets although their topic has records.
        timeout_seconds: for each request, and for the new topics' leaders.

    Raises:
        InvalidSettings: the declaration contradicts itself; nothing was changed.
        WrongTopology: something is wrong that this command can't or may not change.
        Unavailable: the cluster does not answer.
    """
    _check_declaration(settings)
    specs = topology(settings)
    with admin_client(settings.kafka) as admin:
        requests = TopicRequests(admin, timeout_seconds)
        before = requests.observe(specs)
        created = requests.create([spec for spec in specs if before[spec.name] is None])
        present = requests.await_topics(specs, settled=lambda spec, seen: True)
        grown = requests.grow([spec for spec in specs if _may_grow(spec, present[spec.name])], present)
        altered = requests.alter({spec.name: drifted(spec, present[spec.name]) for spec in specs})
        if grown or altered:
            present = requests.await_topics(specs, settled=_mended)
        remaining = [problem for spec in specs for problem in problems_of(spec, present[spec.name])]
        if remaining:
            raise WrongTopology(map(str, remaining), DESCRIBE_COMMAND)
        readers = (*_worker_groups(settings, settings.topics.queues), *_delay_group(settings))
        partitions = {name: seen.partitions for name, seen in present.items()}
        found = committed(settings.kafka, readers, partitions, timeout_seconds)
        seeds: dict[GroupTopic, Seed | None] = {
            reader: "earliest" if reader.topic in created else seed for reader in readers if not found[reader]
        }
        refused = seed_offsets(admin, seeds, partitions, timeout_seconds)
        if refused:
            raise WrongTopology(
                [
                    f"group {reader.group} has no offsets, but {reader.topic} has records: say where it begins"
                    for reader in refused
                ],
                SEED_COMMAND,
            )
    return CreateReport(
        created=tuple(created),
        grown=grown,
        altered=altered,
        seeded=tuple(dict.fromkeys(reader.group for reader in seeds)),
    )


def check_topology(
    settings: Settings,
    *,
    queues: Collection[str] | None = None,
    delays: bool = False,
    timeout_seconds: float = CHECK_TIMEOUT_SECONDS,
) -> None:
    """Refuse a cluster on which a role could not keep its promises.

    Args:
        settings: what is declared, and where.
        queues: the queues whose topics *and* worker groups the role needs, besides the topics that have no
            queue; None: every declared topic and no group (what the projector and the API need).
        delays: whether the role forwards what waits, so that the delay group must have its places.
        timeout_seconds: for each request.

    Raises:
        InvalidSettings: the declaration contradicts itself.
        WrongTopology: each problem in words, and the command that mends it.
        Unavailable: the cluster does not answer.
    """
    _check_declaration(settings)
    undeclared = [] if queues is None else sorted(set(queues) - set(settings.topics.queues))
    if undeclared:
        raise WrongTopology(
            [f"queue {queue!r} is not among the declared ones (topics.queues)" for queue in undeclared],
            CREATE_COMMAND,
        )
    readers = _worker_groups(settings, queues or ()) + (_delay_group(settings) if delays else ())
    specs = topology(settings) if queues is None else _needed(settings, queues)
    with admin_client(settings.kafka) as admin:
        observed = TopicRequests(admin, timeout_seconds).observe(specs)
        problems = [problem for spec in specs for problem in problems_of(spec, observed[spec.name])]
        if problems:
            mendable = any(problem.mendable for problem in problems)
            raise WrongTopology(map(str, problems), CREATE_COMMAND if mendable else DESCRIBE_COMMAND)
        partitions = {seen.name: seen.partitions for seen in observed.values() if seen}
        found = committed(settings.kafka, readers, partitions, timeout_seconds)
    unseeded = [
        f"group {reader.group} has no offsets on {reader.topic}, so it has no place to begin"
        for reader in readers
        if not found[reader]
    ]
    if unseeded:
        raise WrongTopology(unseeded, SEED_COMMAND)


def describe_topics(
    settings: Settings, *, timeout_seconds: float = CHECK_TIMEOUT_SECONDS
) -> tuple[TopicDescription, ...]:
    """Every declared topic beside what the broker has.

    Raises:
        Unavailable: the cluster does not answer.
    """
    specs = topology(settings)
    with admin_client(settings.kafka) as admin:
        observed = TopicRequests(admin, timeout_seconds).observe(specs)
    return tuple(
        TopicDescription(
            spec=spec, observed=observed[spec.name], problems=problems_of(spec, observed[spec.name])
        )
        for spec in specs
    )


def _check_declaration(settings: Settings) -> None:
    topics = settings.topics
    if topics.retention_days < settings.producer.task_retention_days:
        raise InvalidSettings(
            f"topics.retention_days ({topics.retention_days:g}) is shorter than producer.task_retention_days "
            f"({settings.producer.task_retention_days:g}): the log would forget tasks that are still owed"
        )
    if topics.min_insync_replicas > topics.replication_factor:
        raise InvalidSettings(
            f"topics.min_insync_replicas ({topics.min_insync_replicas}) is over topics.replication_factor "
            f"({topics.replication_factor}): no record could ever be acknowledged"
        )


def _mended(spec: TopicSpec, observed: ObservedTopic) -> bool:
    return not any(problem.mendable for problem in problems_of(spec, observed))


def _may_grow(spec: TopicSpec, observed: ObservedTopic) -> bool:
    return not spec.fixed_partitions and observed.partitions < spec.partitions


def _needed(settings: Settings, queues: Collection[str]) -> list[TopicSpec]:
    """The declared topics without those of other queues."""
    names = Topics(namespace=settings.kafka.namespace)
    others = {
        topic
        for queue in settings.topics.queues
        if queue not in queues
        for topic in (
            names.cancels(queue),
            names.leases(queue),
            *(names.dispatch(queue, priority) for priority in Priority),
        )
    }
    return [spec for spec in topology(settings) if spec.name not in others]


def _worker_groups(settings: Settings, queues: Collection[str]) -> tuple[GroupTopic, ...]:
    names = Topics(namespace=settings.kafka.namespace)
    workers = (
        GroupTopic(names.worker_group(queue, priority), names.dispatch(queue, priority))
        for queue in queues
        for priority in Priority
    )
    return (*workers, *(GroupTopic(names.lease_group(queue), names.leases(queue)) for queue in queues))


def _delay_group(settings: Settings) -> tuple[GroupTopic, ...]:
    group = Topics(namespace=settings.kafka.namespace).delay_group
    return tuple(GroupTopic(group, topic) for topic in waiting_topics(settings))
