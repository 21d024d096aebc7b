"""The codec: every record survives, frames are told apart, garbage is named as such and nothing else is raised."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_strategies import any_record, plain_record, records

from taskline.errors import UndecodableRecord, UnknownSchema
from taskline.schemas.codec import SINGLE_OBJECT_MAGIC, Codec
from taskline.schemas.contracts import Contract, contract, contracts, fingerprint_of
from taskline.schemas.events import (
    LIFECYCLE_EVENTS,
    RECORDS,
    DeadLettered,
    LifecycleBatch,
    LifecycleEvent,
    Progress,
    Record,
    Started,
    TaskSubmitted,
    TaskTypeRegistered,
)

CODEC = Codec()


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_record_survives(kind: type[Record]) -> None:
    @given(records(kind))
    def survives(record: Record) -> None:
        data = CODEC.encode(record)
        back: Record = CODEC.decode(data, kind)
        assert back == record
        assert type(back) is kind
        assert CODEC.kind_of(data) is kind

    survives()


@given(st.sampled_from(LIFECYCLE_EVENTS).flatmap(records))
def test_lifecycle_events_are_read_as_what_they_are(event: LifecycleEvent) -> None:
    assert CODEC.decode(CODEC.encode(event), LifecycleEvent) == event


@given(any_record(), st.sampled_from(RECORDS))
def test_one_kind_is_not_taken_for_another(record: Record, expected: type[Record]) -> None:
    data = CODEC.encode(record)
    if isinstance(record, expected):
        assert CODEC.decode(data, expected) == record
    else:
        with pytest.raises(
            UndecodableRecord, match=f"a {type(record).__name__} where a {expected.__name__} belongs"
        ):
            CODEC.decode(data, expected)


def read(data: bytes | None) -> None:
    """Whatever the bytes are, they are a record or undecodable."""
    for expected in (TaskSubmitted, LifecycleEvent, LifecycleBatch, TaskTypeRegistered):
        try:
            record = CODEC.decode(data, expected)
        except UndecodableRecord:
            continue
        # What was read is a record in its own right.
        assert CODEC.decode(CODEC.encode(record), expected) == record


@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    read(data)


@given(st.sampled_from(list(contracts().values())), st.binary(max_size=200))
def test_random_bytes_behind_a_good_frame(versions: tuple[Contract, ...], body: bytes) -> None:
    read(b"\xc3\x01" + versions[0].fingerprint + body)


@given(any_record(), st.data())
def test_truncated_records_are_undecodable(record: Record, data: st.DataObject) -> None:
    whole = CODEC.encode(record)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(UndecodableRecord):
        CODEC.decode(cut, type(record))


@given(any_record(), st.binary(min_size=1, max_size=9))
def test_bytes_after_the_end_are_undecodable(record: Record, rest: bytes) -> None:
    with pytest.raises(UndecodableRecord):
        CODEC.decode(CODEC.encode(record) + rest, type(record))


@given(any_record(), st.data())
def test_flipped_bits(record: Record, data: st.DataObject) -> None:
    flipped = bytearray(CODEC.encode(record))
    for _ in range(data.draw(st.integers(1, 3))):
        flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    read(bytes(flipped))


def test_numbers_that_are_too_large_for_their_field_are_undecodable() -> None:
    """fastavro reads any varint for an int; the record could not be written again."""
    good = CODEC.encode(plain_record(DeadLettered))
    # attempt (7) follows the id and the tenant.
    start = 10 + 16 + 5
    assert good[start : start + 1] == b"\x0e"
    with pytest.raises(UndecodableRecord, match="32-bit"):
        CODEC.decode(good[:start] + b"\x80\x80\x80\x80\x10" + good[start + 1 :], DeadLettered)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "no bytes"),
        (b"", "zero bytes"),
        (b"\x00", "no schema registry URL"),
        (b"\x00\x00\x00\x00\x05abc", "no schema registry URL"),
        (b"\xc3", "starts with c3"),
        (b"\xc3\x01", "2 bytes are too few"),
        (b"\xc3\x02aaaaaaaabbbb", "starts with c302"),
        (b"{}", "starts with 7b7d"),
    ],
)
def test_frames_are_told_apart_by_their_first_bytes(data: bytes | None, reason: str) -> None:
    with pytest.raises(UndecodableRecord, match=reason):
        CODEC.decode(data, TaskSubmitted)


def test_an_unknown_writer_is_named() -> None:
    with pytest.raises(UnknownSchema, match="3132333435363738") as caught:
        CODEC.decode(b"\xc3\x0112345678body", TaskSubmitted)
    assert caught.value.fingerprint == b"12345678".hex()


def test_the_frame_is_avro_s_single_object_encoding() -> None:
    """Other tools read it: C3 01, the little-endian CRC-64-AVRO of the canonical form, the body as fastavro writes it."""
    event = plain_record(Started)
    data = CODEC.encode(event)
    assert data[:2] == b"\xc3\x01"
    schema = fastavro.parse_schema(json.loads(contract("Started").source))
    canonical = fastavro.schema.to_parsing_canonical_form(schema)
    crc = _crc_64_avro(canonical.encode())
    assert data[2:10] == crc.to_bytes(8, "little")
    assert fingerprint_of(schema) == data[2:10]


def _crc_64_avro(data: bytes) -> int:
    """As in Avro 1.12, "Schema Fingerprints"."""
    empty = 0xC15D213AA4D7A795
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (empty & -(value & 1))  # noqa: PLW2901
        table.append(value)
    crc = empty
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    return crc


@given(any_record())
def test_encoding_is_deterministic(record: Record) -> None:
    assert CODEC.encode(record) == Codec().encode(record)


def test_every_record_has_a_documented_contract() -> None:
    assert set(contracts()) == {kind.__name__ for kind in RECORDS}
    for versions in contracts().values():
        document: dict[str, Any] = json.loads(versions[0].source)
        assert document["namespace"] == "taskline"
        assert document["doc"]
        assert all(field["doc"] for field in document["fields"])


def test_a_start_from_before_there_were_leases_has_none() -> None:
    old = contracts()["Started"][1]
    plain, now = plain_record(Started), contract("Started")
    body = CODEC.encode(plain).removeprefix(SINGLE_OBJECT_MAGIC + now.fingerprint)
    # The earlier schema's body is the same without the field at the end.
    read = CODEC.decode(SINGLE_OBJECT_MAGIC + old.fingerprint + body[:-1], Started)
    assert read == plain
    assert read.lease_until is None


@pytest.mark.parametrize("fraction", [float("nan"), float("inf"), -0.1, 1.5])
def test_a_fraction_that_is_none_is_undecodable(fraction: float) -> None:
    event = replace(plain_record(Progress), fraction=fraction)
    with pytest.raises(UndecodableRecord, match="fraction"):
        CODEC.decode(CODEC.encode(event), Progress)
