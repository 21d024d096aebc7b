"""What kind of error a handler's exception is. Pure, and without importing anybody's HTTP client.

The order: what the handler said itself (`Retry`, `Permanent`), the task's own classifier, the exception's type, the answer of an HTTP
server that it carries, the names of its classes. Only the exception itself is looked at, not what caused it: whoever wraps an error in
another has said something by it. What nothing is known of is `unknown`, and retried.
"""

from __future__ import annotations

import errno
import math
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.error import HTTPError, URLError

import structlog

from taskline.errors import (
    DeliveryError,
    HandBack,
    InvalidOption,
    InvalidPayload,
    InvalidResult,
    PayloadTooLarge,
    Permanent,
    Retry,
    SoftTimeout,
    Unavailable,
    UndecodablePayload,
)
from taskline.schemas.events import ErrorCategory

log = structlog.get_logger(__name__)

# A task's own judgement; None: Taskline's.
Classifier = Callable[[BaseException], "ErrorCategory | Retry | Permanent | None"]

_PERMANENT_TYPES = (InvalidOption, InvalidPayload, InvalidResult, PayloadTooLarge, UndecodablePayload)
_TRANSIENT_TYPES = (ConnectionError, TimeoutError, socket.gaierror, DeliveryError, Unavailable)
# What an operating system says when it, or a network, is only busy or broken for now.
_TRANSIENT_ERRNOS: Final = frozenset(
    {
        errno.EADDRNOTAVAIL,
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EMFILE,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.EPIPE,
        errno.ETIMEDOUT,
    }
)
# Base classes of transport errors in httpx, requests, urllib3, aiohttp, redis and their like.
_TRANSIENT_NAMES: Final = frozenset(
    {
        "ClientConnectionError",
        "ConnectTimeout",
        "ConnectionError",
        "NetworkError",
        "ReadTimeout",
        "RemoteProtocolError",
        "ServerTimeoutError",
        "Timeout",
        "TimeoutException",
    }
)
_ERROR_STATUSES: Final = range(400, 600)
_FIRST_SERVER_STATUS: Final = 500
_TOO_MANY_REQUESTS: Final = 429
# Client errors that say more of the moment than of the request: Request Timeout, Too Early.
_SERVER_LIKE: Final = frozenset({408, 425})
_RETRY_AFTER: Final = "retry-after"
# Ten digits of seconds are three centuries; int() of many more is somebody's attack.
_SECONDS: Final = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A judgement."""

    category: ErrorCategory
    # When to come back, in seconds from now; None: nobody said.
    retry_after_seconds: float | None = None
    # True: exactly then; False: not before.
    exact: bool = False


_UNKNOWN = Verdict(category=ErrorCategory.UNKNOWN)
_PERMANENT = Verdict(category=ErrorCategory.PERMANENT)
_TRANSIENT = Verdict(category=ErrorCategory.TRANSIENT)
_TIMEOUT = Verdict(category=ErrorCategory.TIMEOUT)
_MEMORY = Verdict(category=ErrorCategory.MEMORY)


def classify(error: BaseException, own: Classifier | None = None, *, now_ms: int) -> Verdict:
    """Judge what a handler raised.

    Args:
        error: what it raised.
        own: the task's classifier. What it raises, or returns that is no judgement, is logged and ignored.
        now_ms: for a Retry-After that names an instant.
    """
    said = _said(error)
    if said is not None:
        return said
    known = _known(error, now_ms)
    asked = None if own is None else _asked(own, error)
    if asked is None:
        return known
    if isinstance(asked, Verdict):
        return asked
    honoured = asked in (ErrorCategory.RATE_LIMITED, ErrorCategory.SERVER)
    return Verdict(category=asked, retry_after_seconds=known.retry_after_seconds if honoured else None)


def _said(error: object) -> Verdict | None:
    if isinstance(error, Permanent):
        return _PERMANENT
    if isinstance(error, HandBack):
        return _TRANSIENT
    if isinstance(error, Retry):
        after = error.after_seconds
        if after is None:
            return _TRANSIENT
        # Whoever says when to come back has been told, or knows, that it is too early now.
        return Verdict(category=ErrorCategory.RATE_LIMITED, retry_after_seconds=after, exact=True)
    return None


def _asked(own: Classifier, error: BaseException) -> ErrorCategory | Verdict | None:
    try:
        answer: object = own(error)
        if answer is None:
            return None
        said = _said(answer)
        if said is not None:
            return said
        category = ErrorCategory(answer)  # type: ignore[arg-type]
    except Exception:
        log.exception(
            "the task's own classifier failed; its judgement is ignored",
            classifier=getattr(own, "__qualname__", repr(own)),
            error_class=type(error).__qualname__,
        )
        return None
    if category is ErrorCategory.CRASH:
        # No handler survives to be asked about one.
        log.error(
            "a classifier can't tell a crash; its judgement is ignored", error_class=type(error).__qualname__
        )
        return None
    return category


def _known(error: BaseException, now_ms: int) -> Verdict:
    if isinstance(error, SoftTimeout | MemoryError):
        return _TIMEOUT if isinstance(error, SoftTimeout) else _MEMORY
    if isinstance(error, _PERMANENT_TYPES):
        return _PERMANENT
    try:
        # Before the types: urllib's HTTPError is an OSError too.
        answer = _answer(error)
        if answer is not None:
            return _of_answer(*answer, now_ms)
        if isinstance(error, URLError) and isinstance(error.reason, BaseException):
            return _known(error.reason, now_ms) if error.reason is not error else _UNKNOWN
    except Exception:
        # Properties of others' exceptions can raise anything (httpx: no response was set).
        return _of_type(error)
    return _of_type(error)


def _of_type(error: BaseException) -> Verdict:
    if isinstance(error, _TRANSIENT_TYPES):
        return _TRANSIENT
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return _TRANSIENT
    if any(kind.__name__ in _TRANSIENT_NAMES for kind in type(error).__mro__):
        return _TRANSIENT
    return _UNKNOWN


def _answer(error: BaseException) -> tuple[int, Any] | None:
    """The error status and the headers of the HTTP answer that an exception carries, if it does."""
    if isinstance(error, HTTPError) and error.code in _ERROR_STATUSES:
        return error.code, error.headers
    # Not `if response`: one of requests with an error status is false.
    response = getattr(error, "response", None)
    for holder in (error,) if response is None else (response, error):
        for name in ("status_code", "status"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and status in _ERROR_STATUSES:
                return int(status), getattr(holder, "headers", None)
    return None


def _of_answer(status: int, headers: Any, now_ms: int) -> Verdict:  # noqa: ANN401 - any client's mapping
    if status == _TOO_MANY_REQUESTS:
        category = ErrorCategory.RATE_LIMITED
    elif status in _SERVER_LIKE or status >= _FIRST_SERVER_STATUS:
        category = ErrorCategory.SERVER
    else:
        category = ErrorCategory.PERMANENT
    # Of a permanent one too: a task's classifier may know better (some say 403 for "too often").
    return Verdict(category=category, retry_after_seconds=_retry_after(headers, now_ms))


def _retry_after(headers: Any, now_ms: int) -> float | None:  # noqa: ANN401 - any client's mapping
    """RFC 9110, 10.2.3: seconds, or an HTTP date; anything else is ignored."""
    try:
        text = next((value for name, value in headers.items() if str(name).lower() == _RETRY_AFTER), None)
        text = str(text).strip()
        if _SECONDS.fullmatch(text):
            return float(text)
        at = parsedate_to_datetime(text)
        at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        left = at.timestamp() - now_ms / 1_000
    except Exception:
        return None
    return max(0.0, left) if math.isfinite(left) else None
