"""What the connection refuses before the app sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from taskline.api import protocol
from taskline.api.protocol import MAX_DISCARDED_BYTES, MAX_HEAD_BYTES, BoundedHttpProtocol
from taskline.testing.loop import VirtualLoop


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answers without reading the body."""
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def connected(
    scenario: Callable[[BoundedHttpProtocol, Transport], Awaitable[None]], app: Any = refuse
) -> None:
    async def main() -> None:
        config = uvicorn.Config(
            app, ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=75
        )
        config.load()
        connection = BoundedHttpProtocol(config=config, server_state=ServerState(), app_state={})
        transport = Transport()
        connection.connection_made(transport)
        try:
            await scenario(connection, transport)
        finally:
            connection.connection_lost(None)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def test_a_silent_connection_is_closed() -> None:
    async def scenario(connection: BoundedHttpProtocol, transport: Transport) -> None:
        await asyncio.sleep(protocol.HEAD_TIMEOUT_SECONDS - 1)
        assert not transport.closed
        await asyncio.sleep(2)
        assert transport.closed

    connected(scenario)


def test_a_head_that_drips_is_cut_off() -> None:
    async def scenario(connection: BoundedHttpProtocol, transport: Transport) -> None:
        connection.data_received(REQUEST)
        await asyncio.sleep(60)
        assert not transport.closed, "an idle connection between requests may stay"
        connection.data_received(b"GET / HTTP/1.1\r\n")
        for _ in range(30):
            connection.data_received(b"x: y\r\n")
            await asyncio.sleep(1)
        assert transport.closed

    connected(scenario)


def test_a_head_in_two_pieces_is_served() -> None:
    async def scenario(connection: BoundedHttpProtocol, transport: Transport) -> None:
        connection.data_received(REQUEST[:20])
        await asyncio.sleep(5)
        connection.data_received(REQUEST[20:])
        await asyncio.sleep(60)
        assert transport.written.startswith(b"HTTP/1.1 413 ")
        assert not transport.closed

    connected(scenario)


@pytest.mark.parametrize("piece", [b"x: " + b"y" * 1_000 + b"\r\n", b"z" * 1_000])
def test_a_head_without_end_is_refused(piece: bytes) -> None:
    async def scenario(connection: BoundedHttpProtocol, transport: Transport) -> None:
        connection.data_received(b"GET / HTTP/1.1\r\nlong: ")
        for _ in range(MAX_HEAD_BYTES // len(piece) + 1):
            connection.data_received(piece)
        assert transport.written.startswith(b"HTTP/1.1 431 ")
        assert b"urn:taskline:problem:head-too-large" in transport.written
        assert transport.closed

    connected(scenario)


def test_what_is_not_http_gets_a_problem() -> None:
    async def scenario(connection: BoundedHttpProtocol, transport: Transport) -> None:
        connection.data_received(b"\x16\x03\x01 TLS hello\r\n\r\n")
        head, _, body = transport.written.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"application/problem+json" in head
        assert b"urn:taskline:problem:bad-request" in body
        assert transport.closed

    connected(scenario)


def test_a_refused_body_is_thrown_away_up_to_a_bound() -> None:
    async def scenario(connection: BoundedHttpProtocol, transport: Transport) -> None:
        connection.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        await asyncio.sleep(1)
        assert transport.written.startswith(b"HTTP/1.1 413 ")
        block = b"x" * 1_000_000
        for _ in range(MAX_DISCARDED_BYTES // len(block)):
            connection.data_received(block)
        assert not transport.closed
        connection.data_received(block)
        connection.data_received(block)
        assert transport.closed

    connected(scenario)


def test_the_next_request_of_a_connection_is_served_after_a_refused_body() -> None:
    async def scenario(connection: BoundedHttpProtocol, transport: Transport) -> None:
        connection.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n12345")
        await asyncio.sleep(1)
        connection.data_received(b"67890" + REQUEST)
        await asyncio.sleep(1)
        assert transport.written.count(b"HTTP/1.1 413 ") == 2

    connected(scenario)


def test_an_offer_to_upgrade_is_ignored_and_the_body_kept() -> None:
    bodies: list[bytes] = []

    async def keep(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    head = b"POST / HTTP/1.1\r\nhost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    length = b"content-length: %d\r\n\r\n"
    body = b"\r\nupgrade: this is data\r\n\r\n"

    async def scenario(connection: BoundedHttpProtocol, transport: Transport) -> None:
        connection.data_received(head + length % len(body) + body)
        await asyncio.sleep(1)
        connection.data_received(head + length % len(body))
        connection.data_received(body)
        await asyncio.sleep(1)
        assert bodies == [body, body]
        assert not transport.closed

    connected(scenario, keep)


@pytest.mark.parametrize(
    "request_head",
    [
        b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET \xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET * HTTP/1.1\r\n\r\n",
    ],
)
def test_odd_targets_are_answered(request_head: bytes) -> None:
    async def scenario(connection: BoundedHttpProtocol, transport: Transport) -> None:
        connection.data_received(request_head)
        await asyncio.sleep(1)
        assert transport.written.startswith(b"HTTP/1.1 4")

    connected(scenario)
