"""Payloads for workers that have no Avro: JSON, in the forms that a submission may use. Pure."""

from __future__ import annotations

import base64
from datetime import timedelta
from decimal import Decimal
from typing import Any

import orjson
from pydantic import TypeAdapter

_DURATIONS = TypeAdapter(timedelta)


def payload_json(value: Any) -> bytes:  # noqa: ANN401 - a payload
    """A decoded payload as JSON: bytes as base64, decimals and durations as text, instants and UUIDs in their usual forms.

    Raises:
        TypeError: JSON has no form for it.
    """
    return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever orjson does not know
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, timedelta):
        return _DURATIONS.dump_python(value, mode="json")
    if isinstance(value, int):
        # Beyond 64 bits.
        return orjson.Fragment(str(value))
    raise TypeError
