"""What is refused at the door, and what becomes of bytes that nobody should have produced."""

from __future__ import annotations

import uuid

import pytest
from systems import System

from taskline.errors import InvalidPayload, PayloadTooLarge, UnknownTaskType
from taskline.infra.log import HEADER_CAUSE
from taskline.schemas.events import Priority, TaskSubmitted
from taskline.schemas.ids import new_task_id
from taskline.state.status import TaskStatus


def rubbish() -> list[bytes | None]:
    """Bytes that are no record, unlike any other test's."""
    mark = uuid.uuid4().bytes
    return [
        mark,
        b"{" + mark.hex().encode() + b": 1}",
        # A frame with nothing behind it, one that nobody wrote, and the Confluent one without a registry.
        b"\xc3\x01" + mark[:4],
        b"\xc3\x01" + mark,
        b"\x00\x00\x00\x00\x07" + mark,
        b"",
        None,
    ]


def test_an_unknown_type_is_refused_with_the_nearest_name(system: System):
    with pytest.raises(UnknownTaskType, match=r"behave\.echo") as caught:
        system.submit("behave.ecko", 1)
    assert caught.value.nearest == "behave.echo"


@pytest.mark.parametrize(
    ("payload", "pointer"),
    [
        ({"name": 7}, "/name"),
        ({"name": "Ada", "times": "often"}, "/times"),
        ({"name": "Ada", "tmes": 2}, "/tmes"),
        ({}, "/name"),
        ("Ada", ""),
        (None, ""),
    ],
)
def test_a_payload_off_its_schema_is_refused_and_the_field_is_named(system: System, payload, pointer):
    before = _dispatched(system)
    with pytest.raises(InvalidPayload) as caught:
        system.submit("behave.greet", payload)
    assert caught.value.pointer == pointer
    assert _dispatched(system) == before


def test_what_is_no_json_is_refused(system: System):
    with pytest.raises(InvalidPayload):
        system.submit("behave.echo", {"when": object()})


def test_a_payload_over_the_limit_is_refused_and_one_at_the_limit_is_not(system: System):
    limit = system.settings.producer.max_payload_bytes
    before = _dispatched(system)
    with pytest.raises(PayloadTooLarge) as caught:
        system.submit("behave.echo", "x" * (limit - 1))
    assert (caught.value.size_bytes, caught.value.limit_bytes) == (limit + 1, limit)
    assert _dispatched(system) == before
    task = system.submit("behave.echo", "x" * (limit - 2))
    # It runs; what it returns is over the cap of results.
    state = system.wait_ended([task.task_id])[task.task_id]
    assert state.last_error.error_class.endswith("InvalidResult")


@pytest.mark.parametrize("priority", list(Priority))
def test_rubbish_on_a_dispatch_topic_becomes_dead_letters_verbatim_and_the_rest_goes_on(
    system: System, priority
):
    topic = system.topics.dispatch("default", priority)
    positions = {}
    for number, value in enumerate(rubbish()):
        key = None if number % 2 else b"key"
        partition = number % system.settings.topics.dispatch_partitions
        position = system.inject(topic, value, key=key, headers={"theirs": b"\xff"}, partition=partition)
        positions[str(position)] = (value, key)
    _expect_dead(system, positions)
    _expect_service(system)
    for source in positions:
        assert system.undecodable()[source].headers["theirs"] == b"\xff"


def test_rubbish_on_the_lifecycle_topic_becomes_dead_letters_verbatim_and_the_rest_goes_on(system: System):
    positions = {}
    for lane in range(system.settings.topics.lanes):
        for value in rubbish():
            # A frame of a schema that nobody knows halts its lane instead (see the projection's own tests).
            if value is None or not value.startswith(b"\xc3\x01") or len(value) < 10:
                position = system.inject(system.topics.lifecycle, value, partition=lane)
                positions[str(position)] = (value, None)
    _expect_dead(system, positions)
    _expect_service(system)


def test_rubbish_on_the_dead_letter_and_type_topics_disturbs_nobody(system: System):
    for topic in (system.topics.dlq, system.topics.types):
        for value in rubbish():
            system.inject(topic, value)
    _expect_service(system)
    task = system.submit("behave.fail", "after rubbish")
    state = system.wait_ended([task.task_id])[task.task_id]
    assert state.status is TaskStatus.DEAD
    assert task.task_id in [letter.task_id for letter in system.dead_letters()]


def test_a_submission_without_a_key_or_headers_runs(system: System):
    # As another producer of the same contract might write it.
    task_id = new_task_id(round(system.early.created_at.timestamp() * 1000))
    submission = TaskSubmitted(
        task_id=task_id,
        tenant="default",
        task_type="behave.echo",
        queue="default",
        priority=Priority.NORMAL,
        payload=b"[1]",
        retain_until=round(system.early.created_at.timestamp() * 1000) + 86_400_000,
        max_retries=3,
        root_id=task_id,
    )
    system.inject(system.topics.dispatch("default", Priority.NORMAL), system.codec.encode(submission))
    system.settle()
    assert system.status(task_id).status is TaskStatus.COMPLETED
    assert system.result(task_id) == [1]


def test_a_submission_whose_payload_is_broken_is_a_dead_letter(system: System):
    task_id = new_task_id(round(system.early.created_at.timestamp() * 1000))
    submission = TaskSubmitted(
        task_id=task_id,
        tenant="default",
        task_type="behave.greet",
        queue="default",
        priority=Priority.LOW,
        payload=b"\xff\xff\xff",
        payload_fingerprint=uuid.uuid4().bytes[:8],
        retain_until=round(system.early.created_at.timestamp() * 1000) + 86_400_000,
        max_retries=3,
        root_id=task_id,
    )
    system.inject(system.topics.dispatch("default", Priority.LOW), system.codec.encode(submission), key=b"k")
    system.settle()
    state = system.status(task_id)
    assert (state.status, state.reason) == (TaskStatus.DEAD, "payload_undecodable")
    assert task_id in [letter.task_id for letter in system.dead_letters()]


def _dispatched(system: System) -> int:
    return sum(len(system.records(topic)) for topic in system.dispatch_topics())


def _expect_dead(system: System, positions) -> None:
    system.wait_until(
        lambda: positions.keys() <= system.undecodable().keys(), "rubbish on the dead-letter topic"
    )
    dead = system.undecodable()
    for source, (value, key) in positions.items():
        assert (dead[source].value, dead[source].key) == (value, key)
        assert dead[source].headers[HEADER_CAUSE]


def _expect_service(system: System) -> None:
    """Every partition and lane is still served."""
    tasks = [
        system.submit("behave.echo", number, priority=priority)
        for priority in Priority
        for number in range(8)
    ]
    states = system.wait_ended(task.task_id for task in tasks)
    assert {state.status for state in states.values()} == {TaskStatus.COMPLETED}
