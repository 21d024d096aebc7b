"""Payload schemas: strictness, pointers, logical types, evolution."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any

import avro.schema
import pytest

from taskline.errors import InvalidPayload, InvalidTaskType, UndecodablePayload
from taskline.schemas.payloads import PayloadSchema


def record(*fields: dict[str, Any], name: str = "P", **more: Any) -> PayloadSchema:
    return PayloadSchema.parse({"type": "record", "name": name, "fields": list(fields), **more})


def of(kind: Any) -> PayloadSchema:
    return record({"name": "x", "type": kind})


def round_trip(kind: Any, value: Any) -> Any:
    schema = of(kind)
    return schema.decode(schema.encode("t", {"x": value}), schema)["x"]


def refusal(schema: PayloadSchema, value: Any) -> tuple[str, str]:
    with pytest.raises(InvalidPayload) as caught:
        schema.encode("geo.x", value)
    assert caught.value.task_type == "geo.x"
    return caught.value.pointer, caught.value.reason


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


LOGICAL: dict[str, Any] = {
    "date": {"type": "int", "logicalType": "date"},
    "time-millis": {"type": "int", "logicalType": "time-millis"},
    "time-micros": {"type": "long", "logicalType": "time-micros"},
    "millis": {"type": "long", "logicalType": "timestamp-millis"},
    "micros": {"type": "long", "logicalType": "timestamp-micros"},
    "local": {"type": "long", "logicalType": "local-timestamp-millis"},
    "uuid": {"type": "string", "logicalType": "uuid"},
    "fixed-uuid": {"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"},
    "decimal": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2},
    "fixed-decimal": {
        "type": "fixed",
        "name": "D",
        "size": 3,
        "logicalType": "decimal",
        "precision": 6,
        "scale": 2,
    },
    "duration": {"type": "fixed", "name": "T", "size": 12, "logicalType": "duration"},
    "json": {"type": "bytes", "logicalType": "json"},
    "json-text": {"type": "string", "logicalType": "json"},
    "unknown": {"type": "int", "logicalType": "made-up"},
    "enum": {"type": "enum", "name": "E", "symbols": ["red", "blue"]},
    "fixed": {"type": "fixed", "name": "F", "size": 2},
    "odd-duration": {"type": "fixed", "name": "O", "size": 1, "logicalType": "duration"},
}
ID = uuid.UUID("0190a5f0-0000-7000-8000-000000000001")
NOON = datetime(2026, 5, 1, 12, 0, 0, 123456, tzinfo=UTC)


@pytest.mark.parametrize(
    ("kind", "given", "got"),
    [
        ("int", 5, 5),
        ("int", Level.LOW, 1),
        ("double", 1, 1.0),
        ("double", 2**53, 2.0**53),
        ("double", float("inf"), float("inf")),
        ("float", 0.1, 0.10000000149011612),
        ("string", "üñí\U0001f600", "üñí\U0001f600"),
        ("bytes", bytearray(b"ab"), b"ab"),
        ("bytes", memoryview(b"ab"), b"ab"),
        ("bytes", "YWI=", b"ab"),
        ("fixed", "YWI=", b"ab"),
        ("enum", "red", "red"),
        ("enum", Colour.RED, "red"),
        ("date", date(2026, 5, 1), date(2026, 5, 1)),
        ("date", "2026-05-01", date(2026, 5, 1)),
        ("time-millis", time(1, 2, 3, 4999), time(1, 2, 3, 4000)),
        ("time-micros", "01:02:03.000004", time(1, 2, 3, 4)),
        ("millis", NOON, NOON.replace(microsecond=123000)),
        ("micros", NOON, NOON),
        ("micros", "2026-05-01T14:00:00.123456+02:00", NOON),
        ("micros", "2026-05-01T12:00:00.123456Z", NOON),
        ("micros", datetime.min.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC)),
        (
            "millis",
            datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
            datetime(1969, 12, 31, 23, 59, 59, 999000, UTC),
        ),
        ("local", "2026-05-01T12:00:00", datetime(2026, 5, 1, 12)),  # noqa: DTZ001
        ("uuid", ID, ID),
        ("uuid", str(ID).upper(), ID),
        ("fixed-uuid", str(ID), ID),
        ("decimal", Decimal("-12.5"), Decimal("-12.50")),
        ("decimal", "1e3", Decimal("1000.00")),
        ("decimal", 7, Decimal("7.00")),
        ("decimal", "1.5000", Decimal("1.50")),
        ("decimal", "0e-999999999", Decimal("0.00")),
        ("fixed-decimal", "-9999.99", Decimal("-9999.99")),
        ("duration", timedelta(days=2, milliseconds=1500), timedelta(days=2, milliseconds=1500)),
        ("duration", "P1DT2H", timedelta(hours=26)),
        ("json", {"a": [1, None]}, {"a": [1, None]}),
        ("json-text", [{"ü": 1.5}], [{"ü": 1.5}]),
        ("unknown", 5, 5),
        ("odd-duration", b"\x01", b"\x01"),
    ],
)
def test_what_is_taken_and_what_comes_out(kind: str, given: Any, got: Any) -> None:
    value = round_trip(LOGICAL.get(kind, kind), given)
    assert value == got
    assert type(value) is type(got)


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("boolean", 1, "an integer where a boolean belongs"),
        ("int", True, "a boolean where an integer belongs"),
        ("int", 1.0, "a number where an integer belongs"),
        ("int", "1", "a string where an integer belongs"),
        ("int", None, "null where an integer belongs"),
        ("int", 2**31, "is outside the range of a 32-bit integer"),
        ("long", -(2**63) - 1, "is outside the range of a 64-bit integer"),
        ("double", "1", "a string where a number belongs"),
        ("double", True, "a boolean where a number belongs"),
        ("double", 2**53 + 1, "is an integer that a floating-point number can't keep exactly"),
        ("double", 10**400, "is an integer that a floating-point number can't keep exactly"),
        ("float", 1e39, "is outside the range of a 32-bit floating-point number"),
        ("string", b"a", "a bytes where a string belongs"),
        ("string", "\ud800", "is not Unicode text (a lone surrogate)"),
        ("bytes", "ä", "is not base64, which stands for bytes in JSON"),
        ("bytes", "YWI", "is not base64, which stands for bytes in JSON"),
        ("bytes", 5, "an integer where bytes (in JSON: base64) belongs"),
        ("fixed", b"a", "has 1 bytes where 2 belong"),
        ("enum", "rde", "is none of blue, red; did you mean 'red'?"),
        ("enum", 1, "an integer where a symbol belongs"),
        ("null", 0, "an integer where null belongs"),
        ("date", NOON, "a date and time where a date belongs"),
        ("date", "yesterday", "is not an ISO 8601 date"),
        ("date", 5, "an integer where an ISO 8601 date belongs"),
        ("time-micros", "12:00:00Z", "has a UTC offset, which a time of day can't keep"),
        ("micros", datetime(2026, 5, 1), "has no UTC offset, so it is no instant"),  # noqa: DTZ001
        ("micros", "2026-05-01", "has no UTC offset, so it is no instant"),
        ("micros", 1_700_000_000, "an integer where an ISO 8601 date and time with UTC offset belongs"),
        (
            "micros",
            datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))),
            "is outside the years 1 to 9999",
        ),
        ("local", NOON, "has a UTC offset, which a local date and time can't keep"),
        ("uuid", "x", "is not a UUID"),
        ("uuid", f"{{{ID}}}", "is not a UUID in its usual form"),
        ("decimal", 1.5, "a number where a decimal number (as text, so that it stays exact) belongs"),
        ("decimal", "1.005", "has more than 2 digits after the point"),
        ("decimal", "10000", "has more than 4 digits before the point"),
        ("decimal", "1e999999999", "has more than 4 digits before the point"),
        ("decimal", "1e-999999999", "has more than 2 digits after the point"),
        ("decimal", Decimal("NaN"), "is not a finite number"),
        ("decimal", "1_000", "is not a decimal number"),
        ("duration", timedelta(seconds=-1), "is negative, which Avro's duration can't be"),
        ("duration", "5 minutes", "is not an ISO 8601 duration"),
        ("json", float("nan"), "is not a finite number, and JSON has no other"),
    ],
)
def test_what_is_refused(kind: str, value: Any, reason: str) -> None:
    assert refusal(of(LOGICAL.get(kind, kind)), {"x": value}) == ("/x", reason)


def test_members_of_records() -> None:
    schema = record({"name": "colour", "type": "string"}, {"name": "count", "type": "int", "default": 1})
    assert refusal(schema, {}) == ("/colour", "is missing and has no default")
    assert refusal(schema, {"color": "red"}) == ("/color", "unknown field; did you mean 'colour'?")
    assert refusal(schema, {"colour": "red", "zzz": 1}) == ("/zzz", "unknown field")
    assert refusal(schema, {"colour": "red", 5: 1}) == ("", "has an integer as a key; keys are strings")
    assert refusal(schema, [1]) == ("", "an array where an object belongs")
    assert refusal(schema, None) == ("", "null where an object belongs")
    assert schema.decode(schema.encode("t", OrderedDict(colour="red")), schema) == {
        "colour": "red",
        "count": 1,
    }


def test_pointers_lead_through_everything() -> None:
    inner = {"type": "record", "name": "Inner", "fields": [{"name": "n", "type": ["null", "int"]}]}
    schema = of({"type": "array", "items": {"type": "map", "values": inner}})
    assert refusal(schema, {"x": [{}, {"a/b~c": {"n": "5"}}]}) == (
        "/x/1/a~1b~0c/n",
        "a string where an integer belongs",
    )


def test_unions_take_what_means_a_branch() -> None:
    cat = {"type": "record", "name": "Cat", "fields": [{"name": "lives", "type": "int"}]}
    dog = {
        "type": "record",
        "name": "Dog",
        "fields": [{"name": "tricks", "type": {"type": "array", "items": "int"}}],
    }
    schema = of([cat, dog, "null", "string", "double", "long"])
    for value in ({"lives": 9}, {"tricks": [1]}, None, "x", 1.5, 5):
        assert schema.decode(schema.encode("t", {"x": value}), schema) == {"x": value}
    assert refusal(schema, {"x": {"tricks": ["sit"]}}) == ("/x/tricks/0", "a string where an integer belongs")
    pointer, reason = refusal(schema, {"x": True})
    assert (pointer, reason.partition(" where ")[0]) == ("/x", "a boolean")


def test_a_float_keeps_its_precision_beside_a_narrower_branch() -> None:
    assert round_trip(["float", "double"], 0.1) == 0.1
    assert round_trip(["double", "long"], 2**60 + 1) == 2**60 + 1
    assert round_trip(["int", "long"], 2**40) == 2**40


TREE = {
    "type": "record",
    "name": "Add",
    "fields": [
        {
            "name": name,
            "type": [
                "double",
                "Add",
                *(
                    [
                        {
                            "type": "record",
                            "name": "Mul",
                            "fields": [{"name": "a", "type": ["double", "Add", "Mul"]}],
                        }
                    ]
                    if name == "a"
                    else ["Mul"]
                ),
            ],
        }
        for name in ("a", "b")
    ],
}


def test_unions_that_hold_each_other_take_linear_time() -> None:
    twin = {
        "type": "record",
        "name": "A",
        "fields": [
            {
                "name": "c",
                "type": [
                    "null",
                    "A",
                    {
                        "type": "record",
                        "name": "B",
                        "fields": [{"name": "c", "type": ["null", "A", "B", "int"]}],
                    },
                ],
            }
        ],
    }
    schema = PayloadSchema.parse(twin)
    value: Any = {"c": "wrong"}
    for _ in range(60):
        value = {"c": value}
    pointer, _ = refusal(schema, value)
    assert pointer == "/c" * 61


def test_recursion_is_bounded_in_both_directions() -> None:
    schema = PayloadSchema.parse(TREE)
    value = {"a": {"a": 1.0}, "b": {"a": 2.0, "b": 3.0}}
    assert schema.decode(schema.encode("t", value), schema) == value
    deep: Any = 1.0
    for _ in range(100_000):
        deep = {"a": deep}
    assert refusal(schema, {"a": deep, "b": 1.0}) == ("", "is nested too deeply")
    while isinstance(deep, dict):
        # Taken apart by hand: the interpreter's own recursion would not survive it either.
        deep = deep.pop("a")
    with pytest.raises(UndecodablePayload):
        schema.decode(b"\x02" * 1_000_000, schema)


def test_bytes_that_are_no_payload() -> None:
    schema = record({"name": "a", "type": "string"}, {"name": "b", "type": LOGICAL["micros"]})
    data = schema.encode("t", {"a": "x", "b": NOON})
    for garbage in (b"", data[:-1], data + b"\0", b"\xff" * 50, b"\x01", b"\x04\xff\xfe\x00"):
        with pytest.raises(UndecodablePayload):
            schema.decode(garbage, schema)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "{",
        "5",
        "null",
        "[]{}",
        '"strin"',
        {},
        {"type": "record"},
        {"type": "record", "name": "not a name", "fields": []},
        {"type": "record", "name": "R", "fields": [{"name": "a"}]},
        {
            "type": "record",
            "name": "R",
            "fields": [{"name": "a", "type": "int"}, {"name": "a", "type": "int"}],
        },
        {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int", "default": "x"}]},
        {"type": "record", "name": "R", "fields": [{"name": "a", "type": ["null", "int"], "default": 1}]},
        {"type": "record", "name": "R", "fields": [{"name": "a", "type": "double", "default": float("nan")}]},
        {
            "type": "record",
            "name": "R",
            "fields": [{"name": "a", "type": "int"}, {"name": "b", "type": "int", "aliases": ["a"]}],
        },
        {"type": "array", "items": "null"},
        {"type": "array", "items": {"type": "record", "name": "Empty", "fields": []}},
        {"type": "enum", "name": "E", "symbols": ["a", "a"]},
        {"type": "fixed", "name": "F"},
        {"type": "bytes", "logicalType": "decimal", "precision": 1, "scale": 2},
        {"type": "bytes", "logicalType": "decimal"},
        "[" * 100_000,
    ],
)
def test_what_is_no_schema(source: Any) -> None:
    with pytest.raises(InvalidTaskType):
        PayloadSchema.parse(source)


def test_a_handler_may_change_what_it_gets() -> None:
    v1 = record({"name": "a", "type": "int"})
    v2 = record(
        {"name": "a", "type": "int"},
        {"name": "tags", "type": {"type": "array", "items": "string"}, "default": []},
        {"name": "at", "type": LOGICAL["date"], "default": 1},
        {"name": "raw", "type": "bytes", "default": "\u00ff"},
    )
    payload = v1.encode("t", {"a": 1})
    v2.decode(payload, v1)["tags"].append("mine")
    assert v2.decode(payload, v1) == {"a": 1, "tags": [], "at": date(1970, 1, 2), "raw": b"\xff"}


def test_defaults_reach_every_use_of_a_named_type() -> None:
    def outer(*more: dict[str, Any]) -> PayloadSchema:
        inner = {"type": "record", "name": "Inner", "fields": [{"name": "n", "type": "int"}, *more]}
        return record({"name": "a", "type": inner}, {"name": "b", "type": "Inner"})

    old, new = outer(), outer({"name": "day", "type": LOGICAL["date"], "default": 1})
    value = new.decode(old.encode("t", {"a": {"n": 1}, "b": {"n": 2}}), old)
    assert value == {"a": {"n": 1, "day": date(1970, 1, 2)}, "b": {"n": 2, "day": date(1970, 1, 2)}}


def test_the_reader_s_logical_types_count() -> None:
    """Fingerprints leave logical types out, so what is found by one may be another type's schema."""
    mine = of(LOGICAL["micros"])
    stranger = of("long")
    assert mine.fingerprint == stranger.fingerprint
    assert mine.decode(stranger.encode("t", {"x": 0}), stranger) == {"x": datetime(1970, 1, 1, tzinfo=UTC)}
    wider = record({"name": "x", "type": LOGICAL["micros"]}, {"name": "y", "type": "int", "default": 0})
    assert wider.decode(stranger.encode("t", {"x": 0}), stranger)["x"] == datetime(1970, 1, 1, tzinfo=UTC)


def test_fingerprints_are_the_standard_s() -> None:
    # The value in Avro's own tests for "int", as the little-endian bytes of single-object encoding.
    assert PayloadSchema.parse('"int"').fingerprint.hex() == "8f5c393f1ad57572"
    for kind in LOGICAL.values():
        schema = of(kind)
        theirs = avro.schema.parse(schema.canonical).fingerprint("CRC-64-AVRO")
        assert schema.fingerprint == theirs


def test_the_same_schema_is_the_same_however_it_is_written() -> None:
    one = PayloadSchema.parse('{"type":"record", "name":"P", "fields":[{"name":"a","type":"int"}]}')
    other = PayloadSchema.parse({"fields": [{"type": "int", "name": "a"}], "name": "P", "type": "record"})
    assert one == other
    assert hash(one) == hash(other)
    assert one != record({"name": "a", "type": "long"})
