"""What both clients need to know of httpx: how one is set up, and what its errors mean."""

from __future__ import annotations

from typing import Any, TypedDict

import httpx

from taskline.client.options import ClientOptions
from taskline.client.wire import Answer, Lost, Request
from taskline.infra.trace_context import current_traceparent


class OptionFields(TypedDict, total=False):
    """The fields of `ClientOptions` beside `url` and `key`, as keyword arguments of a client."""

    timeout_seconds: float
    connect_seconds: float
    retry_seconds: float
    safe_retries: bool
    max_connections: int


# The connection was never there: the API has seen nothing of the request.
_UNSENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.UnsupportedProtocol,
    httpx.ProxyError,
)


def client_arguments(options: ClientOptions) -> dict[str, Any]:
    """For `httpx.Client` and `httpx.AsyncClient`: a pool of kept connections, and no redirects, which would carry the key away."""
    return {
        "base_url": options.url,
        "headers": options.headers(),
        "follow_redirects": False,
        "limits": httpx.Limits(
            max_connections=options.max_connections, max_keepalive_connections=options.max_connections
        ),
    }


def request_arguments(request: Request, options: ClientOptions) -> dict[str, Any]:
    """For the `request` method of either."""
    headers = dict(request.headers)
    traceparent = current_traceparent()
    if traceparent is not None:
        headers.setdefault("traceparent", traceparent)
    if request.body is not None:
        headers["content-type"] = "application/json"
    seconds = options.timeout_seconds + request.held_seconds
    return {
        "method": request.method,
        "url": request.path,
        "params": dict(request.params),
        "headers": headers,
        "content": request.body,
        "timeout": httpx.Timeout(seconds, connect=options.connect_seconds, pool=options.connect_seconds),
    }


def answer_of(response: httpx.Response) -> Answer:
    """What came back, read whole."""
    return Answer(
        status=response.status_code,
        headers={name.lower(): value for name, value in response.headers.items()},
        body=response.content,
    )


def lost(error: httpx.TransportError) -> Lost:
    """No answer; whether the API may have seen the request depends on where it broke."""
    return Lost(error=error, sent=not isinstance(error, _UNSENT))
