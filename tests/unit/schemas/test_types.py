"""Task types and the catalogue: what is accepted, what is refused, and that what is accepted stays readable."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskline.errors import (
    IncompatibleSchema,
    InvalidPayload,
    InvalidTaskType,
    UndecodablePayload,
    UnknownTaskType,
)
from taskline.schemas.catalogue import Outcome, TypeCatalogue
from taskline.schemas.events import Priority
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType


def schema(*fields: dict[str, object], name: str = "Payload") -> PayloadSchema:
    return PayloadSchema.parse({"type": "record", "name": name, "fields": list(fields)})


V1 = schema({"name": "count", "type": "int"}, {"name": "code", "type": "string"})
V2 = schema(
    {"name": "count", "type": "long"},
    {"name": "code", "type": "string"},
    {"name": "note", "type": "string", "default": "none"},
)


def test_a_task_queued_under_v1_decodes_in_v2() -> None:
    v1, v2 = TaskType(name="geo.x", schema=V1), TaskType(name="geo.x", schema=V2)
    catalogue = TypeCatalogue([v1])
    payload, fingerprint = catalogue.get("geo.x").encode({"count": 7, "code": "LAX"})
    assert catalogue.register(v2).outcome is Outcome.ACCEPTED
    value = catalogue.get("geo.x").decode(payload, fingerprint, catalogue.writer_schema)
    assert value == {"count": 7, "code": "LAX", "note": "none"}


def test_an_incompatible_evolution_is_refused_and_changes_nothing() -> None:
    catalogue = TypeCatalogue([TaskType(name="geo.x", schema=V1)])
    broken = schema({"name": "count", "type": "string"}, {"name": "weight", "type": "double"})
    registration = catalogue.register(TaskType(name="geo.x", schema=broken))
    assert registration.outcome is Outcome.REFUSED
    assert len(registration.problems) == 2
    assert "'count'" in registration.problems[0]
    assert registration.problems[1] == "field 'weight' is new and has no default"
    assert catalogue.get("geo.x").schema == V1
    assert catalogue.writer_schema(broken.fingerprint) is None


def test_compatibility_is_with_every_earlier_schema() -> None:
    base = {"name": "id", "type": "string"}
    with_note = schema(base, {"name": "note", "type": "string"})
    without = schema(base)
    # Reads `without`, which has no note; but `with_note` wrote strings into it.
    renumbered = schema(base, {"name": "note", "type": ["null", "long"], "default": None})
    catalogue = TypeCatalogue([TaskType(name="t", schema=with_note), TaskType(name="t", schema=without)])
    assert catalogue.register(TaskType(name="t", schema=renumbered)).outcome is Outcome.REFUSED


def test_an_old_version_that_starts_again_changes_nothing() -> None:
    v1 = TaskType(name="t", schema=schema({"name": "a", "type": "string"}), timeout_ms=1)
    v2 = TaskType(
        name="t",
        schema=schema({"name": "a", "type": "string"}, {"name": "b", "type": "string", "default": ""}),
        timeout_ms=2,
    )
    catalogue = TypeCatalogue([v1, v2])
    assert catalogue.register(v1).outcome is Outcome.UNCHANGED
    assert catalogue.get("t") == v2
    assert catalogue.schemas("t") == (v1.schema, v2.schema)


def test_an_old_version_that_can_t_read_the_new_one_is_refused() -> None:
    catalogue = TypeCatalogue([TaskType(name="t", schema=V1), TaskType(name="t", schema=V2)])
    assert catalogue.register(TaskType(name="t", schema=V1)).outcome is Outcome.REFUSED


def test_defaults_and_queue_change_and_the_latest_wins() -> None:
    first = TaskType(name="t", schema=V1)
    catalogue = TypeCatalogue([first])
    second = replace(first, queue="geo", priority=Priority.HIGH, timeout_ms=5, max_retries=0)
    assert catalogue.register(second).outcome is Outcome.ACCEPTED
    assert catalogue.get("t") == second
    assert catalogue.register(first).outcome is Outcome.ACCEPTED
    assert catalogue.get("t") == first


@pytest.mark.parametrize(("first", "second"), [(None, V1), (V1, None)])
def test_a_type_does_not_change_between_json_and_a_schema(
    first: PayloadSchema | None, second: PayloadSchema | None
) -> None:
    catalogue = TypeCatalogue([TaskType(name="t", schema=first)])
    registration = catalogue.register(TaskType(name="t", schema=second))
    assert registration.outcome is Outcome.REFUSED
    assert "new name" in registration.problems[0]


def test_contradicting_types_make_no_catalogue() -> None:
    with pytest.raises(IncompatibleSchema, match="count"):
        TypeCatalogue([TaskType(name="t", schema=V2), TaskType(name="t", schema=V1)])


def test_an_unknown_type_names_the_nearest() -> None:
    with pytest.raises(UnknownTaskType, match=r"did you mean 'geo\.nearest'") as caught:
        TypeCatalogue([TaskType(name="geo.nearest")]).get("geo.nearst")
    assert caught.value.nearest == "geo.nearest"


def test_a_record_that_is_no_type_is_refused() -> None:
    record = TaskType(name="t", schema=V1).record(1)
    catalogue = TypeCatalogue()
    for broken in (
        replace(record, task_type="not a name"),
        replace(record, queue="No Queue"),
        replace(record, schema="{"),
        replace(record, schema='{"type": "recrod"}'),
        replace(record, max_retries=-1),
        replace(record, timeout_ms=0),
    ):
        assert catalogue.apply(broken).outcome is Outcome.REFUSED
    assert catalogue.names() == ()
    assert catalogue.apply(record).outcome is Outcome.ACCEPTED


def test_records_carry_types_whole() -> None:
    task_type = TaskType(
        name="a.b-c_1", queue="q", schema=V2, priority=Priority.LOW, timeout_ms=9, max_retries=1
    )
    assert TaskType.of(task_type.record(5)) == task_type


@pytest.mark.parametrize("name", ["a", "geo.nearest", "A-1_b.C", "x" * 200])
def test_good_names(name: str) -> None:
    assert TaskType(name=name).name == name


@pytest.mark.parametrize("name", ["", "a b", "ü", "x" * 201, "a/b", "a\n"])
def test_bad_names(name: str) -> None:
    with pytest.raises(InvalidTaskType):
        TaskType(name=name)


def test_json_payloads() -> None:
    task_type = TaskType(name="t")
    payload, fingerprint = task_type.encode({"a": [1, "ü", None]})
    assert fingerprint is None
    assert task_type.decode(payload, None, {}.get) == {"a": [1, "ü", None]}
    with pytest.raises(UndecodablePayload, match="not JSON"):
        task_type.decode(b"{", None, {}.get)
    with pytest.raises(UndecodablePayload, match="schema"):
        task_type.decode(payload, V1.fingerprint, {}.get)
    with pytest.raises(UndecodablePayload, match="schema"):
        TaskType(name="t", schema=V1).decode(payload, None, {}.get)
    with pytest.raises(UndecodablePayload, match="nobody has registered"):
        TaskType(name="t", schema=V1).decode(payload, V2.fingerprint, {}.get)
    with pytest.raises(InvalidPayload) as caught:
        task_type.encode({"a": [1, float("nan")]})
    assert caught.value.pointer == "/a/1"


POOL = [
    TaskType(name=name, schema=version, timeout_ms=timeout)
    for name in ("a", "b")
    for version in (None, V1, V2, schema({"name": "code", "type": "string"}))
    for timeout in (None, 5)
]


@given(st.lists(st.sampled_from(POOL), max_size=12))
def test_the_fold_is_a_function_of_the_log(log: list[TaskType]) -> None:
    """Two readers agree; a record delivered twice in a row changes nothing; refused records leave no trace."""
    reader, stutterer, accepted_only = TypeCatalogue(), TypeCatalogue(), TypeCatalogue()
    for task_type in log:
        registration = reader.apply(task_type.record(1))
        assert stutterer.apply(task_type.record(2)).outcome is registration.outcome
        if registration.outcome is not Outcome.REFUSED:
            assert stutterer.apply(task_type.record(3)).outcome is Outcome.UNCHANGED
        if registration.outcome is Outcome.ACCEPTED:
            assert accepted_only.apply(task_type.record(4)).outcome is Outcome.ACCEPTED
    for other in (stutterer, accepted_only):
        assert other.names() == reader.names()
        assert [other.get(name) for name in other.names()] == [reader.get(name) for name in reader.names()]


@given(st.permutations([TaskType(name="a", schema=V1)] * 3 + [TaskType(name="a", schema=V2)] * 2))
def test_duplicates_in_any_order_end_at_one_newest_schema(log: list[TaskType]) -> None:
    catalogue = TypeCatalogue()
    for task_type in log:
        catalogue.register(task_type)
    # V2 reads V1's tasks and not the other way round, so whichever comes first, V2 is current and readable.
    assert catalogue.get("a").schema == V2
    for version in catalogue.schemas("a"):
        assert V2.decode(version.encode("a", {"count": 1, "code": "x"}), version)["count"] == 1
