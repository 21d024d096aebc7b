from __future__ import annotations

import enum
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from taskline.errors import InvalidResult
from taskline.workers.outcome import MAX_ERROR_BYTES, describe_error, encode_result


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Inner:
    at: datetime


class Outer(BaseModel):
    inner: Inner
    colour: Colour


AT = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (None, None),
        (0, b"0"),
        ("é", '"é"'.encode()),
        ([1, (2,)], b"[1,[2]]"),
        (Inner(at=AT), b'{"at":"2026-01-02T00:00:00+00:00"}'),
        (
            Outer(inner=Inner(at=AT), colour=Colour.RED),
            b'{"inner":{"at":"2026-01-02T00:00:00Z"},"colour":"red"}',
        ),
        (
            {"id": uuid.UUID(int=1), "c": Colour.RED},
            b'{"id":"00000000-0000-0000-0000-000000000001","c":"red"}',
        ),
    ],
)
def test_results_are_json(value: Any, encoded: bytes | None) -> None:
    assert encode_result(value, 1_000) == encoded


class Hostile(BaseModel):
    x: int = 1

    def model_dump(self, **_: Any) -> dict[str, Any]:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value", [object(), {1}, b"x", 2**64, float("inf"), "\ud800", {"a": [object()]}, Hostile()]
)
def test_what_is_not_json_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(InvalidResult, match="the result"):
        encode_result(value, 1_000)


def test_a_deep_result_is_refused_and_the_limit_is_exact() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidResult):
        encode_result(deep, 10**9)
    assert encode_result("x" * 8, 10) == b'"xxxxxxxx"'
    with pytest.raises(InvalidResult, match="11 bytes as JSON; the limit is 10"):
        encode_result("x" * 9, 10)


@given(st.text(), st.integers(0, 50))
def test_any_error_fits(text: str, depth: int) -> None:
    def fail(left: int) -> None:
        if left:
            fail(left - 1)
        raise ValueError(text * 200)

    try:
        fail(depth)
    except ValueError as error:
        info = describe_error(error)
    parts = (info.error_class, info.message, info.traceback or "")
    assert sum(len(part.encode()) for part in parts) <= MAX_ERROR_BYTES
    assert "fail" in (info.traceback or "")


def test_a_cause_is_part_of_the_traceback() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise RuntimeError("outer") from inner
    except RuntimeError as error:
        info = describe_error(error)
    assert info.traceback is not None
    assert "KeyError: 'inner'" in info.traceback
    assert "direct cause" in info.traceback


def test_the_values_that_a_validation_refused_are_not_quoted() -> None:
    class Secret(BaseModel):
        number: int

    with pytest.raises(ValidationError) as refused:
        Secret(number="hunter2")  # type: ignore[arg-type]
    info = describe_error(refused.value)
    assert "hunter2" not in info.message
    assert info.message.startswith("/number: ")
