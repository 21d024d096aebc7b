"""What happens on the wire: who may have seen a request, what it carries, and what stays secret."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from client_kit import TASK_ID
from opentelemetry.sdk.trace import TracerProvider

from taskline.client import Client, ClientOptions, SubmissionUnknown
from taskline.client.connection import client_arguments, request_arguments
from taskline.client.options import where
from taskline.client.wire import Request
from taskline.errors import InvalidOption, InvalidSettings, Unavailable
from taskline.settings import load_settings

KEY = "tk_aaaaaaaa_secret"


class Hangup:
    """Accepts, reads a little, and breaks the connection."""

    def __init__(self) -> None:
        self.seen = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                if not connection.recv(65_536):
                    return
                self.seen += 1

    def close(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port)):
            pass
        self._thread.join(10)
        self._socket.close()


@pytest.fixture
def hangup() -> Iterator[Hangup]:
    server = Hangup()
    yield server
    server.close()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def test_where_nobody_listens_a_submission_is_certainly_not_accepted() -> None:
    with Client(f"http://127.0.0.1:{closed_port()}", retry_seconds=0, safe_retries=False) as client:
        with pytest.raises(Unavailable, match="no answer from the API"):
            client.submit("a.b", None)
        with pytest.raises(Unavailable) as away:
            client.get(TASK_ID)
        assert isinstance(away.value.__cause__, httpx.ConnectError)


def test_a_connection_that_breaks_leaves_a_submission_in_doubt(hangup: Hangup) -> None:
    url = f"http://127.0.0.1:{hangup.port}"
    with Client(url, retry_seconds=10, safe_retries=False) as client, pytest.raises(SubmissionUnknown):
        client.submit("a.b", None)
    # Not sent again.
    assert hangup.seen == 1
    with Client(url, retry_seconds=0.3) as client, pytest.raises(SubmissionUnknown) as unknown:
        client.submit("a.b", None)
    assert unknown.value.idempotency_key
    assert hangup.seen > 2


def test_a_server_that_is_silent_is_given_up() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_seconds=0.1, retry_seconds=0) as client,
        pytest.raises(Unavailable) as away,
    ):
        client.get(TASK_ID)
    assert isinstance(away.value.__cause__, httpx.ReadTimeout)


def sent(client: Client, *arguments: Any, **options: Any) -> Any:
    return client.get(*arguments, **options)


def test_requests_carry_the_key_and_follow_nobody_elsewhere() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(307, headers={"location": "http://elsewhere/"})

    with (
        Client("http://test/prefix", KEY, transport=httpx.MockTransport(answer)) as client,
        pytest.raises(Exception, match="can't be read"),
    ):
        client.get(TASK_ID)
    (request,) = seen
    assert str(request.url) == f"http://test/prefix/tasks/{TASK_ID}"
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.headers["user-agent"].startswith("taskline-client/")


def test_a_held_answer_has_its_own_time() -> None:
    options = ClientOptions(timeout_seconds=3, connect_seconds=2)
    arguments = request_arguments(Request(method="GET", path="/x", held_seconds=25.0), options)
    assert arguments["timeout"] == httpx.Timeout(28.0, connect=2, pool=2)
    assert client_arguments(options)["follow_redirects"] is False


def test_the_key_is_in_no_repr() -> None:
    assert "secret" not in repr(ClientOptions(key=KEY))
    with Client("http://test", KEY) as client:
        assert "secret" not in repr(client)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"url": "localhost:8080"}, "url"),
        ({"key": "tk_\n"}, "key"),
        ({"key": "ключ"}, "key"),
        ({"key": " "}, "key"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds"),
        ({"connect_seconds": float("inf")}, "connect_seconds"),
        ({"retry_seconds": -1}, "retry_seconds"),
        ({"max_connections": 0}, "max_connections"),
    ],
)
def test_impossible_options_are_named(options: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidOption, match=names) as refused:
        ClientOptions(**options)
    assert "tk_" not in str(refused.value)


def test_the_environment_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    assert where({}) == ("http://127.0.0.1:8080", None)
    assert where({"TASKLINE_API_URL": "https://x", "TASKLINE_API_KEY": KEY}) == ("https://x", KEY)
    assert where({"TASKLINE_API_KEY": ""}) == ("http://127.0.0.1:8080", None)
    with pytest.raises(InvalidSettings, match="TASKLINE_API_URL"):
        where({"TASKLINE_API_URL": "x"})
    monkeypatch.setenv("TASKLINE_API_URL", "http://from-env")
    with Client.from_env(retry_seconds=0) as client:
        assert client._options.url == "http://from-env"
    # They are no settings, and in nobody's way.
    load_settings({"TASKLINE_API_URL": "https://x", "TASKLINE_API_KEY": KEY})


def test_the_current_span_goes_along() -> None:
    request = Request(method="POST", path="/tasks", body=b"{}")
    assert "traceparent" not in request_arguments(request, ClientOptions())["headers"]
    with TracerProvider().get_tracer("test").start_as_current_span("submits") as span:
        told = request_arguments(request, ClientOptions())["headers"]["traceparent"]
        own = Request(method="POST", path="/tasks", body=b"{}", headers={"traceparent": "mine"})
        assert request_arguments(own, ClientOptions())["headers"]["traceparent"] == "mine"
    found = span.get_span_context()
    assert told == f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"
