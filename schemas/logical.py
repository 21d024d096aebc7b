"""Logical types: what a caller may hand over for each, and how it becomes what Avro stores, and back.

Each takes its Python value and the text that JSON has for it (ISO 8601, a UUID's or a decimal's usual form); nothing else, so
that a bare number is never taken for an instant of unsure unit. Instants and durations are kept at the schema's precision
(floor); what decimals can't keep is refused. Logical types that are not in `LOGICAL_TYPES` are their underlying type.
"""

from __future__ import annotations

import re
import struct
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, TypeVar

import fastavro.read
from pydantic import TypeAdapter, ValidationError

from taskline.schemas import json_values
from taskline.schemas.refusal import Refused, mismatch

Attributes = Mapping[str, Any]
T = TypeVar("T")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_LOCAL = datetime(1970, 1, 1)  # noqa: DTZ001 - a local timestamp has no zone
_EPOCH_DAY = _EPOCH.date().toordinal()
_MILLISECOND = timedelta(milliseconds=1)
_MICROSECOND = timedelta(microseconds=1)
_DECIMAL = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
# Months, days and milliseconds, each an unsigned 32-bit integer (Avro 1.12, "Duration").
_DURATION = struct.Struct("<III")
_SECONDS_A_DAY = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class LogicalType:
    """One logical type on one underlying type."""

    # The Python classes that mean it; None: any value does.
    takes: tuple[type, ...] | None
    # (value, the schema's attributes) → the underlying value. Raises Refused.
    to_avro: Callable[[Any, Attributes], Any]
    # The name under which fastavro finds the way back.
    reader: str


def _parsed(value: Any, kind: type[T], parse: Callable[[str], T], wanted: str) -> T:  # noqa: ANN401
    """A value of class `kind`, or the one that a text stands for."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, str):
        raise mismatch(value, wanted)
    try:
        return parse(value)
    except ValueError:
        raise Refused(f"is not {wanted}") from None


def _instant(value: Any) -> timedelta:  # noqa: ANN401
    instant = _parsed(value, datetime, datetime.fromisoformat, "an ISO 8601 date and time with UTC offset")
    if instant.utcoffset() is None:
        raise Refused("has no UTC offset, so it is no instant")
    try:
        return instant.astimezone(UTC) - _EPOCH
    except OverflowError:
        raise Refused("is outside the years 1 to 9999") from None


def _local(value: Any) -> timedelta:  # noqa: ANN401
    local = _parsed(value, datetime, datetime.fromisoformat, "an ISO 8601 date and time without UTC offset")
    if local.tzinfo is not None:
        raise Refused("has a UTC offset, which a local date and time can't keep")
    return local - _EPOCH_LOCAL


def _date(value: Any, _: Attributes) -> int:  # noqa: ANN401
    if isinstance(value, datetime):
        raise Refused("a date and time where a date belongs")
    return _parsed(value, date, date.fromisoformat, "an ISO 8601 date").toordinal() - _EPOCH_DAY


def _time_of_day(value: Any) -> timedelta:  # noqa: ANN401
    moment = _parsed(value, time, time.fromisoformat, "an ISO 8601 time of day")
    if moment.tzinfo is not None:
        raise Refused("has a UTC offset, which a time of day can't keep")
    return timedelta(
        hours=moment.hour, minutes=moment.minute, seconds=moment.second, microseconds=moment.microsecond
    )


def _uuid(value: Any) -> uuid.UUID:  # noqa: ANN401
    identity = _parsed(value, uuid.UUID, uuid.UUID, "a UUID")
    if isinstance(value, str) and str(identity) != value.lower():
        raise Refused("is not a UUID in its usual form")
    return identity


def _read_fixed_uuid(data: bytes, *_: object) -> uuid.UUID:
    return uuid.UUID(bytes=data)


def _unscaled(value: Any, attributes: Attributes) -> int:  # noqa: ANN401
    """A decimal as the integer that Avro stores: value * 10^scale, exactly."""
    if isinstance(value, str) and not _DECIMAL.fullmatch(value):
        raise Refused("is not a decimal number")
    if isinstance(value, bool) or not isinstance(value, Decimal | int | str):
        raise mismatch(value, "a decimal number (as text, so that it stays exact)")
    number = Decimal(value)
    sign, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int):
        raise Refused("is not a finite number")
    if not number:
        return 0
    scale, precision = attributes.get("scale", 0), attributes["precision"]
    # Before any arithmetic: 1e999999999 has few digits and a huge value.
    if number.adjusted() + 1 + scale > precision:
        raise Refused(f"has more than {precision - scale} digits before the point")
    shift = exponent + scale
    kept, lost = (digits, ()) if shift >= 0 else (digits[:shift], digits[shift:])
    if any(lost) or not kept:
        raise Refused(f"has more than {scale} digits after the point")
    magnitude: int = int("".join(map(str, kept))) * 10 ** max(shift, 0)
    return -magnitude if sign else magnitude


def _decimal_bytes(value: Any, attributes: Attributes) -> bytes:  # noqa: ANN401
    unscaled = _unscaled(value, attributes)
    return unscaled.to_bytes((unscaled.bit_length() + 8) // 8, "big", signed=True)


def _decimal_fixed(value: Any, attributes: Attributes) -> bytes:  # noqa: ANN401
    try:
        return _unscaled(value, attributes).to_bytes(attributes["size"], "big", signed=True)
    except OverflowError:
        raise Refused(f"does not fit into {attributes['size']} bytes") from None


def _iso_duration(text: str) -> timedelta:
    if not text.startswith("P"):
        raise ValueError("not an ISO 8601 duration")
    try:
        return _TIMEDELTA.validate_python(text)
    except ValidationError as error:
        raise ValueError("not an ISO 8601 duration") from error


_TIMEDELTA = TypeAdapter(timedelta)


def _duration(value: Any, _: Attributes) -> bytes:  # noqa: ANN401
    span = _parsed(value, timedelta, _iso_duration, "an ISO 8601 duration")
    if span < timedelta():
        raise Refused("is negative, which Avro's duration can't be")
    return _DURATION.pack(0, span.days, span.seconds * 1_000 + span.microseconds // 1_000)


def _read_duration(data: bytes, *_: object) -> timedelta:
    months, days, milliseconds = _DURATION.unpack(data)
    if months:
        raise ValueError("a duration in months has no fixed length")
    return timedelta(days=days, milliseconds=milliseconds)


def _json_bytes(value: Any, _: Attributes) -> bytes:  # noqa: ANN401
    return json_values.dumps(value)


def _json_text(value: Any, _: Attributes) -> str:  # noqa: ANN401
    return json_values.dumps(value).decode()


def _read_json(data: str | bytes, *_: object) -> Any:  # noqa: ANN401
    return json_values.loads(data if isinstance(data, bytes) else data.encode())


def _as_written(native: Any, *_: object) -> Any:  # noqa: ANN401
    return native


def _in(unit: timedelta, span: Callable[[Any], timedelta]) -> Callable[[Any, Attributes], int]:
    return lambda value, _: span(value) // unit


def _logical(
    takes: tuple[type, ...] | None, to_avro: Callable[[Any, Attributes], Any], reader: str
) -> LogicalType:
    return LogicalType(takes=takes, to_avro=to_avro, reader=reader)


# By underlying type and logical type, as fastavro names them.
LOGICAL_TYPES: dict[str, LogicalType] = {
    "int-date": _logical((date,), _date, "date"),
    "int-time-millis": _logical((time,), _in(_MILLISECOND, _time_of_day), "time-millis"),
    "long-time-micros": _logical((time,), _in(_MICROSECOND, _time_of_day), "time-micros"),
    "long-timestamp-millis": _logical((datetime,), _in(_MILLISECOND, _instant), "timestamp-millis"),
    "long-timestamp-micros": _logical((datetime,), _in(_MICROSECOND, _instant), "timestamp-micros"),
    "long-local-timestamp-millis": _logical((datetime,), _in(_MILLISECOND, _local), "local-timestamp-millis"),
    "long-local-timestamp-micros": _logical((datetime,), _in(_MICROSECOND, _local), "local-timestamp-micros"),
    "string-uuid": _logical((uuid.UUID,), lambda value, _: str(_uuid(value)), "uuid"),
    "fixed-uuid": _logical((uuid.UUID,), lambda value, _: _uuid(value).bytes, "taskline-uuid"),
    "bytes-decimal": _logical((Decimal,), _decimal_bytes, "decimal"),
    "fixed-decimal": _logical((Decimal,), _decimal_fixed, "decimal"),
    "fixed-duration": _logical((timedelta,), _duration, "taskline-duration"),
    "bytes-json": _logical(None, _json_bytes, "taskline-json"),
    "string-json": _logical(None, _json_text, "taskline-json"),
}

# What else may read a primitive than its own type (Avro 1.12, "Schema Resolution").
PROMOTIONS = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}


# A logical type that says: as it was written, unpromoted.
PLAIN = "taskline-plain"

# fastavro's way to add logical types; under names of our own, so that nobody else's reader is replaced.
fastavro.read.LOGICAL_READERS.update(
    {
        "fixed-taskline-uuid": _read_fixed_uuid,
        "fixed-taskline-duration": _read_duration,
        "bytes-taskline-json": _read_json,
        "string-taskline-json": _read_json,
        **{f"{primitive}-{PLAIN}": _as_written for primitive in PROMOTIONS},
    }
)


def logical_type_of(schema: Any) -> LogicalType | None:  # noqa: ANN401 - a node of a schema
    """The logical type of a schema node, None when it has none that is known."""
    if not isinstance(schema, dict) or "logicalType" not in schema:
        return None
    found = LOGICAL_TYPES.get(f"{schema['type']}-{schema['logicalType']}")
    # One that does not fit its type is ignored (Avro 1.12, "Logical Types").
    fits = schema["type"] != "fixed" or schema["size"] == _FIXED_SIZES.get(
        schema["logicalType"], schema["size"]
    )
    return found if fits else None


_FIXED_SIZES = {"uuid": 16, "duration": 12}


def read_native(native: Any, schema: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The Python value of an underlying value, as a decoder would give it."""
    found = logical_type_of(schema)
    if found is None:
        return native
    return fastavro.read.LOGICAL_READERS[f"{schema['type']}-{found.reader}"](native, schema, None)
