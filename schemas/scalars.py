"""Strict checks of values that have no parts: what each Avro primitive, fixed and enum takes from Python and from JSON."""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from taskline.errors import did_you_mean, nearest
from taskline.schemas.refusal import Refused, mismatch

Check = Callable[[Any], Any]

_FLOAT_MAX: float = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
_INFINITY = float("inf")


def check_null(value: Any) -> None:  # noqa: ANN401
    """Null is None."""
    if value is not None:
        raise mismatch(value, "null")


def check_boolean(value: Any) -> bool:  # noqa: ANN401
    """A boolean is True or False; 0 and 1 are integers."""
    if value is True or value is False:
        return bool(value)
    raise mismatch(value, "a boolean")


def integer(bits: int) -> Check:
    """An integer of so many bits: a Python int, not a bool and not a float, even a whole one."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def check(value: Any) -> int:  # noqa: ANN401
        if type(value) is not int:
            if not isinstance(value, int) or isinstance(value, bool):
                raise mismatch(value, "an integer")
            value = int(value)
        if low <= value <= high:
            return value  # type: ignore[no-any-return]  # narrowed above
        raise Refused(f"is outside the range of a {bits}-bit integer")

    return check


def check_double(value: Any) -> float:  # noqa: ANN401
    """A float, also NaN and the infinities (Avro has them, and a schema asked for it); an int when nothing is lost."""
    if type(value) is float:
        return value
    if isinstance(value, float):
        return float(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise mismatch(value, "a number")
    try:
        exact = float(value)
    except OverflowError:
        exact = _INFINITY
    if exact != value:
        raise Refused("is an integer that a floating-point number can't keep exactly")
    return exact


def check_float(value: Any) -> float:  # noqa: ANN401
    """A 32-bit float: as a double, rounded by the encoder, but never out of range."""
    number = check_double(value)
    if _FLOAT_MAX < abs(number) < _INFINITY:
        raise Refused("is outside the range of a 32-bit floating-point number")
    return number


def check_string(value: Any) -> str:  # noqa: ANN401
    """Text that UTF-8 can carry."""
    if type(value) is not str:
        if not isinstance(value, str):
            raise mismatch(value, "a string")
        # Also the members of string enums.
        value = str.__str__(value)
    if value.isascii() or _is_unicode(value):
        return value  # type: ignore[no-any-return]  # narrowed above
    raise Refused("is not Unicode text (a lone surrogate)")


def check_bytes(value: Any) -> bytes:  # noqa: ANN401
    """Bytes; or, as JSON has none, a string of base64 (RFC 4648 §4, padded)."""
    if type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str):
        raise mismatch(value, "bytes (in JSON: base64)")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise Refused("is not base64, which stands for bytes in JSON") from None


def fixed(size: int) -> Check:
    """Exactly so many bytes."""

    def check(value: Any) -> bytes:  # noqa: ANN401
        data = check_bytes(value)
        if len(data) != size:
            raise Refused(f"has {len(data)} bytes where {size} belong")
        return data

    return check


def enumeration(symbols: Iterable[str]) -> Check:
    """One of the symbols, or a Python enum member whose value is one."""
    known = frozenset(symbols)

    def check(value: Any) -> str:  # noqa: ANN401
        symbol = value.value if isinstance(value, Enum) else value
        if type(symbol) is not str:
            raise mismatch(value, "a symbol")
        if symbol not in known:
            raise Refused(f"is none of {', '.join(sorted(known))}{did_you_mean(nearest(symbol, known))}")
        return symbol

    return check


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
