"""The topology on a real broker: fresh, repeated, grown, drifted, wrong; and where groups begin."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from taskline.errors import Unavailable, WrongTopology
from taskline.infra.kafka.admin import check_topology, create_topics, describe_topics
from taskline.infra.kafka.cli import topics
from taskline.infra.kafka.offsets import GroupTopic, committed
from taskline.infra.kafka.requests import TopicRequests, admin_client
from taskline.infra.topics import Topics, topology
from taskline.schemas.events import Priority
from taskline.settings import Settings

pytestmark = pytest.mark.servers

SECONDS = 30.0


def changed(settings: Settings, section: str, **values: object) -> Settings:
    part = getattr(settings, section)
    return settings.model_copy(update={section: part.model_copy(update=values)})


def names(settings: Settings) -> Topics:
    return Topics(namespace=settings.kafka.namespace)


def offsets(settings: Settings) -> dict[str, dict[int, int]]:
    declared = names(settings)
    readers = [
        GroupTopic(declared.worker_group("default", priority), declared.dispatch("default", priority))
        for priority in Priority
    ]
    with admin_client(settings.kafka) as admin:
        seen = TopicRequests(admin, SECONDS).observe(topology(settings))
        partitions = {each.name: each.partitions for each in seen.values() if each}
        found = committed(settings.kafka, readers, partitions, SECONDS)
        return {reader.group: places for reader, places in found.items()}


def produce(settings: Settings, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": settings.kafka.bootstrap_servers})
    for number in range(count):
        producer.produce(topic, str(number).encode(), partition=number % 3)
    assert producer.flush(SECONDS) == 0


def recreate_without_groups(settings: Settings, count: int) -> None:
    """Topics with records and no group that knows them, as after an import."""
    specs = topology(settings)
    with admin_client(settings.kafka) as admin:
        requests = TopicRequests(admin, SECONDS)
        requests.create(specs)
        requests.await_topics(specs, settled=lambda spec, seen: True)
    if count:
        produce(settings, names(settings).dispatch("default", Priority.HIGH), count)


def alter(settings: Settings, topic: str, values: Mapping[str, str]) -> None:
    admin = AdminClient({"bootstrap.servers": settings.kafka.bootstrap_servers})
    resource = ConfigResource(
        ResourceType.TOPIC,
        topic,
        incremental_configs=[
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in values.items()
        ],
    )
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(SECONDS)


def await_problem(settings: Settings, text: str) -> WrongTopology:
    """A change reaches the broker's metadata a moment after it is acknowledged."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            check_topology(settings, queues=["default"])
        except WrongTopology as error:
            if text in str(error):
                return error
        assert time.monotonic() < deadline, f"never heard of {text!r}"


def test_a_fresh_cluster_is_refused_and_then_made(settings: Settings) -> None:
    with pytest.raises(WrongTopology, match="does not exist") as caught:
        check_topology(settings)
    assert caught.value.command == "taskline topics create"
    assert len(caught.value.problems) == len(topology(settings))

    report = create_topics(settings)

    assert set(report.created) == {spec.name for spec in topology(settings)}
    # One per priority, the gateways' of the leases, and the delay role's.
    assert len(report.seeded) == 5
    check_topology(settings)
    check_topology(settings, queues=["default"])
    assert all(each.problems == () for each in describe_topics(settings))
    assert all(found == {0: 0, 1: 0, 2: 0} for found in offsets(settings).values())


def test_creating_again_changes_nothing(topics_created: Settings) -> None:
    report = create_topics(topics_created)
    assert (report.created, report.grown, report.altered, report.seeded) == ((), {}, {}, ())


def test_dispatch_topics_grow_and_keep_their_offsets(topics_created: Settings) -> None:
    grown = changed(topics_created, "topics", dispatch_partitions=5, dlq_partitions=2)
    error = await_problem(grown, "has 3 partitions where 5 are declared")
    assert error.command == "taskline topics create"

    report = create_topics(grown)

    assert report.created == ()
    declared = names(grown)
    assert report.grown == {declared.dlq: (1, 2), declared.leases("default"): (3, 5)} | {
        declared.dispatch("default", priority): (3, 5) for priority in Priority
    }
    assert report.seeded == ()
    check_topology(grown, queues=["default"])
    # New partitions have no offset; a consumer begins them at 0, as their siblings have one.
    assert all(found == {0: 0, 1: 0, 2: 0} for found in offsets(grown).values())
    # Fewer than there are is no problem: other processes may know of more.
    check_topology(topics_created, queues=["default"])


def test_lanes_never_change(topics_created: Settings) -> None:
    other = changed(topics_created, "topics", lanes=4)
    for act in (check_topology, create_topics):
        with pytest.raises(WrongTopology, match="fixed at creation") as caught:
            act(other)
        assert caught.value.command == "taskline topics describe"
    check_topology(topics_created)


def test_drift_is_named_and_mended(topics_created: Settings) -> None:
    topic = names(topics_created).dispatch("default", Priority.LOW)
    alter(topics_created, topic, {"retention.ms": "60000", "compression.type": "gzip"})
    error = await_problem(topics_created, "retention.ms is 60000 where 2592000000 is declared")
    assert len(error.problems) == 1

    report = create_topics(topics_created)

    assert report.altered == {topic: {"retention.ms": "2592000000"}}
    check_topology(topics_created)


def test_a_new_queue_is_added_beside_the_others(topics_created: Settings) -> None:
    more = changed(topics_created, "topics", queues=("default", "gpu"))
    report = create_topics(more)
    declared = names(more)
    dispatch = {declared.dispatch("gpu", priority) for priority in Priority}
    assert set(report.created) == dispatch | {declared.cancels("gpu"), declared.leases("gpu")}
    # The notices are read without a group.
    assert len(report.seeded) == len(dispatch) + 1
    check_topology(more, queues=["gpu"])
    # The old declaration does not know it, and has no need to.
    check_topology(topics_created, queues=["default"])
    with pytest.raises(WrongTopology, match="'gpu' is not among"):
        check_topology(topics_created, queues=["gpu"])


def test_a_role_needs_only_its_own_queue(topics_created: Settings) -> None:
    more = changed(topics_created, "topics", queues=("default", "gpu"))
    check_topology(more, queues=["default"])
    with pytest.raises(WrongTopology, match="gpu"):
        check_topology(more)


def test_groups_without_offsets_on_empty_topics_begin_by_themselves(settings: Settings) -> None:
    recreate_without_groups(settings, 0)
    with pytest.raises(WrongTopology, match="has no offsets") as caught:
        check_topology(settings, queues=["default"])
    assert caught.value.command == "taskline topics create --seed earliest|latest"
    assert len(create_topics(settings).seeded) == 5
    check_topology(settings, queues=["default"])


@pytest.mark.parametrize(("seed", "expected"), [("earliest", 0), ("latest", 10)])
def test_groups_without_offsets_on_topics_with_records_need_a_choice(
    settings: Settings, seed: Any, expected: int
) -> None:
    recreate_without_groups(settings, 30)
    with pytest.raises(WrongTopology, match="say where it begins") as caught:
        create_topics(settings)
    assert caught.value.command == "taskline topics create --seed earliest|latest"
    assert offsets(settings) == {group: {} for group in offsets(settings)}, "a refusal changes nothing"

    create_topics(settings, seed=seed)

    group = names(settings).worker_group("default", Priority.HIGH)
    assert offsets(settings)[group] == {0: expected, 1: expected, 2: expected}
    check_topology(settings, queues=["default"])


def test_committed_offsets_are_left_alone(topics_created: Settings) -> None:
    produce(topics_created, names(topics_created).dispatch("default", Priority.HIGH), 9)
    create_topics(topics_created, seed="latest")
    assert all(found == {0: 0, 1: 0, 2: 0} for found in offsets(topics_created).values())


def test_a_broker_that_does_not_answer() -> None:
    settings = Settings.model_validate({"kafka": {"bootstrap_servers": "127.0.0.1:1"}})
    for act in (check_topology, create_topics, describe_topics):
        began = time.monotonic()
        with pytest.raises(Unavailable, match="did not answer"):
            act(settings, timeout_seconds=1.0)
        assert time.monotonic() - began < SECONDS


def test_the_command(settings: Settings) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(topics, arguments, obj=settings)

    missing = run("describe")
    assert missing.exit_code == 0
    assert missing.stdout.count("missing") == len(topology(settings))
    refused = run("check")
    assert isinstance(refused.exception, WrongTopology)
    created = run("create")
    assert created.exit_code == 0
    assert created.stdout.count("created ") == len(topology(settings))
    assert run("create").stdout.strip() == "everything is in place"
    assert json.loads(run("create", "--json").stdout)["created"] == []
    assert json.loads(run("check", "--json").stdout) == {"problems": []}
    described = json.loads(run("describe", "--json").stdout)
    assert all(each["problems"] == [] for each in described)
    assert {each["observed"]["partitions"] for each in described} == {1, 3}
