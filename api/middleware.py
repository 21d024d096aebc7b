"""What surrounds every request: its id, its numbers, a bound on how many run at once, and a net for what no code foresaw.

Plain ASGI: Starlette's BaseHTTPMiddleware would run each request in a task group of its own.
"""

from __future__ import annotations

import itertools
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taskline.api.metrics import UNMATCHED, ApiMetrics
from taskline.api.problems import INTERNAL_ERROR, OVERLOADED, ProblemError, problem_response

log = structlog.get_logger(__name__)

REQUEST_ID = "taskline.request_id"
# Header fields, as pairs of bytes, that a route wants on its answer whatever that will be.
MORE_HEADERS = "taskline.more_headers"
_BOUNDARY = "taskline.boundary"
_REQUEST_ID_HEADER = b"x-request-id"
# What a caller's own request id may look like; anything else is replaced, since it goes into logs and headers.
_USABLE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}\Z")
# The status that counts a client which left before its answer; no such answer is ever sent.
CLIENT_LEFT = 499
# Answered also when the process is full: balancers and monitoring must see it alive.
_ALWAYS_ANSWERED = frozenset({"/healthz", "/readyz", "/metrics"})
_RETRY_AFTER_OVERLOAD_SECONDS = "1"


class RequestBoundary:
    """The outermost layer of the app's own."""

    def __init__(self, app: ASGIApp, *, metrics: ApiMetrics, max_in_flight: int) -> None:
        """Wrap `app`; refuse requests beyond `max_in_flight` at once."""
        self._app = app
        self._metrics = metrics
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        # Unique without asking the system for randomness each time: this process, and a number.
        self._prefix = secrets.token_hex(6)
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope[REQUEST_ID] = self._request_id(scope)
        scope[_BOUNDARY] = self
        header = (_REQUEST_ID_HEADER, request_id.encode("ascii"))
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], header, *scope.get(MORE_HEADERS, ())]
            await send(message)

        started = time.perf_counter()
        self.count(1)
        try:
            if self._in_flight > self._max_in_flight and scope["path"] not in _ALWAYS_ANSWERED:
                refusal = ProblemError(
                    OVERLOADED,
                    f"{self._max_in_flight} requests are in flight",
                    headers={"retry-after": _RETRY_AFTER_OVERLOAD_SECONDS},
                )
                await problem_response(refusal, request_id)(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        except Exception:
            log.exception(
                "request failed", request_id=request_id, method=scope["method"], route=_route(scope)
            )
            if status:
                # The answer has begun: only a broken connection can tell the client that it is not whole.
                raise
            problem = ProblemError(
                INTERNAL_ERROR, "an unexpected error; the server's log has it under this instance"
            )
            await problem_response(problem, request_id)(scope, receive, answer)
        finally:
            seconds = time.perf_counter() - started
            self.count(-1)
            self._metrics.observe(scope["method"], _route(scope), status or CLIENT_LEFT, seconds)
            log.debug(
                "answered",
                request_id=request_id,
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=round(seconds, 6),
            )

    def count(self, change: int) -> None:
        """So many requests more are in hand."""
        self._in_flight += change
        self._metrics.in_flight.set(self._in_flight)

    def _request_id(self, scope: Scope) -> str:
        """The caller's, if it is usable, or a new one."""
        for name, value in scope["headers"]:
            if name == _REQUEST_ID_HEADER:
                if _USABLE_ID.match(value):
                    return str(value, "ascii")
                break
        return f"{self._prefix}-{next(self._numbers):x}"


@contextmanager
def parked(scope: Scope) -> Iterator[None]:
    """Not count a request as in flight while it does nothing but wait: it has a bound of its own."""
    boundary: RequestBoundary = scope[_BOUNDARY]
    boundary.count(-1)
    try:
        yield
    finally:
        boundary.count(1)


def _route(scope: Scope) -> str:
    """The template of the route that took the request, so that ids do not become label values."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else UNMATCHED
