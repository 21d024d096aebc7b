"""From a refusal to the exception that says it best: a table by problem type, and by status for what is not in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import orjson

from taskline.client.errors import (
    ApiError,
    CancelRefused,
    Conflict,
    Forbidden,
    IdempotencyConflict,
    InvalidFields,
    Problem,
    RateLimited,
    ServerFault,
    ServiceUnavailable,
    SubmissionUnknown,
    Unauthorized,
    UnexpectedAnswer,
)
from taskline.client.wire import Answer
from taskline.errors import (
    InvalidCursor,
    InvalidPayload,
    InvalidTaskId,
    LetterNotFound,
    LetterResolved,
    NotReplayable,
    PayloadTooLarge,
    TasklineError,
    TaskNotFound,
    UnknownTaskType,
)

_URN = "urn:taskline:problem:"
_OWN = frozenset({"type", "title", "status", "detail", "instance"})
_SERVER_ERRORS = 500
_UNAVAILABLE = 503
_MAX_SHOWN = 200


def problem_in(answer: Answer) -> Problem:
    """The problem that an answer of 400 or above tells; one without a type when it is not Taskline's."""
    document: Any = None
    with suppress(orjson.JSONDecodeError):
        document = orjson.loads(answer.body)
    after = _seconds(answer.headers.get("retry-after"))
    if not isinstance(document, dict) or not str(document.get("type", "")).startswith(_URN):
        shown = answer.body[:_MAX_SHOWN].decode("utf-8", "replace")
        return Problem(
            status=answer.status,
            type="",
            title=f"HTTP status {answer.status}",
            detail=shown,
            retry_after=after,
        )
    return problem_of(document, status=answer.status, retry_after=after)


def problem_of(document: Mapping[str, Any], *, status: int, retry_after: float | None = None) -> Problem:
    """A problem's document."""
    return Problem(
        status=status,
        type=str(document.get("type", "")).removeprefix(_URN),
        title=str(document.get("title", "")),
        detail=str(document.get("detail", "")),
        instance=document.get("instance"),
        retry_after=retry_after,
        members={name: value for name, value in document.items() if name not in _OWN},
    )


def error_of(problem: Problem, *, subject: str, idempotency_key: str | None = None) -> TasklineError:
    """The exception for a problem; where it is a class of `taskline.errors`, the `ApiError` is its cause.

    Args:
        problem: what the API said.
        subject: the id that the request was about.
        idempotency_key: the submission's, if it had one.
    """
    make = _BY_TYPE.get(problem.type)
    if make is None:
        return _by_status(problem)
    error = make(problem, subject)
    if isinstance(error, SubmissionUnknown):
        error.idempotency_key = idempotency_key
    if not isinstance(error, ApiError):
        error.__cause__ = _by_status(problem)
    return error


def _by_status(problem: Problem) -> ApiError:
    if not problem.type and problem.status != _UNAVAILABLE:
        return UnexpectedAnswer(problem)
    kind = _BY_STATUS.get(problem.status)
    if kind is None:
        kind = ServerFault if problem.status >= _SERVER_ERRORS else ApiError
    return kind(problem)


def _seconds(text: str | None) -> float | None:
    # A date, which proxies may send, is not worth a parser: the usual pause will do.
    return float(text) if text is not None and text.isascii() and text.isdigit() else None


def _payload(problem: Problem, _: str) -> InvalidPayload:
    members = problem.members
    task_type, pointer = str(members.get("task_type", "")), str(members.get("pointer", ""))
    # Its own message begins with the same words.
    prefix = f"payload of {task_type!r} at {pointer or '/'!r}: "
    return InvalidPayload(task_type, pointer, problem.detail.removeprefix(prefix))


def _unknown_type(problem: Problem, _: str) -> UnknownTaskType:
    close = problem.members.get("nearest")
    return UnknownTaskType(
        str(problem.members.get("task_type", "")), [close] if isinstance(close, str) else ()
    )


def _too_large(problem: Problem, _: str) -> TasklineError:
    size, limit = problem.members.get("size_bytes"), problem.members.get("limit_bytes")
    if isinstance(size, int) and isinstance(limit, int):
        return PayloadTooLarge(size, limit)
    return InvalidFields(problem)


def _resolved(problem: Problem, subject: str) -> LetterResolved:
    replayed_as = problem.members.get("replayed_as")
    return LetterResolved(subject, "replayed" if replayed_as else "discarded", replayed_as)


def _unknown(problem: Problem, _: str) -> SubmissionUnknown:
    task_id = problem.members.get("task_id")
    return SubmissionUnknown(problem.detail, task_id=None if task_id is None else str(task_id))


# The end of the problem's URN → the exception.
_BY_TYPE: dict[str, Callable[[Problem, str], TasklineError]] = {
    "invalid-task-id": lambda problem, _: InvalidTaskId(problem.detail),
    "invalid-cursor": lambda problem, _: InvalidCursor(problem.detail),
    "unknown-task-type": _unknown_type,
    "invalid-payload": _payload,
    "too-large": _too_large,
    "task-not-found": lambda _, subject: TaskNotFound(subject),
    "dead-letter-not-found": lambda _, subject: LetterNotFound(subject),
    "dead-letter-resolved": _resolved,
    "not-replayable": lambda problem, subject: NotReplayable(subject, problem.detail),
    "delivery-unknown": _unknown,
    "submission-in-progress": _unknown,
    "not-cancelled": lambda problem, _: CancelRefused(problem),
    "idempotency-conflict": lambda problem, _: IdempotencyConflict(problem),
}
_BY_STATUS: dict[int, type[ApiError]] = {
    400: InvalidFields,
    401: Unauthorized,
    403: Forbidden,
    409: Conflict,
    413: InvalidFields,
    415: InvalidFields,
    422: InvalidFields,
    429: RateLimited,
    500: ServerFault,
    503: ServiceUnavailable,
}
