"""HTTP/1.1 connections with bounds that the server's own protocol lacks.

A request's head may have 64 KiB and 20 seconds; a connection that sends nothing is closed; what a refused request still sends
is thrown away up to a bound. What can't be read as HTTP is answered with a problem, as all other errors are.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from asyncio import TimerHandle

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from taskline.api.problems import (
    BAD_REQUEST,
    HEAD_TOO_LARGE,
    PROBLEM_JSON,
    ProblemError,
    problem_body,
)

# Room for long cookies and tokens; beyond it somebody is only filling memory.
MAX_HEAD_BYTES = 65_536
# A head is one packet or a few; who takes longer holds connections open on purpose.
HEAD_TIMEOUT_SECONDS = 20.0
# A refused body is read to its end, so that its sender gets to read the refusal, but not for ever.
MAX_DISCARDED_BYTES = 64 * 1024 * 1024


# The parser drops the body of a request that offers to change the protocol, as Java's HttpClient does for HTTP/2 with every first
# request. The offer may be ignored (RFC 9110 §7.8), so it is made invisible.
_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)
_IGNORED = b"\r\nx-ignored-upgrade:"


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    # Between a head's first byte and its last.
    _in_head = False
    # Between a head's last byte and the end of its message.
    _in_body = False
    _head_bytes = 0
    _discarded_bytes = 0
    # Runs until the first head is whole, and later only for a head that came in pieces.
    _head_timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Expect the first request's head."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, and look whether an unfinished head is within its bounds."""
        if not self._in_body and _UPGRADE.search(data) is not None:
            data = _without_upgrade(data)
        super().data_received(data)
        if not self._in_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(ProblemError(HEAD_TOO_LARGE, f"the head has more than {MAX_HEAD_BYTES} bytes"))
        elif self._head_timer is None:
            self._arm()

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = True
        self._head_bytes = self._discarded_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head, self._in_body = False, True
        self._disarm()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body, or drop it when the answer has been given."""
        if self.cycle is not None and self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.close()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is whole."""
        self._in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        self._refuse(ProblemError(BAD_REQUEST, msg))

    def _refuse(self, problem: ProblemError) -> None:
        """Answer without the app, and close."""
        if self.transport.is_closing():
            return
        body = problem_body(problem, secrets.token_hex(8))
        head = f"content-type: {PROBLEM_JSON}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
        self.transport.write(STATUS_LINE[problem.kind.status] + head + body)
        self.transport.close()

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self._head_is_late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """The bytes with the Upgrade header of the head that they begin with, or are in, renamed."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(_IGNORED, head) + end + rest
