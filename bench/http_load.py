"""A lean HTTP client that loads a server and notes what it cost the client itself.

`closed`: some connections that each wait for an answer before the next request; what the server can do at the most. `paced`: requests at
their appointed times, whether or not earlier ones were answered; latencies count from the appointed time, so that a server which
stalls is charged for all that had to wait (no coordinated omission). Run either in a process of its own (`client_process`): it must not
share an interpreter lock with what looks at the server.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

CLOSED_CONNECTIONS = 16
# Enough for whatever is under way at half of the greatest load; a request that finds none free waits, and that counts.
PACED_CONNECTIONS = 64


class UnexpectedAnswer(Exception):
    """An answer that makes the figure meaningless."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server, and the status that every answer must have."""

    host: str
    port: int
    status: int


@dataclass(frozen=True, kw_only=True)
class Closed:
    """What a closed loop has measured."""

    per_second: float
    client_cpu_us: float


@dataclass(frozen=True, kw_only=True)
class Paced:
    """What an open loop has measured."""

    # From the appointed time to the end of the answer, sorted.
    latencies_ms: tuple[float, ...]
    # How late the client's own loop woke for a request, sorted.
    lags_ms: tuple[float, ...]
    client_cpu_us: float


def get(path: str, token: str = "") -> bytes:
    """A GET request."""
    return _head("GET", path, token) + b"\r\n"


def post(path: str, body: bytes, token: str = "") -> bytes:
    """A POST request of JSON."""
    about = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return _head("POST", path, token) + about.encode() + body


@contextmanager
def client_process() -> Iterator[ProcessPoolExecutor]:
    """A process to call `closed` and `paced` in."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(time.time).result()
        yield pool


def closed(target: Target, requests: Sequence[bytes]) -> Closed:
    """Send the requests as fast as the server answers."""
    began, cpu = time.perf_counter(), time.process_time()
    asyncio.run(_closed(target, requests))
    seconds, spent = time.perf_counter() - began, time.process_time() - cpu
    return Closed(per_second=len(requests) / seconds, client_cpu_us=spent / len(requests) * 1e6)


def paced(target: Target, requests: Sequence[bytes], per_second: float) -> Paced:
    """Send the requests at equal distances."""
    cpu = time.process_time()
    latencies, lags = asyncio.run(_paced(target, requests, per_second))
    return Paced(
        latencies_ms=tuple(sorted(latencies)),
        lags_ms=tuple(sorted(lags)),
        client_cpu_us=(time.process_time() - cpu) / len(requests) * 1e6,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, by nearest rank."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


class _Connection:
    def __init__(self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._status = b"%d" % target.status
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, target: Target) -> _Connection:
        return cls(target, *await asyncio.open_connection(target.host, target.port))

    async def ask(self, request: bytes) -> None:
        self._writer.write(request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        body = await self._reader.readexactly(length)
        if head[9:12] != self._status:
            raise UnexpectedAnswer(body)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


async def _closed(target: Target, requests: Sequence[bytes]) -> None:
    turns = iter(requests)

    async def one() -> None:
        connection = await _Connection.open(target)
        try:
            for request in turns:
                await connection.ask(request)
        finally:
            await connection.close()

    await asyncio.gather(*(one() for _ in range(min(CLOSED_CONNECTIONS, len(requests)))))


async def _paced(
    target: Target, requests: Sequence[bytes], per_second: float
) -> tuple[list[float], list[float]]:
    latencies: list[float] = []
    lags: list[float] = []
    connections = [await _Connection.open(target) for _ in range(PACED_CONNECTIONS)]
    free: asyncio.Queue[_Connection] = asyncio.Queue()
    for connection in connections:
        free.put_nowait(connection)

    async def one(request: bytes, due: float) -> None:
        connection = await free.get()
        await connection.ask(request)
        latencies.append((time.perf_counter() - due) * 1_000)
        free.put_nowait(connection)

    begin = time.perf_counter() + 0.05
    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(requests):
            due = begin + number / per_second
            if (left := due - time.perf_counter()) > 0:
                await asyncio.sleep(left)
            lags.append((time.perf_counter() - due) * 1_000)
            group.create_task(one(request, due))
    for connection in connections:
        await connection.close()
    return latencies, lags


def _head(method: str, path: str, token: str) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: bench\r\naccept: application/json\r\nuser-agent: bench\r\n"
    return f"{head}authorization: Bearer {token}\r\n".encode() if token else head.encode()
