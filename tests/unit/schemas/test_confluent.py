"""The Confluent frame, with a registry in memory; tests/integration/test_registry.py has a real one."""

from __future__ import annotations

import json

import httpx
import pytest
from confluent_kafka.schema_registry.error import SchemaRegistryError
from fake_registry import FakeRegistry
from record_strategies import plain_record

from taskline.errors import InvalidSettings, TasklineError, Unavailable, UndecodableRecord, UnknownSchema
from taskline.schemas.codec import Codec
from taskline.schemas.confluent import ConfluentFrame, codec_for
from taskline.schemas.contracts import contract
from taskline.schemas.events import RECORDS, LifecycleEvent, Record, Started, TaskSubmitted
from taskline.settings import SchemaSettings


@pytest.fixture
def registry() -> FakeRegistry:
    return FakeRegistry()


@pytest.fixture
def codec(registry: FakeRegistry) -> Codec:
    return Codec(confluent=ConfluentFrame(registry))


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_record_survives(kind: type[Record], registry: FakeRegistry, codec: Codec) -> None:
    record = plain_record(kind)
    data = codec.encode(record)
    assert data[0] == 0
    assert list(registry.subjects) == [f"taskline.{kind.__name__}"]
    assert codec.decode(data, kind) == record


def test_one_codec_reads_both_frames(codec: Codec) -> None:
    event = plain_record(Started)
    assert codec.decode(Codec().encode(event), LifecycleEvent) == event
    assert codec.decode(codec.encode(event), LifecycleEvent) == event


def test_the_registry_is_asked_once_per_schema(registry: FakeRegistry, codec: Codec) -> None:
    event = plain_record(Started)
    for _ in range(3):
        codec.decode(codec.encode(event), Started)
    assert registry.calls == ["register taskline.Started", "get 1"]


def test_a_reader_resolves_an_older_writer(registry: FakeRegistry, codec: Codec) -> None:
    older = json.loads(contract("TaskSubmitted").source)
    older["fields"] = [field for field in older["fields"] if field["name"] != "traceparent"]
    old_id = registry.put("taskline.TaskSubmitted", json.dumps(older))
    record = plain_record(TaskSubmitted)
    # The field left out is the last one and null: one byte.
    body = codec.encode(record)[5:-1]
    assert codec.decode(b"\0" + old_id.to_bytes(4, "big") + body, TaskSubmitted) == record


def test_garbage_after_the_zero_byte_is_undecodable(registry: FakeRegistry, codec: Codec) -> None:
    codec.encode(plain_record(Started))
    for garbage in (
        b"\0",
        b"\0\0\0\0",
        b"\0\0\0\0\0",
        b"\0\xff\xff\xff\xffgarbage",
        b"\0\0\0\0\x01",
        b"\0\0\0\0\x01garbage",
    ):
        with pytest.raises(UndecodableRecord) as caught:
            codec.decode(garbage, Started)
        assert not isinstance(caught.value, UnknownSchema)


def test_a_flood_of_garbage_is_no_flood_of_requests(registry: FakeRegistry) -> None:
    now = [0.0]
    codec = Codec(confluent=ConfluentFrame(registry, monotonic=lambda: now[0]))
    codec.encode(plain_record(Started))
    registry.calls.clear()
    for _ in range(5):
        with pytest.raises(UndecodableRecord):
            codec.decode(b"\0\0\0\0\x09garbage", Started)
    assert registry.calls == ["get 9", "subjects"]
    now[0] = 31.0
    with pytest.raises(UndecodableRecord):
        codec.decode(b"\0\0\0\0\x09garbage", Started)
    assert registry.calls.count("get 9") == 2


def test_a_newer_kind_of_record_is_an_unknown_schema(registry: FakeRegistry, codec: Codec) -> None:
    newer = {"type": "record", "name": "Paused", "namespace": "taskline", "fields": []}
    schema_id = registry.put("taskline.Paused", json.dumps(newer))
    with pytest.raises(UnknownSchema, match=r"taskline\.Paused"):
        codec.decode(b"\0" + schema_id.to_bytes(4, "big"), LifecycleEvent)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ('{"type": "record", "name": "Started", "namespace": "com.shop", "fields": []}', "AVRO"),
        ('{"type": "record", "name": "Started", "fields": []}', "AVRO"),
        ('"string"', "AVRO"),
        ('syntax = "proto3";', "PROTOBUF"),
        ('{"type": "object"}', "JSON"),
    ],
)
def test_other_people_s_records_are_undecodable(
    source: str, kind: str, registry: FakeRegistry, codec: Codec
) -> None:
    schema_id = registry.put("other", source, kind)
    with pytest.raises(UndecodableRecord) as caught:
        codec.decode(b"\0" + schema_id.to_bytes(4, "big") + b"abc", LifecycleEvent)
    assert not isinstance(caught.value, UnknownSchema)


def test_a_registry_without_our_schemas_throws_nothing_away(registry: FakeRegistry, codec: Codec) -> None:
    """An empty registry in the place of the old one must not send every record to the dead letters."""
    data = codec.encode(plain_record(Started))
    registry.schemas.clear()
    registry.subjects.clear()
    fresh = Codec(confluent=ConfluentFrame(registry))
    with pytest.raises(Unavailable, match="knows no schema of Taskline"):
        fresh.decode(data, Started)


@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        SchemaRegistryError(503, 50301, "starting"),
        SchemaRegistryError(429, 42901, "slow down"),
        json.JSONDecodeError("not JSON", "", 0),
    ],
)
def test_a_registry_that_is_away(failure: Exception, registry: FakeRegistry, codec: Codec) -> None:
    event = plain_record(Started)
    data = codec.encode(event)
    codec.decode(data, Started)
    registry.failure = failure
    # What is remembered goes on.
    assert codec.decode(codec.encode(event), Started) == event
    with pytest.raises(Unavailable):
        codec.encode(plain_record(TaskSubmitted))
    with pytest.raises(Unavailable):
        codec.decode(b"\0\0\0\0\x63x", Started)
    registry.failure = None
    assert codec.decode(codec.encode(plain_record(TaskSubmitted)), TaskSubmitted) == plain_record(
        TaskSubmitted
    )


def test_a_registry_that_refuses(registry: FakeRegistry, codec: Codec) -> None:
    registry.failure = SchemaRegistryError(409, 409, "incompatible")
    with pytest.raises(TasklineError, match="refuses") as caught:
        codec.encode(plain_record(Started))
    assert not isinstance(caught.value, Unavailable)


def test_the_settings_choose_the_frame() -> None:
    assert codec_for(SchemaSettings()).encode(plain_record(Started))[:2] == b"\xc3\x01"
    with pytest.raises(InvalidSettings, match="registry_url"):
        codec_for(SchemaSettings(registry_url="ftp://nowhere"))
    with pytest.raises(Unavailable):
        codec_for(SchemaSettings(registry_url="http://127.0.0.1:1")).encode(plain_record(Started))
