"""JSON payloads: what JSON can't carry is refused where it stands."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from taskline.schemas.json_values import dumps, loads
from taskline.schemas.refusal import Refused

ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=10,
)


@dataclass
class Point:
    x: Any


class Model(BaseModel):
    x: float


@given(ANY)
def test_json_comes_back(value: Any) -> None:
    assert loads(dumps(value)) == value


def test_what_orjson_knows_is_written_in_its_usual_form() -> None:
    moment, identity = datetime(2026, 5, 1, tzinfo=UTC), uuid.UUID(int=5)
    assert loads(dumps({"a": moment, "b": identity, "c": Point(1), "d": Model(x=1.5), "e": (1, 2)})) == {
        "a": "2026-05-01T00:00:00+00:00",
        "b": str(identity),
        "c": {"x": 1},
        "d": {"x": 1.5},
        "e": [1, 2],
    }


@pytest.mark.parametrize(
    ("value", "pointer", "reason"),
    [
        (float("nan"), "", "is not a finite number, and JSON has no other"),
        ({"a": [None, float("inf")]}, "/a/1", "is not a finite number, and JSON has no other"),
        ({"a": Point(float("nan"))}, "/a/x", "is not a finite number, and JSON has no other"),
        ([Model(x=float("nan"))], "/0/x", "is not a finite number, and JSON has no other"),
        ({"a": {1: 2}}, "/a", "has an integer as a key; the keys of a JSON object are strings"),
        ({"a": {1, 2}}, "/a", "a set where a JSON value belongs"),
        ({"a": b"x"}, "/a", "a bytes where a JSON value belongs"),
        ([2**64], "/0", "is outside the range of a 64-bit integer"),
        ({"a": "\ud800"}, "/a", "is not Unicode text (a lone surrogate)"),
        ({"\ud800": 1}, "", "has a key that is not Unicode text (a lone surrogate)"),
        ({"a/b": {"~": object()}}, "/a~1b/~0", "a object where a JSON value belongs"),
    ],
)
def test_what_is_refused(value: Any, pointer: str, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        dumps(value)
    assert (caught.value.pointer, caught.value.reason) == (pointer, reason)


def test_endless_nesting_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(Refused, match="nested too deeply"):
        dumps(value)


def test_nulls_are_not_suspicious() -> None:
    assert dumps({"a": None, "b": [None, "null"]}) == orjson.dumps({"a": None, "b": [None, "null"]})
