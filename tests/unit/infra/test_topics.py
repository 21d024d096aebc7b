from __future__ import annotations

from dataclasses import replace

import pytest

from taskline.errors import InvalidSettings, WrongTopology
from taskline.infra.kafka.admin import check_topology, create_topics
from taskline.infra.kafka.drift import ObservedTopic, drifted, problems_of
from taskline.infra.topics import Topics, TopicSpec, topology
from taskline.schemas.events import Priority
from taskline.settings import Settings

SPECS = {spec.name: spec for spec in topology(Settings())}


def as_declared(spec: TopicSpec) -> ObservedTopic:
    return ObservedTopic(
        name=spec.name,
        partitions=spec.partitions,
        replication_factor=spec.replication_factor,
        config=dict(spec.config) | {"flush.ms": "9223372036854775807"},
    )


def with_config(seen: ObservedTopic, **changes: str | None) -> ObservedTopic:
    changed = {name.replace("_", "."): value for name, value in changes.items()}
    return replace(seen, config={**seen.config, **changed})


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_a_topic_as_declared_has_no_problem(spec: TopicSpec) -> None:
    assert problems_of(spec, as_declared(spec)) == ()


def test_a_missing_topic_is_mended_by_create() -> None:
    (problem,) = problems_of(SPECS["tasks.high"], None)
    assert problem.mendable
    assert str(problem) == "topic tasks.high: does not exist"


def test_dispatch_partitions_may_only_grow() -> None:
    spec = SPECS["tasks.high"]
    (problem,) = problems_of(spec, replace(as_declared(spec), partitions=3))
    assert problem.mendable
    assert "has 3 partitions where 6 are declared" in problem.what
    assert problems_of(spec, replace(as_declared(spec), partitions=12)) == ()


@pytest.mark.parametrize("partitions", [3, 12])
def test_lanes_are_fixed_both_ways(partitions: int) -> None:
    spec = SPECS["tasks.lifecycle"]
    (problem,) = problems_of(spec, replace(as_declared(spec), partitions=partitions))
    assert not problem.mendable
    assert "fixed at creation" in problem.what


def test_too_few_copies_and_no_leader_are_not_mendable() -> None:
    spec = replace(SPECS["tasks.dlq"], replication_factor=3)
    seen = replace(as_declared(spec), replication_factor=1, leaderless=(0, 2))
    problems = problems_of(spec, seen)
    assert [problem.mendable for problem in problems] == [False, False]
    assert "partitions 0, 2 have no leader" in problems[1].what


@pytest.mark.parametrize(
    ("changes", "is_drift"),
    [
        ({"retention_ms": "1000"}, True),
        ({"retention_ms": "-1"}, False),
        ({"retention_ms": "9999999999999"}, False),
        ({"retention_bytes": "1000000"}, True),
        ({"max_message_bytes": "16384"}, True),
        ({"max_message_bytes": "99999999"}, False),
        ({"cleanup_policy": "compact"}, True),
        ({"message_timestamp_type": "CreateTime"}, True),
        ({"compression_type": "gzip"}, False),
        ({"segment_ms": "1000"}, False),
        ({"min_insync_replicas": None}, True),
    ],
)
def test_drift_is_what_weakens_a_guarantee(changes: dict[str, str | None], is_drift: bool) -> None:
    spec = SPECS["tasks.normal"]
    seen = with_config(as_declared(spec), **changes)
    assert bool(drifted(spec, seen)) is is_drift
    for problem in problems_of(spec, seen):
        assert problem.mendable


def test_an_unlimited_retention_must_stay_unlimited() -> None:
    spec = SPECS["tasks.types"]
    assert drifted(spec, with_config(as_declared(spec), retention_ms="99999999999999")) == {
        "retention.ms": "-1"
    }


def test_unclean_leader_election_names_the_values() -> None:
    spec = SPECS["tasks.low"]
    seen = replace(as_declared(spec), config={**spec.config, "unclean.leader.election.enable": "true"})
    (problem,) = problems_of(spec, seen)
    assert problem.what == "unclean.leader.election.enable is true where false is declared"


@pytest.mark.parametrize(
    "sections",
    [
        {"topics": {"retention_days": 7}},
        {"topics": {"min_insync_replicas": 2}},
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused_before_any_server_is_asked(
    sections: dict[str, dict[str, object]],
) -> None:
    settings = Settings.model_validate({"kafka": {"bootstrap_servers": "127.0.0.1:1"}, **sections})
    with pytest.raises(InvalidSettings, match="topics"):
        create_topics(settings)
    with pytest.raises(InvalidSettings, match="topics"):
        check_topology(settings)


def test_an_undeclared_queue_is_refused_before_any_server_is_asked() -> None:
    settings = Settings.model_validate({"kafka": {"bootstrap_servers": "127.0.0.1:1"}})
    with pytest.raises(WrongTopology, match="queue 'gpu' is not among the declared ones"):
        check_topology(settings, queues=["gpu"])


def test_names_of_the_default_queue_are_short() -> None:
    names = Topics(namespace="n.")
    assert names.dispatch("default", Priority.HIGH) == "n.tasks.high"
    assert names.dispatch("gpu", Priority.LOW) == "n.tasks.gpu.low"


def test_each_queue_has_a_topic_of_lease_guards() -> None:
    queues = ("default", "gpu")
    specs = {spec.name for spec in topology(Settings.model_validate({"topics": {"queues": queues}}))}
    assert {Topics().leases(queue) for queue in queues} == {
        name for name in specs if name.startswith("tasks.leases.")
    }
