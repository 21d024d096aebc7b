"""The HTTP server, run inside a role: it listens, says where, and stops when it is told to.

A stop loses no request: `/readyz` turns 503 and the process goes on answering for `api.shutdown_delay_seconds`, so that balancers
look elsewhere; then it accepts no more connections and those that are being served are finished.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import structlog
import uvicorn
from starlette.types import ASGIApp

from taskline.api.health import Health
from taskline.api.protocol import BoundedHttpProtocol
from taskline.errors import InvalidSettings
from taskline.settings import ApiSettings

log = structlog.get_logger(__name__)

# Idle connections of pooled clients; longer than the idle time of usual balancers (60 s), which must not find one closed under them.
_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 2048
# Beyond the longest that a request may wait, so that a stop only cuts off what is stuck.
_STOP_MARGIN_SECONDS = 5


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the role."""
        yield


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    api: ApiSettings,
    health: Health,
    stop: asyncio.Event,
    *,
    announce: Path | None = None,
) -> None:
    """Serve until `stop` is set and the requests in flight are answered.

    Args:
        app: what to serve.
        listener: a bound socket; closed at the end.
        api: time limits.
        health: told that the process is stopping.
        stop: set when the process shall stop.
        announce: a file that is written with the base URL once the port accepts connections.
    """
    url = base_url(listener)
    config = uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        # One wait for the body and one for the log.
        timeout_graceful_shutdown=round(2 * api.request_timeout_seconds) + _STOP_MARGIN_SECONDS,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http-server")
    try:
        # From here on the system takes connections, so that the announcement is true; the server picks them up.
        listener.listen(_BACKLOG)
        if announce is not None:
            _write_atomically(announce, url + "\n")
        log.info("listening", url=url, host=api.host, port=listener.getsockname()[1])
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        health.stop()
        if not serving.done():
            await asyncio.sleep(api.shutdown_delay_seconds)
    finally:
        server.should_exit = True
        await serving
    log.info("no longer listening", requests=server.server_state.total_requests)


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that has its address, and takes no connections yet.

    Raises:
        InvalidSettings: the address is taken, unknown, or not this machine's.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise InvalidSettings(f"can't listen on {host}:{port}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise InvalidSettings(f"can't listen on {host}:{port}: {error.strerror}") from error
    return listener


def base_url(listener: socket.socket) -> str:
    """Where a client on this machine reaches the listener."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _write_atomically(path: Path, text: str) -> None:
    # A reader that polls for the file must never see half of it.
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
