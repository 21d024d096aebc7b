"""Which problem each error is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException

from taskline.api import problems
from taskline.api.problems import ProblemError
from taskline.errors import (
    GenerationsExhausted,
    InvalidCursor,
    InvalidOption,
    InvalidPayload,
    InvalidRequest,
    InvalidTaskId,
    LetterGone,
    LetterNotFound,
    LetterResolved,
    NotReplayable,
    PayloadTooLarge,
    TaskNotFound,
    Unavailable,
    UnknownSchema,
    UnknownTaskType,
)

_RETRY_AFTER: dict[str, str] = {"retry-after": "2"}


def problem_of(error: Exception) -> ProblemError:
    """The problem that answers an error which a route let through.

    Raises:
        Exception: the error itself, when nothing but a fault of the server explains it.
    """
    for kind, translate in _PROBLEMS:
        if isinstance(error, kind):
            return translate(error)
    raise error


def _payload(error: InvalidPayload) -> ProblemError:
    return ProblemError(
        problems.INVALID_PAYLOAD,
        str(error),
        members={"task_type": error.task_type, "pointer": error.pointer},
    )


def _too_large(error: PayloadTooLarge) -> ProblemError:
    return ProblemError(
        problems.TOO_LARGE,
        str(error),
        members={"limit_bytes": error.limit_bytes, "size_bytes": error.size_bytes},
    )


def _unknown_type(error: UnknownTaskType) -> ProblemError:
    return ProblemError(
        problems.UNKNOWN_TASK_TYPE,
        str(error),
        members={"task_type": error.task_type, "nearest": error.nearest},
    )


# Options whose field has another name here.
_FIELD_OF = {"delay": "delay_seconds", "not_before": "scheduled_at"}


def _option(error: InvalidOption) -> ProblemError:
    field = _FIELD_OF.get(error.option, error.option)
    detail = f"{field}: {error.reason}"
    return ProblemError(
        problems.INVALID_FIELDS, detail, members={"errors": [{"pointer": f"/{field}", "detail": detail}]}
    )


def _resolved(error: LetterResolved) -> ProblemError:
    return ProblemError(
        problems.LETTER_RESOLVED,
        str(error),
        members={"replayed_as": None if error.replayed_as is None else str(error.replayed_as)},
    )


def _without_place(error: LetterGone) -> str:
    # Names of topics are no caller's business.
    return f"dead letter {error.letter_id} is not in the log any more"


def _http(error: HTTPException) -> ProblemError:
    # The framework's own: no route for the path, or none for the method.
    if error.status_code == problems.NOT_FOUND.status:
        return ProblemError(problems.NOT_FOUND, "there is nothing at this path")
    if error.status_code == problems.METHOD_NOT_ALLOWED.status:
        return ProblemError(
            problems.METHOD_NOT_ALLOWED, "the path does not take this method", headers=error.headers
        )
    raise error


# The first class that fits decides.
_PROBLEMS: tuple[tuple[type[Exception], Callable[[Any], ProblemError]], ...] = (
    (ProblemError, lambda error: error),
    (InvalidTaskId, lambda error: ProblemError(problems.INVALID_TASK_ID, str(error))),
    (InvalidCursor, lambda error: ProblemError(problems.INVALID_CURSOR, str(error))),
    (TaskNotFound, lambda error: ProblemError(problems.TASK_NOT_FOUND, str(error))),
    (LetterNotFound, lambda error: ProblemError(problems.LETTER_NOT_FOUND, str(error))),
    (LetterResolved, _resolved),
    (LetterGone, lambda error: ProblemError(problems.LETTER_GONE, _without_place(error))),
    (GenerationsExhausted, lambda error: ProblemError(problems.GENERATIONS_EXHAUSTED, str(error))),
    (NotReplayable, lambda error: ProblemError(problems.NOT_REPLAYABLE, str(error))),
    (UnknownTaskType, _unknown_type),
    (InvalidPayload, _payload),
    (PayloadTooLarge, _too_large),
    (InvalidOption, _option),
    (InvalidRequest, lambda error: ProblemError(problems.INVALID_FIELDS, str(error))),
    # Another process of a newer version can read it.
    (
        UnknownSchema,
        lambda error: ProblemError(problems.VIEW_UNAVAILABLE, str(error), headers=_RETRY_AFTER),
    ),
    (Unavailable, lambda error: ProblemError(problems.VIEW_UNAVAILABLE, str(error), headers=_RETRY_AFTER)),
    (HTTPException, _http),
)
