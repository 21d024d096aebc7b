"""The Confluent frame through a real registry: Apicurio, with the client that `codec_for` makes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from record_strategies import plain_record

from taskline.errors import Unavailable, UndecodableRecord, UnknownSchema
from taskline.infra.local.errors import NotAvailable
from taskline.infra.local.registry import SchemaRegistry
from taskline.schemas.codec import Codec
from taskline.schemas.confluent import codec_for
from taskline.schemas.contracts import contract
from taskline.schemas.events import RECORDS, LifecycleEvent, Record, Started, TaskSubmitted
from taskline.settings import SchemaSettings


@pytest.fixture(scope="module")
def registry_url() -> Iterator[str]:
    """A registry of the module's own. It needs Java 21; machines with an older one (as for Cassandra) skip."""
    try:
        with SchemaRegistry().running() as registry:
            yield registry.url
    except NotAvailable as reason:
        pytest.skip(f"no schema registry: {reason}")


@pytest.fixture
def codec(registry_url: str) -> Codec:
    return codec_for(SchemaSettings(registry_url=registry_url))


@pytest.fixture
def client(registry_url: str) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": registry_url}) as client:
        yield client


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_record_survives(
    kind: type[Record], codec: Codec, client: SchemaRegistryClient, registry_url: str
) -> None:
    record = plain_record(kind)
    data = codec.encode(record)
    assert data[0] == 0
    assert codec.decode(data, kind) == record
    # Another process, with nothing remembered, reads it by the registry alone.
    stranger = codec_for(SchemaSettings(registry_url=registry_url))
    assert stranger.decode(data, kind) == record
    assert f"taskline.{kind.__name__}" in client.get_subjects()
    registered = client.get_latest_version(f"taskline.{kind.__name__}")
    assert registered.schema_id == int.from_bytes(data[1:5], "big")
    assert json.loads(registered.schema.schema_str)["doc"]


def test_one_codec_reads_both_frames(codec: Codec) -> None:
    event = plain_record(Started)
    assert codec.decode(Codec().encode(event), LifecycleEvent) == event
    assert codec.decode(codec.encode(event), LifecycleEvent) == event
    with pytest.raises(UndecodableRecord, match="no schema registry URL"):
        Codec().decode(codec.encode(event), LifecycleEvent)


def test_a_reader_resolves_an_older_writer(codec: Codec, client: SchemaRegistryClient) -> None:
    """Writer v1, reader v2: v1 had no traceparent and a 32-bit timeout."""
    older = json.loads(contract("TaskSubmitted").source)
    older["fields"] = [field for field in older["fields"] if field["name"] != "traceparent"]
    for field in older["fields"]:
        if field["name"] == "timeout_ms":
            field["type"] = ["null", "int"]
    old_id = client.register_schema("taskline.TaskSubmitted", Schema(json.dumps(older), "AVRO"))
    record = plain_record(TaskSubmitted)
    # The field left out is the last one and null: one byte.
    body = codec.encode(record)[5:-1]
    assert codec.decode(b"\0" + old_id.to_bytes(4, "big") + body, TaskSubmitted) == record


def test_garbage_after_the_zero_byte(codec: Codec) -> None:
    known = codec.encode(plain_record(Started))[:5]
    for garbage in (
        b"\0",
        b"\0\0\0\0",
        b"\0\xff\xff\xff\xffgarbage",
        b"\0\x7f\xff\xff\xff",
        known,
        known + b"garbage",
    ):
        with pytest.raises(UndecodableRecord) as caught:
            codec.decode(garbage, Started)
        assert not isinstance(caught.value, UnknownSchema)


def test_a_newer_kind_of_record(codec: Codec, client: SchemaRegistryClient) -> None:
    newer = {"type": "record", "name": "Paused", "namespace": "taskline", "fields": []}
    schema_id = client.register_schema("taskline.Paused", Schema(json.dumps(newer), "AVRO"))
    with pytest.raises(UnknownSchema, match=r"taskline\.Paused"):
        codec.decode(b"\0" + schema_id.to_bytes(4, "big"), LifecycleEvent)


def test_no_registry_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        codec_for(SchemaSettings(registry_url="http://127.0.0.1:1")).prepare()
