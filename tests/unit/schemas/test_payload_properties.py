"""Payload schemas by properties: what goes in comes out, garbage stays out, evolutions that are accepted can read."""

from __future__ import annotations

import contextlib

import orjson
from avro_strategies import as_json, histories, same, schemas, values_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taskline.errors import UndecodablePayload
from taskline.schemas.catalogue import Outcome, TypeCatalogue
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType

patient = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


@patient
@given(st.data())
def test_what_goes_in_comes_out(data: st.DataObject) -> None:
    document = data.draw(schemas())
    schema = PayloadSchema.parse(document)
    value = data.draw(values_of(document))
    assert same(schema.decode(schema.encode("t", value), schema), value)


@patient
@given(st.data())
def test_json_over_http_is_the_same_payload(data: st.DataObject) -> None:
    document = data.draw(schemas(unions=False))
    schema = PayloadSchema.parse(document)
    value = data.draw(values_of(document))
    # Infinity has no JSON; everything else has.
    over_http = as_json(value)
    if b"Infinity" not in repr(over_http).encode() and "inf" not in repr(over_http):
        over_http = orjson.loads(orjson.dumps(over_http))
        assert schema.encode("t", over_http) == schema.encode("t", value)


@patient
@given(st.data())
def test_garbage_is_undecodable_or_a_value(data: st.DataObject) -> None:
    document = data.draw(schemas())
    schema = PayloadSchema.parse(document)
    payload = bytearray(schema.encode("t", data.draw(values_of(document))))
    how = data.draw(st.sampled_from(["random", "truncate", "flip", "append"]))
    if how == "random":
        payload = bytearray(data.draw(st.binary(max_size=64)))
    elif how == "truncate":
        del payload[data.draw(st.integers(0, len(payload))) :]
    elif how == "flip" and payload:
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        payload += data.draw(st.binary(min_size=1, max_size=4))
    with contextlib.suppress(UndecodablePayload):
        schema.decode(bytes(payload), schema)


@settings(patient, max_examples=150)
@given(st.data())
def test_what_is_accepted_reads_all_that_was_accepted_before(data: st.DataObject) -> None:
    catalogue = TypeCatalogue()
    queued: list[tuple[bytes, bytes | None]] = []
    for document in data.draw(histories()):
        task_type = TaskType(name="t", schema=PayloadSchema.parse(document))
        if catalogue.register(task_type).outcome is Outcome.ACCEPTED:
            queued.append(catalogue.get("t").encode(data.draw(values_of(document))))
        current = catalogue.get("t")
        for payload, fingerprint in queued:
            value = current.decode(payload, fingerprint, catalogue.writer_schema)
            # What was read is a payload of the current version in its own right.
            assert current.schema is not None
            current.schema.encode("t", value)
