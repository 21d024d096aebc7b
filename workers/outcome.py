"""What is kept of a handler's end: its result as JSON, or its error in few enough bytes that it can always be written."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from taskline.errors import InvalidResult
from taskline.schemas import json_values
from taskline.schemas.refusal import Refused

# Together 4 KB: the dead-letter topic takes records twice as large as the dispatch topics, so a dead letter, which is the
# dispatch record and this, always fits.
MAX_ERROR_BYTES = 4_096
_MAX_CLASS_BYTES = 256
MAX_MESSAGE_BYTES = 1_536
_MAX_TRACEBACK_BYTES = MAX_ERROR_BYTES - _MAX_CLASS_BYTES - MAX_MESSAGE_BYTES
# Frames nearest to the error; more would not fit into the bytes anyway.
_MAX_FRAMES = 20
_MAX_LINE_BYTES = 400
_OWN_PACKAGE = "taskline.workers."


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorInfo:
    """An error as it is recorded."""

    error_class: str
    message: str
    traceback: str | None = None


def encode_result(value: Any, limit_bytes: int) -> bytes | None:  # noqa: ANN401 - whatever a handler returned
    """A handler's result as JSON in UTF-8; None for None.

    Dataclasses, pydantic models, datetimes, UUIDs and enums are written in their usual forms.

    Raises:
        InvalidResult: it is not JSON, or over the limit.
    """
    if value is None:
        return None
    try:
        encoded = json_values.dumps(value)
    except Refused as refused:
        raise InvalidResult(f"the result at {refused.pointer or '/'!r} {refused.reason}") from refused
    except Exception as error:
        # Properties and serialisers of a handler's own classes can raise anything.
        raise InvalidResult(f"the result, a {type(value).__qualname__}, is not JSON: {error}") from error
    if len(encoded) > limit_bytes:
        raise InvalidResult(
            f"the result has {len(encoded)} bytes as JSON; the limit is {limit_bytes} (worker.max_result_bytes)"
        )
    return encoded


def describe_error(error: BaseException) -> ErrorInfo:
    """An exception's class, text and the end of its traceback, each capped."""
    return ErrorInfo(
        error_class=head(class_name(type(error)), _MAX_CLASS_BYTES),
        message=head(_message(error), MAX_MESSAGE_BYTES),
        traceback=_traceback(error),
    )


def class_name(kind: type) -> str:
    """A class's qualified name, without the module of built-in ones."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _message(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        # Without the values that were refused, which pydantic's own text quotes.
        problems = error.errors(include_input=False, include_url=False, include_context=False)
        return "; ".join(f"/{'/'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems)
    try:
        return str(error)
    except Exception as nested:
        return f"(its text can't be had: {type(nested).__name__})"


def _traceback(error: BaseException) -> str | None:
    first = _handlers_own(error.__traceback__)
    if first is None:
        return None
    try:
        lines = traceback.format_exception(type(error), error, first, limit=-_MAX_FRAMES)
    except Exception:
        return None
    # A long message, which is kept of its own, must not push the frames out.
    return _tail("".join(head(line, _MAX_LINE_BYTES) for line in lines), _MAX_TRACEBACK_BYTES)


def _handlers_own(trace: TracebackType | None) -> TracebackType | None:
    # The frames of the worker's own code around the handler explain nothing.
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(_OWN_PACKAGE):
        trace = trace.tb_next
    return trace


def head(text: str, limit_bytes: int) -> str:
    """The beginning of a text, in at most so many bytes of UTF-8."""
    encoded = text.encode("utf-8", "replace")
    return encoded[:limit_bytes].decode("utf-8", "ignore")


def _tail(text: str, limit_bytes: int) -> str:
    encoded = text.encode("utf-8", "replace")
    return encoded[-limit_bytes:].decode("utf-8", "ignore")
