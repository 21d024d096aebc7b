"""Random records of every kind, for property tests of codecs."""

from __future__ import annotations

import types
import typing
import uuid
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any

from hypothesis import strategies as st

from taskline.schemas.events import RECORDS, AttemptError, LeaseRef, LifecycleEntry

_LONG = st.integers(-(2**63), 2**63 - 1)
_INT = st.integers(-(2**31), 2**31 - 1)
# Avro ints among the integer fields; all others are longs.
_INTS = {"attempt", "generation", "max_retries", "source_partition"}


def records(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any record of one class."""
    hints = typing.get_type_hints(kind)
    chosen = {field.name: _values(field.name, hints[field.name]) for field in fields(kind)}
    return st.builds(kind, **chosen)


def any_record() -> st.SearchStrategy[Any]:
    """Any record at all."""
    return st.sampled_from(RECORDS).flatmap(records)


def plain_record(kind: type[Any]) -> Any:
    """One record of a class, the same each time, with defaults where there are any."""
    hints = typing.get_type_hints(kind)
    return kind(
        **{field.name: _plain(hints[field.name]) for field in fields(kind) if field.default is MISSING}
    )


def _values(name: str, hint: Any) -> st.SearchStrategy[Any]:
    if isinstance(hint, types.UnionType):
        inner = next(each for each in typing.get_args(hint) if each is not type(None))
        return st.none() | _values(name, inner)
    if hint is bytes:
        size = 8 if name == "payload_fingerprint" else None
        return st.binary(min_size=size or 0, max_size=size or 40)
    if hint is int:
        return _INT if name in _INTS else _LONG
    if hint == tuple[LifecycleEntry, ...]:
        return st.lists(records(LifecycleEntry), max_size=4).map(tuple)
    if hint == tuple[AttemptError, ...]:
        return st.lists(records(AttemptError), max_size=3).map(tuple)
    if hint == tuple[LeaseRef, ...]:
        return st.lists(records(LeaseRef), max_size=3).map(tuple)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if hint is float:
        # The only ones are fractions; what else a double can hold is refused where it is read.
        return st.floats(0, 1)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(st.characters(codec="utf-8"), max_size=20),
        bool: st.booleans(),
        uuid.UUID: st.uuids(),
    }
    return simple[hint]


def _plain(hint: Any) -> Any:
    if hint == tuple[LifecycleEntry, ...]:
        return (plain_record(LifecycleEntry),)
    if hint == tuple[LeaseRef, ...]:
        return (plain_record(LeaseRef),)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    return {str: "text", bytes: b"bytes", int: 7, float: 0.5, bool: True, uuid.UUID: uuid.UUID(int=7)}[hint]
