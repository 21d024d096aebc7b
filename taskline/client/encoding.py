"""Payloads as JSON, without changing what they say: no NaN becomes null, no integer is rounded."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Mapping
from datetime import date, datetime, time
from enum import Enum
from typing import Any

from taskline.errors import InvalidPayload


def to_json(document: Mapping[str, Any], task_type: str) -> bytes:
    """A request's body. Dataclasses, pydantic models, UUIDs, enums, dates and times are written as the schemas read them.

    Raises:
        InvalidPayload: a value has no form in JSON.
    """
    try:
        text = json.dumps(
            document, default=_plain, allow_nan=False, ensure_ascii=False, separators=(",", ":")
        )
        return text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidPayload(task_type, "", f"can't be written as JSON: {error}") from error


def _plain(value: Any) -> Any:  # noqa: ANN401 - any value of a payload
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    raise TypeError(f"{type(value).__name__} is not JSON")
