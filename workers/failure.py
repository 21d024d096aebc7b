"""Why an attempt failed, in the form in which it can leave the process that ran the handler."""

from __future__ import annotations

from dataclasses import dataclass

from taskline.errors import InvalidResult
from taskline.schemas.events import ErrorCategory
from taskline.workers.outcome import ErrorInfo, describe_error
from taskline.workers.registry import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A handler's error, described and judged; every field can be pickled."""

    info: ErrorInfo
    category: ErrorCategory
    # When to come back, as the error said: seconds from when it was raised; None: it did not.
    retry_after_seconds: float | None = None
    # False: another attempt can't help.
    retryable: bool = True


def failure_of(error: BaseException, task: Task) -> Failure:
    """Describe and judge what a handler of `task` raised, or what became of its result."""
    permanent = isinstance(error, InvalidResult)
    return Failure(
        info=describe_error(error),
        category=ErrorCategory.PERMANENT if permanent else ErrorCategory.UNKNOWN,
        retryable=not permanent,
    )
