"""JSON payloads and results: plain values ↔ UTF-8 bytes, refusing what JSON can't carry instead of bending it.

`orjson` writes what it knows (also datetimes, UUIDs, enums and dataclasses, in their usual text forms); pydantic models are
dumped. NaN and infinities are refused: `orjson` would turn them into null.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, is_dataclass
from typing import Any

import orjson
from pydantic import BaseModel

from taskline.schemas.refusal import Refused, kind_of, mismatch

# What a JSON integer can be in orjson: from the smallest signed to the largest unsigned 64-bit number.
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1
_NULL = b"null"
# Integers of as many digits may not fit into 64 bits; shorter ones always do.
_LONG_NUMBER = re.compile(rb"\d{19}")


def exact_integers(data: bytes, value: Any) -> Any:  # noqa: ANN401 - JSON
    """`value`, which orjson has read from `data`, with integers of any size exact.

    The fast parser makes floats of integers beyond 64 bits, which loses their digits; the codec refuses them and names the field, if
    it sees them.
    """
    # More lenient than the other, but that one has agreed already.
    return json.loads(data) if _LONG_NUMBER.search(data) is not None else value


def dumps(value: Any) -> bytes:  # noqa: ANN401 - JSON
    """A value as compact JSON.

    Raises:
        Refused: JSON has no form for it, or for something inside; the path leads there.
    """
    try:
        data = orjson.dumps(value, default=_plain)
        # A NaN leaves its trace as null, so that only such payloads need a second look.
        if _NULL in data:
            _inspect(value)
    except (TypeError, RecursionError):
        try:
            _inspect(value)
        except RecursionError:
            raise Refused("is nested too deeply for JSON") from None
        raise Refused("can't be written as JSON") from None
    return data


def loads(data: bytes) -> Any:  # noqa: ANN401 - JSON
    """The value of a JSON document.

    Raises:
        ValueError: not JSON.
    """
    return orjson.loads(data)


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever orjson does not know
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError


def _inspect(value: Any) -> None:  # noqa: ANN401 - JSON
    """Find what can't be written."""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        if not _encodable(value):
            raise Refused("is not Unicode text (a lone surrogate)")
    elif isinstance(value, int):
        if not _SMALLEST <= value <= _LARGEST:
            raise Refused("is outside the range of a 64-bit integer")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise Refused("is not a finite number, and JSON has no other")
    else:
        _inspect_container(value)


def _inspect_container(value: Any) -> None:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise Refused(f"has {kind_of(key)} as a key; the keys of a JSON object are strings")
            if not _encodable(key):
                raise Refused("has a key that is not Unicode text (a lone surrogate)")
            _inspect_at(key, item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _inspect_at(index, item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _inspect_at(field.name, getattr(value, field.name))
    elif isinstance(value, BaseModel):
        _inspect(value.model_dump(mode="json"))
    else:
        try:
            orjson.dumps(value)
        except TypeError:
            raise mismatch(value, "a JSON value") from None


def _inspect_at(token: str | int, value: Any) -> None:  # noqa: ANN401 - JSON
    try:
        _inspect(value)
    except Refused as refused:
        raise refused.under(token) from None


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
