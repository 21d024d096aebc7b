from __future__ import annotations

import asyncio
import email.message
import errno
import pickle
import socket
import ssl
import urllib.error
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskline.errors import (
    DeliveryUnknown,
    InvalidPayload,
    InvalidResult,
    Permanent,
    Retry,
    SoftTimeout,
    Unavailable,
    UnknownTaskType,
)
from taskline.schemas.events import ErrorCategory
from taskline.workers.classify import Verdict, classify
from taskline.workers.failure import failure_of
from taskline.workers.registry import task

NOW = 1_800_000_000_000
AT = datetime.fromtimestamp(NOW / 1_000, tz=UTC)
REQUEST = httpx.Request("GET", "https://example.org/")


def category(error: BaseException) -> ErrorCategory:
    return classify(error, now_ms=NOW).category


def answered(status: int, headers: dict[str, str] | None = None) -> httpx.HTTPStatusError:
    response = httpx.Response(status, headers=headers, request=REQUEST)
    with pytest.raises(httpx.HTTPStatusError) as raised:
        response.raise_for_status()
    return raised.value


def urllib_error(status: int, headers: dict[str, str] | None = None) -> urllib.error.HTTPError:
    message = email.message.Message()
    for name, value in (headers or {}).items():
        message[name] = value
    return urllib.error.HTTPError("https://example.org/", status, "no", message, None)


class RequestsResponse:
    """As of `requests`: false when the status is an error's."""

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status_code = status
        self.headers = headers

    def __bool__(self) -> bool:
        return False


class RequestsError(OSError):
    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__("no")
        self.response = RequestsResponse(status, headers or {})


class ClientResponseError(Exception):
    """As of `aiohttp`."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__("no")
        self.status = status
        self.headers = headers


CLIENTS = pytest.mark.parametrize("client", [answered, urllib_error, RequestsError, ClientResponseError])

# ---- what the handler says --------------------------------------------------------------------------------------


def test_a_handler_decides_first() -> None:
    def never(error: BaseException) -> ErrorCategory:
        raise AssertionError

    assert classify(Permanent("x"), never, now_ms=NOW) == Verdict(category=ErrorCategory.PERMANENT)
    assert classify(Retry(), never, now_ms=NOW) == Verdict(category=ErrorCategory.TRANSIENT)
    assert classify(Retry(after=3), never, now_ms=NOW) == Verdict(
        category=ErrorCategory.RATE_LIMITED, retry_after_seconds=3.0, exact=True
    )


def test_retry_takes_seconds_or_a_timedelta_and_refuses_what_is_no_time() -> None:
    assert Retry(after=timedelta(minutes=1)).after_seconds == 60
    assert Retry(1.5, "busy").after_seconds == 1.5
    assert (str(Retry(reason="busy")), str(Retry())) == ("busy", "the handler asked for another attempt")
    for bad in (-1, float("nan"), float("inf"), timedelta(seconds=-1)):
        with pytest.raises(ValueError, match="Retry"):
            Retry(after=bad)


def test_what_a_handler_says_survives_being_pickled() -> None:
    for error in (Retry(after=3, reason="busy"), Retry(), Permanent("gone")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


# ---- the task's own classifier ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("judgement", "verdict"),
    [
        (ErrorCategory.PERMANENT, Verdict(category=ErrorCategory.PERMANENT)),
        ("transient", Verdict(category=ErrorCategory.TRANSIENT)),
        (
            Retry(after=7),
            Verdict(category=ErrorCategory.RATE_LIMITED, retry_after_seconds=7.0, exact=True),
        ),
        (Permanent("x"), Verdict(category=ErrorCategory.PERMANENT)),
        # Nothing said, or nothing that is a judgement: as if nobody had been asked.
        (None, Verdict(category=ErrorCategory.TRANSIENT)),
        ("perhaps", Verdict(category=ErrorCategory.TRANSIENT)),
        (7, Verdict(category=ErrorCategory.TRANSIENT)),
        (ErrorCategory.CRASH, Verdict(category=ErrorCategory.TRANSIENT)),
    ],
)
def test_the_tasks_classifier_goes_before_the_type(judgement: Any, verdict: Verdict) -> None:
    assert classify(ConnectionError("x"), lambda error: judgement, now_ms=NOW) == verdict


def test_a_classifier_that_fails_is_ignored() -> None:
    def broken(error: BaseException) -> ErrorCategory:
        raise RuntimeError("a bug of its own")

    assert classify(ConnectionError("x"), broken, now_ms=NOW).category is ErrorCategory.TRANSIENT


def test_a_retry_after_is_honoured_where_the_classifier_only_names_the_kind() -> None:
    # As GitHub says it.
    error = answered(403, {"retry-after": "5"})
    limited = classify(error, lambda _: ErrorCategory.RATE_LIMITED, now_ms=NOW)
    assert limited == Verdict(category=ErrorCategory.RATE_LIMITED, retry_after_seconds=5.0)
    error = answered(429, {"retry-after": "5"})
    assert classify(error, lambda _: ErrorCategory.SERVER, now_ms=NOW).retry_after_seconds == 5
    assert classify(error, lambda _: ErrorCategory.UNKNOWN, now_ms=NOW).retry_after_seconds is None


def test_failure_of_asks_the_tasks_classifier_and_describes_the_error() -> None:
    @task("mine", classify=lambda error: ErrorCategory.PERMANENT)
    def mine(payload: Any) -> None: ...

    @task("plain")
    def plain(payload: Any) -> None: ...

    failure = failure_of(LookupError("x"), mine)
    assert (failure.category, failure.retryable) == (ErrorCategory.PERMANENT, False)
    failure = failure_of(Retry(after=2, reason="busy"), plain)
    assert (failure.retry_after_seconds, failure.exact, failure.retryable) == (2.0, True, True)
    assert (failure.info.error_class, failure.info.message) == ("taskline.errors.Retry", "busy")
    assert pickle.loads(pickle.dumps(failure)) == failure


# ---- types ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError(),
        ConnectionRefusedError(),
        BrokenPipeError(),
        TimeoutError(),
        socket.gaierror(socket.EAI_AGAIN, "again"),
        OSError(errno.ENETUNREACH, "no route"),
        OSError(errno.EMFILE, "too many files"),
        urllib.error.URLError(ConnectionRefusedError()),
        urllib.error.URLError(socket.gaierror(socket.EAI_AGAIN, "again")),
        httpx.ConnectError("x"),
        httpx.ConnectTimeout("x"),
        httpx.ReadTimeout("x"),
        httpx.PoolTimeout("x"),
        httpx.ReadError("x"),
        httpx.RemoteProtocolError("x"),
        type("Timeout", (OSError,), {})(),
        type("ServerDisconnectedError", (type("ClientConnectionError", (Exception,), {}),), {})(),
        DeliveryUnknown("x"),
        Unavailable("x"),
    ],
    ids=repr,
)
def test_what_passes_by_itself_is_transient(error: BaseException) -> None:
    assert category(error) is ErrorCategory.TRANSIENT


@pytest.mark.parametrize("error", [InvalidResult("x"), InvalidPayload("t", "/x", "no")], ids=repr)
def test_what_no_attempt_can_help_is_permanent(error: BaseException) -> None:
    assert category(error) is ErrorCategory.PERMANENT


def test_the_soft_limit_is_a_timeout() -> None:
    assert category(SoftTimeout()) is ErrorCategory.TIMEOUT


def test_a_handler_without_memory_is_a_category_of_its_own() -> None:
    assert category(MemoryError()) is ErrorCategory.MEMORY


class Hostile(Exception):
    @property
    def response(self) -> Any:
        raise RuntimeError("no response was set")


class HostileConnection(ConnectionError):
    @property
    def response(self) -> Any:
        raise RuntimeError("no response was set")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        TypeError("x"),
        KeyError("x"),
        SystemExit(3),
        SystemExit(503),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        FileNotFoundError(errno.ENOENT, "no"),
        PermissionError(errno.EACCES, "no"),
        ssl.SSLError(1, "certificate"),
        urllib.error.URLError("unknown url type: htp"),
        httpx.UnsupportedProtocol("x"),
        UnknownTaskType("x"),
        Hostile(),
    ],
    ids=repr,
)
def test_what_nothing_is_known_of_is_unknown(error: BaseException) -> None:
    assert category(error) is ErrorCategory.UNKNOWN


def test_properties_that_raise_do_not_hide_the_type() -> None:
    assert category(HostileConnection()) is ErrorCategory.TRANSIENT


def test_only_the_error_itself_counts_and_not_its_cause() -> None:
    error = ValueError("wrapped")
    error.__cause__ = ConnectionError()
    assert category(error) is ErrorCategory.UNKNOWN


# ---- answers of HTTP servers ------------------------------------------------------------------------------------


@CLIENTS
@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, ErrorCategory.PERMANENT),
        (401, ErrorCategory.PERMANENT),
        (404, ErrorCategory.PERMANENT),
        (408, ErrorCategory.SERVER),
        (410, ErrorCategory.PERMANENT),
        (422, ErrorCategory.PERMANENT),
        (425, ErrorCategory.SERVER),
        (429, ErrorCategory.RATE_LIMITED),
        (499, ErrorCategory.PERMANENT),
        (500, ErrorCategory.SERVER),
        (502, ErrorCategory.SERVER),
        (503, ErrorCategory.SERVER),
        (504, ErrorCategory.SERVER),
        (599, ErrorCategory.SERVER),
    ],
)
def test_an_error_status_tells_its_kind(client: Any, status: int, expected: ErrorCategory) -> None:
    assert classify(client(status), now_ms=NOW) == Verdict(category=expected)


@CLIENTS
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("name", ["Retry-After", "retry-after", "RETRY-AFTER"])
def test_a_retry_after_is_seconds_or_a_date(client: Any, status: int, name: str) -> None:
    for value, seconds in [
        ("120", 120.0),
        ("0", 0.0),
        (" 7 ", 7.0),
        (format_datetime(AT + timedelta(seconds=90), usegmt=True), 90.0),
        # Over already.
        (format_datetime(AT - timedelta(seconds=90), usegmt=True), 0.0),
    ]:
        verdict = classify(client(status, {name: value}), now_ms=NOW)
        assert (verdict.retry_after_seconds, verdict.exact) == (seconds, False)


@pytest.mark.parametrize(
    "value", ["", "soon", "-5", "1.5", "1e9", "inf", "nan", "٣", "9" * 400, "Wed, 99 Foo 2026 99:99:99 GMT"]
)
def test_a_retry_after_that_is_none_is_ignored(value: str) -> None:
    error = ClientResponseError(429, {"Retry-After": value})
    assert classify(error, now_ms=NOW) == Verdict(category=ErrorCategory.RATE_LIMITED)


def test_a_status_that_is_no_errors_says_nothing() -> None:
    assert category(ClientResponseError(200)) is ErrorCategory.UNKNOWN
    assert category(ClientResponseError(302)) is ErrorCategory.UNKNOWN
    assert category(ClientResponseError(True)) is ErrorCategory.UNKNOWN
    assert category(ClientResponseError("503")) is ErrorCategory.UNKNOWN  # type: ignore[arg-type]


class Anything(Exception):
    pass


@given(
    st.dictionaries(
        st.sampled_from(["response", "status", "status_code", "code", "headers", "reason", "errno"]),
        st.none()
        | st.integers()
        | st.text()
        | st.builds(
            SimpleNamespace,
            status_code=st.integers(0, 700) | st.text(),
            headers=st.none() | st.integers() | st.dictionaries(st.text(), st.text()),
        ),
    )
)
def test_no_exception_however_odd_breaks_the_judgement(attributes: dict[str, Any]) -> None:
    error = Anything("x")
    vars(error).update(attributes)
    assert classify(error, now_ms=NOW).category in ErrorCategory
