"""Idempotency keys: which key a request has, and whether two requests are the same.

Invariant: two requests have the same hash exactly if they ask for the same: whatever the order of fields, whatever the way in which a number of
seconds or an instant is written; a field that is null is absent. Within the payload nothing but the order of
fields is overlooked, since a task type may tell 1 from 1.0 and null from absent.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC
from typing import Any

import orjson
from starlette.requests import Request

from taskline.api.models import TaskSubmission
from taskline.api.problems import INVALID_FIELDS, ProblemError
from taskline.errors import InvalidOption
from taskline.producers.submission import MAX_NAME_CHARS

_HEADER = b"idempotency-key"
_FIELD = "idempotency_key"
_INSTANTS = ("scheduled_at", "start_by")
HEADER_PARAMETER: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Instead of the field `idempotency_key`.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS},
}


def with_header(submission: TaskSubmission, request: Request) -> TaskSubmission:
    """The submission with the key of the header Idempotency-Key, if there is one.

    Raises:
        InvalidOption: the header is no key, or the body has another one.
    """
    key = _header(request)
    if key is None:
        return submission
    if submission.idempotency_key not in (None, key):
        raise InvalidOption(_FIELD, "the header Idempotency-Key has another one")
    return submission.model_copy(update={_FIELD: key})


def refuse_header(request: Request) -> None:
    """For requests that submit several tasks.

    Raises:
        ProblemError: there is an Idempotency-Key.
    """
    if _header(request) is not None:
        detail = "a batch has no Idempotency-Key: give each of its tasks an idempotency_key"
        raise ProblemError(INVALID_FIELDS, detail, members={"errors": [{"pointer": "", "detail": detail}]})


def request_hash(submission: TaskSubmission) -> bytes:
    """SHA-256 of what is asked for, in a canonical form."""
    fields: dict[str, Any] = {
        name: value
        for name in TaskSubmission.model_fields
        if name != _FIELD and ((value := getattr(submission, name)) is not None or name == "payload")
    }
    for name in _INSTANTS:
        if name in fields:
            fields[name] = fields[name].astimezone(UTC).isoformat()
    return hashlib.sha256(_canonical(fields)).digest()


def _canonical(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        # Integers beyond 64 bits, which some schema may take.
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _header(request: Request) -> str | None:
    name: bytes
    value: bytes
    found: str | None = None
    for name, value in request.scope["headers"]:
        if name != _HEADER:
            continue
        if found is not None:
            raise InvalidOption(_FIELD, "there are several headers Idempotency-Key")
        found = _unquoted(value)
        if not 1 <= len(found) <= MAX_NAME_CHARS:
            raise InvalidOption(
                _FIELD,
                f"the header Idempotency-Key has {len(found)} characters; 1 to {MAX_NAME_CHARS} are allowed",
            )
    return found


def _unquoted(value: bytes) -> str:
    """The key as UTF-8, with or without the quotes of a structured field (draft-ietf-httpapi-idempotency-key-header)."""
    try:
        text = value.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise InvalidOption(_FIELD, "the header Idempotency-Key is not UTF-8") from None
    quoted = len(text) >= 2 and text[0] == text[-1] == '"'
    return text[1:-1] if quoted else text
