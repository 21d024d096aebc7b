from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskline.errors import InvalidOption, InvalidPayload, PayloadTooLarge
from taskline.infra.log import HEADER_DUE, HEADER_TARGET, HEADER_TASK_ID
from taskline.infra.topics import Topics
from taskline.producers.submission import (
    DEFAULT_OPTIONS,
    MAX_RETRIES,
    RECORD_ROOM_BYTES,
    OptionFields,
    Submission,
    SubmitOptions,
    build_submission,
    dispatch_record,
)
from taskline.schemas.codec import Codec
from taskline.schemas.events import Priority, TaskSubmitted
from taskline.schemas.ids import created_at_ms, from_ms
from taskline.schemas.types import TaskType
from taskline.settings import ProducerSettings

NOW_MS = 1_750_000_000_123
DAY_MS = 86_400_000
SETTINGS = ProducerSettings()
ANY = TaskType(name="any.json")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def build(payload: Any = None, task_type: TaskType = ANY, **options: Any) -> TaskSubmitted:
    return build_submission(task_type, payload, SubmitOptions(**options), now_ms=NOW_MS, settings=SETTINGS)


def test_defaults_come_from_the_task_type(types: Any) -> None:
    submission = build({"lat": 1.0, "lon": 2.0}, types.get("geo.nearest"))
    assert submission.queue == "geo"
    assert submission.priority is Priority.LOW
    assert submission.max_retries == 7
    # The worker knows the type's own.
    assert submission.timeout_ms is None
    assert submission.payload_fingerprint == types.get("geo.nearest").schema.fingerprint
    assert submission.tenant == "default"


def test_the_id_carries_the_time_and_roots_the_chain() -> None:
    submission = build()
    assert created_at_ms(submission.task_id) == NOW_MS
    assert submission.root_id == submission.task_id
    assert submission.replay_of is None
    assert submission.retain_until == NOW_MS + 30 * DAY_MS


def test_options_override() -> None:
    submission = build(
        priority="high",
        timeout_seconds=1.5,
        max_retries=0,
        tenant="acme",
        affinity_key="k",
        retain_days=0.5,
        traceparent=TRACE,
    )
    assert submission.priority is Priority.HIGH
    assert submission.timeout_ms == 1_500
    assert submission.max_retries == 0
    assert submission.tenant == "acme"
    assert submission.affinity_key == "k"
    assert submission.retain_until == NOW_MS + DAY_MS // 2
    assert submission.traceparent == TRACE


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("priority", "urgent"),
        ("priority", ""),
        ("priority", 1),
        ("timeout_seconds", 0),
        ("timeout_seconds", -1.0),
        ("timeout_seconds", math.nan),
        ("timeout_seconds", math.inf),
        ("timeout_seconds", True),
        ("timeout_seconds", "5"),
        ("timeout_seconds", 10**12),
        ("max_retries", -1),
        ("max_retries", MAX_RETRIES + 1),
        ("max_retries", 1.0),
        ("max_retries", True),
        ("tenant", ""),
        ("tenant", "x" * 201),
        ("tenant", None),
        ("tenant", b"acme"),
        ("tenant", "\ud800"),
        ("affinity_key", ""),
        ("affinity_key", "x" * 201),
        ("affinity_key", "\ud800"),
        ("retain_days", 0),
        ("retain_days", 31),
        ("retain_days", math.nan),
    ],
)
def test_an_impossible_option_is_named(option: str, value: object) -> None:
    with pytest.raises(InvalidOption) as caught:
        build(**{option: value})
    assert caught.value.option == option
    assert str(caught.value).startswith(f"{option}: ")


def test_a_near_miss_of_a_priority_is_hinted_at() -> None:
    with pytest.raises(InvalidOption, match="did you mean 'high'"):
        build(priority="hihg")


def test_a_tiny_timeout_is_not_rounded_to_nothing() -> None:
    assert build(timeout_seconds=1e-9).timeout_ms == 1


@pytest.mark.parametrize("trace", ["", "nonsense", TRACE.upper(), TRACE + "-extra", TRACE[:-1]])
def test_a_malformed_trace_context_is_ignored(trace: str) -> None:
    assert build(traceparent=trace).traceparent is None


def test_a_payload_off_its_schema_names_the_field(types: Any) -> None:
    with pytest.raises(InvalidPayload) as caught:
        build({"lat": 1.0, "lon": "east"}, types.get("geo.nearest"))
    assert caught.value.pointer == "/lon"


def test_a_payload_over_the_limit_is_refused() -> None:
    build("x" * (SETTINGS.max_payload_bytes - 2))
    with pytest.raises(PayloadTooLarge) as caught:
        build("x" * (SETTINGS.max_payload_bytes - 1))
    assert caught.value.size_bytes == SETTINGS.max_payload_bytes + 1
    assert caught.value.limit_bytes == SETTINGS.max_payload_bytes


def test_the_dispatch_record() -> None:
    codec, topics = Codec(), Topics(namespace="n.")
    submission = build([1], priority="high")
    record = dispatch_record(submission, topics, codec, max_record_bytes=1 << 20)
    assert record.topic == "n.tasks.high"
    assert record.key == submission.task_id.bytes
    assert record.headers == {HEADER_TASK_ID: submission.task_id.bytes}
    assert record.partition is None
    assert codec.decode(record.value, TaskSubmitted) == submission


def test_an_affinity_key_is_the_records_key() -> None:
    record = dispatch_record(build(affinity_key="kä"), Topics(), Codec(), max_record_bytes=1 << 20)
    assert record.key == "kä".encode()


def test_a_record_leaves_room_for_being_dispatched_again() -> None:
    submission = build("x" * 20_000)
    size = len(Codec().encode(submission)) + 16
    limit = size + RECORD_ROOM_BYTES
    dispatch_record(submission, Topics(), Codec(), max_record_bytes=limit)
    with pytest.raises(PayloadTooLarge):
        dispatch_record(submission, Topics(), Codec(), max_record_bytes=limit - 1)


@pytest.mark.parametrize(
    ("options", "due"),
    [
        ({"delay": 0.1}, 100),
        ({"delay": timedelta(hours=1)}, 3_600_000),
        ({"delay": 0.2004}, 201),
        ({"delay": 1.1}, 1_100),
        ({"delay": 365 * 86_400}, 365 * DAY_MS),
        ({"not_before": from_ms(NOW_MS + 1)}, 1),
        ({"not_before": from_ms(NOW_MS + 1) - timedelta(microseconds=1)}, 1),
    ],
)
def test_a_task_for_later_stands_among_the_scheduled_ones(options: dict[str, Any], due: int) -> None:
    submission = build(**options)
    assert submission.not_before == NOW_MS + due
    # It stays readable as long as any other, from when it is due.
    assert submission.retain_until == NOW_MS + due + 30 * DAY_MS
    codec = Codec()
    record = dispatch_record(submission, Topics(namespace="n."), codec, max_record_bytes=1 << 20)
    assert (record.topic, record.key) == ("n.tasks.scheduled", submission.task_id.bytes)
    assert record.headers == {
        HEADER_TASK_ID: submission.task_id.bytes,
        HEADER_DUE: str(NOW_MS + due).encode(),
        HEADER_TARGET: b"n.tasks.normal",
    }
    assert codec.decode(record.value, TaskSubmitted) == submission


@pytest.mark.parametrize(
    "options", [{"delay": 0}, {"not_before": from_ms(NOW_MS - 5)}, {"delay": timedelta()}]
)
def test_what_is_due_is_dispatched_at_once(options: dict[str, Any]) -> None:
    record = dispatch_record(build(**options), Topics(), Codec(), max_record_bytes=1 << 20)
    assert record.topic == "tasks.normal"
    assert HEADER_DUE not in record.headers


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"delay": 0.09}, "delay"),
        ({"delay": -1}, "delay"),
        ({"delay": math.nan}, "delay"),
        ({"delay": True}, "delay"),
        ({"delay": 365 * 86_400 + 1}, "delay"),
        ({"delay": 1, "not_before": from_ms(NOW_MS + 1)}, "delay"),
        ({"not_before": from_ms(NOW_MS + 366 * DAY_MS)}, "not_before"),
        ({"not_before": from_ms(NOW_MS).replace(tzinfo=None)}, "not_before"),
        ({"not_before": "tomorrow"}, "not_before"),
        ({"start_by": from_ms(NOW_MS)}, "start_by"),
        ({"start_by": from_ms(NOW_MS + 999), "delay": 1}, "start_by"),
    ],
)
def test_an_impossible_time_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        build(**options)
    assert refused.value.option == named


def test_a_submission_is_its_own_options() -> None:
    item = Submission(task_type="any.json", payload=1, priority=Priority.LOW)
    submission = build_submission(ANY, item.payload, item, now_ms=NOW_MS, settings=SETTINGS)
    assert submission.priority is Priority.LOW


def test_keyword_options_and_their_class_agree() -> None:
    assert set(OptionFields.__annotations__) == set(SubmitOptions.__dataclass_fields__)
    assert SubmitOptions() == DEFAULT_OPTIONS


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=300), st.binary(max_size=5)
)


@given(
    options=st.fixed_dictionaries({}, optional=dict.fromkeys(SubmitOptions.__dataclass_fields__, anything))
)
def test_any_options_give_an_encodable_submission_or_a_named_option(options: dict[str, Any]) -> None:
    try:
        submission = build(**options)
    except InvalidOption as error:
        named = error.option
    else:
        named = None
    if named is not None:
        assert named in options
        return
    codec = Codec()
    record = dispatch_record(submission, Topics(), codec, max_record_bytes=1 << 20)
    assert codec.decode(record.value, TaskSubmitted) == submission
