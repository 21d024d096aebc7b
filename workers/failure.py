"""Why an attempt failed, in the form in which it can leave the process that ran the handler."""

from __future__ import annotations

import time
from dataclasses import dataclass

from taskline.errors import HandBack
from taskline.schemas.events import PROCESS_DIED, ErrorCategory
from taskline.workers.classify import classify
from taskline.workers.outcome import ErrorInfo, describe_error
from taskline.workers.registry import Task

_MS = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A handler's error, described and judged; every field can be pickled."""

    info: ErrorInfo
    category: ErrorCategory
    # When to come back, as the error said: seconds from when it was raised; None: it did not.
    retry_after_seconds: float | None = None
    # True: come back exactly then; False: not before.
    exact: bool = False
    # False: another attempt can't help.
    retryable: bool = True
    # True: the handler asked for its execution to be given back.
    hand_back: bool = False


def failure_of(error: BaseException, task: Task, *, now_ms: int | None = None) -> Failure:
    """Describe and judge what a handler of `task` raised, or what became of its result.

    Args:
        error: what was raised.
        task: whose handler it was.
        now_ms: for a Retry-After that names an instant; None: by this process's clock.
    """
    verdict = classify(
        error, task.conduct.classify, now_ms=round(time.time() * _MS) if now_ms is None else now_ms
    )
    return Failure(
        info=describe_error(error),
        category=verdict.category,
        retry_after_seconds=verdict.retry_after_seconds,
        exact=verdict.exact,
        retryable=verdict.category is not ErrorCategory.PERMANENT,
        hand_back=isinstance(error, HandBack),
    )


def timed_out(limit_seconds: float) -> Failure:
    """The attempt's own time limit has passed."""
    return Failure(
        info=describe_error(TimeoutError(f"the handler did not end within {limit_seconds:g} s")),
        category=ErrorCategory.TIMEOUT,
    )


def cpu_spent(limit_seconds: float) -> Failure:
    """The attempt has used up its processor time."""
    return Failure(
        info=describe_error(
            TimeoutError(f"the handler used more than {limit_seconds:g} s of processor time (cpu_seconds)")
        ),
        category=ErrorCategory.TIMEOUT,
    )


def crashed(cause: str) -> Failure:
    """The process that ran the handler died under it, and nothing else ran in it."""
    return Failure(info=ErrorInfo(error_class=PROCESS_DIED, message=cause), category=ErrorCategory.CRASH)
