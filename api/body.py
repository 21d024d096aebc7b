"""A request's body: read within bounds, parsed without losing a digit, checked field by field."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from taskline.api.models import TaskSubmission
from taskline.api.problems import (
    BODY_TIMEOUT,
    INVALID_FIELDS,
    MALFORMED_BODY,
    TOO_LARGE,
    UNSUPPORTED_MEDIA_TYPE,
    ProblemError,
)
from taskline.errors import did_you_mean, nearest
from taskline.schemas.json_values import exact_integers

M = TypeVar("M", bound=BaseModel)

# Nesting that every JSON and Avro encoder here takes without reaching a recursion limit.
MAX_DEPTH = 128
# Error entries in one answer; a caller mends a few at a time.
_MAX_ERRORS = 10
# Characters of a caller's own input that an answer repeats.
_MAX_ECHO = 64
# An object with so many times more fields is not a request with a slip in it, and is not worth a message per field.
_FIELDS_FACTOR = 4
_SUBMISSION_WANTED = "a JSON object is wanted, with at least task_type and payload"
# Names that callers try, and why they are not fields of a submission.
_NOT_FIELDS: Mapping[str, str] = {
    "queue": "the queue is the task type's",
    "task_id": "task ids are minted by Taskline",
    "tenant": "the tenant is the caller's",
}


async def read_body(request: Request, *, limit_bytes: int, timeout_seconds: float) -> bytes:
    """The whole body of a JSON request.

    A declared length over the limit is refused unread, an undeclared one as soon as the limit is passed.

    Raises:
        ProblemError: not JSON by its headers (415), too large (413), or too slow (408).
    """
    headers = request.headers
    _check_media_type(headers.get("content-type"), headers.get("content-encoding"))
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit_bytes:
        raise _too_large(limit_bytes, int(declared[:20]))
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit_bytes:
                    raise _too_large(limit_bytes, None)
    except TimeoutError:
        # What still arrives would be read as the next request's head.
        raise ProblemError(
            BODY_TIMEOUT,
            f"after {timeout_seconds:g} seconds only {len(body)} bytes had arrived",
            headers={"connection": "close"},
        ) from None
    return bytes(body)


def parse_submission(body: bytes) -> TaskSubmission:
    """Read a submission.

    Raises:
        ProblemError: not a JSON object (422), or unknown, missing or wrong fields (422, all of them listed).
    """
    return parse_body(body, TaskSubmission, wanted=_SUBMISSION_WANTED)


def submission_of(document: object) -> TaskSubmission:
    """Check a submission that was parsed already; raises as `parse_submission`."""
    return checked(document, TaskSubmission, wanted=_SUBMISSION_WANTED)


def parse_body(body: bytes, model: type[M], *, wanted: str = "a JSON object is wanted") -> M:
    """Read a body of any kind; raises as `parse_submission`."""
    return checked(_loads(body), model, wanted=wanted)


def checked(document: object, model: type[M], *, wanted: str) -> M:
    """Check what was parsed already; raises as `parse_submission`."""
    if not isinstance(document, dict):
        raise ProblemError(MALFORMED_BODY, wanted)
    fields = tuple(model.model_fields)
    if len(document) > _FIELDS_FACTOR * len(fields):
        raise ProblemError(INVALID_FIELDS, f"{len(document)} fields; there are {len(fields)}")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        found = [_describe(item, fields) for item in error.errors(include_url=False, include_context=False)]
        raise ProblemError(
            INVALID_FIELDS,
            "; ".join(entry["detail"] for entry in found[:_MAX_ERRORS]),
            members={"errors": found[:_MAX_ERRORS]},
        ) from error


def _check_media_type(content_type: str | None, encoding: str | None) -> None:
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        given = f"it came as {media_type[:_MAX_ECHO]!r}" if media_type else "it came without a Content-Type"
        raise ProblemError(UNSUPPORTED_MEDIA_TYPE, f"the body must be application/json; {given}")
    if encoding and encoding.strip().lower() != "identity":
        raise ProblemError(
            UNSUPPORTED_MEDIA_TYPE, f"Content-Encoding {encoding[:_MAX_ECHO]!r} is not taken here"
        )


def _too_large(limit_bytes: int, size_bytes: int | None) -> ProblemError:
    size = "more than that" if size_bytes is None else f"{size_bytes} bytes"
    return ProblemError(
        TOO_LARGE,
        f"the body may have {limit_bytes} bytes and has {size}",
        members={"limit_bytes": limit_bytes, "size_bytes": size_bytes},
    )


def _check_depth(body: bytes, document: object) -> None:
    # Few brackets can't nest deeply: the walk is for the rare body only.
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    level: list[object] = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ProblemError(MALFORMED_BODY, f"nested more than {MAX_DEPTH} deep")


def _loads(body: bytes) -> object:
    """The body's value, with integers of any size exact."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ProblemError(MALFORMED_BODY, f"not JSON: {error}") from error
    _check_depth(body, document)
    return exact_integers(body, document)


def _describe(item: ErrorDetails, fields: Sequence[str]) -> dict[str, Any]:
    name = str(item["loc"][-1]) if item["loc"] else ""
    pointer = "".join("/" + _escape(str(part)) for part in item["loc"])[:512]
    shown = repr(name[:_MAX_ECHO])
    if item["type"] == "extra_forbidden":
        close = nearest(name[:_MAX_ECHO], fields)
        reason = _NOT_FIELDS.get(name)
        detail = f"unknown field {shown}" + (f": {reason}" if reason else did_you_mean(close))
        return {"pointer": pointer, "detail": detail} | ({"nearest": close} if close and not reason else {})
    if item["type"] == "missing":
        return {"pointer": pointer, "detail": f"field {shown} is missing"}
    return {"pointer": pointer, "detail": f"{shown}: {item['msg'][:200]}"}


def _escape(part: str) -> str:
    # RFC 6901 §3.
    return part.replace("~", "~0").replace("/", "~1")
