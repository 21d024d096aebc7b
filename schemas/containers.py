"""Strict checks of values that have parts: arrays, maps and records, the latter from dicts and from instances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

from taskline.errors import did_you_mean, nearest
from taskline.schemas.refusal import Refused, kind_of, mismatch
from taskline.schemas.scalars import Check, check_string

# Stands for "the field has no default"; None is a default.
ABSENT: Any = object()
# An unknown field's name is quoted back up to here.
_QUOTED = 100


def array(item: Check) -> Check:
    """A list or tuple, each item as `item` says."""

    def check(value: Any) -> list[Any]:  # noqa: ANN401
        if not isinstance(value, list | tuple):
            raise mismatch(value, "an array")
        native: list[Any] = []
        append = native.append
        try:
            for element in value:
                append(item(element))
        except Refused as refused:
            refused.under(len(native))
            raise
        return native

    return check


def mapping(member: Check) -> Check:
    """A mapping with strings as keys, each value as `member` says."""

    def check(value: Any) -> dict[str, Any]:  # noqa: ANN401
        if not isinstance(value, Mapping):
            raise mismatch(value, "an object")
        native: dict[str, Any] = {}
        for key, element in value.items():
            if not isinstance(key, str):
                raise _odd_key(key)
            try:
                native[check_string(key)] = member(element)
            except Refused as refused:
                refused.under(key)
                raise
        return native

    return check


def record(members: Iterable[tuple[str, Check, Any]]) -> Check:
    """A dict, or an instance of a dataclass or pydantic model, with exactly these members.

    Args:
        members: name, check, and what is written when the member is not given (`ABSENT`: it must be).
    """
    members = tuple(members)
    names = frozenset(name for name, _, _ in members)
    total = len(members)

    def check(value: Any) -> dict[str, Any]:  # noqa: ANN401
        given = value if type(value) is dict else _members_of(value)
        native: dict[str, Any] = {}
        defaulted = 0
        missing = name = None
        try:
            for name, convert, default in members:
                if name in given:
                    native[name] = convert(given[name])
                elif default is ABSENT:
                    missing = name
                    break
                else:
                    native[name] = default
                    defaulted += 1
        except Refused as refused:
            refused.under(name or "")
            raise
        if missing is not None or len(given) + defaulted != total:
            raise _wrong_members(given, names, missing)
        return native

    return check


def _wrong_members(given: Mapping[Any, Any], names: frozenset[str], missing: str | None) -> Refused:
    # The unknown one comes first: a misspelt field is both unknown and missing, and its own name says more.
    for key in given:
        if key not in names:
            if not isinstance(key, str):
                return _odd_key(key)
            hint = did_you_mean(nearest(key[:_QUOTED], names - given.keys()))
            return Refused(f"unknown field{hint}").under(key)
    return Refused("is missing and has no default").under(missing or "")


def _odd_key(key: object) -> Refused:
    return Refused(f"has {kind_of(key)} as a key; keys are strings")


def _members_of(value: Any) -> Mapping[str, Any]:  # noqa: ANN401
    """The members of anything that is not a plain dict."""
    names = _field_names(type(value))  # type: ignore[arg-type]  # classes are hashable
    if names is not None:
        # A model that was made without validation may lack some.
        members = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return members | extra if (extra := getattr(value, "__pydantic_extra__", None)) else members
    if isinstance(value, Mapping):
        return value
    raise mismatch(value, "an object")


@lru_cache(maxsize=1024)
def _field_names(kind: type) -> tuple[str, ...] | None:
    """The fields that instances of a payload class carry, None for any other class."""
    if issubclass(kind, BaseModel):
        return tuple(kind.model_fields)
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind) if field.init)
    return None
