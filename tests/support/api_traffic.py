"""A steady stream of requests at the API, and a ledger of what was answered to each.

Requests are sent when their time has come, whether or not earlier ones were answered, so that a server which hangs is seen as such. The ledger has
every one of them: answered (with what), refused (no connection, so nothing was sent), or unknown (sent, and the connection broke).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

# Longer than anything may take: what has no answer by then hangs.
HANGS_SECONDS = 60.0
# Between the probes of each /readyz.
PROBE_SECONDS = 0.5


class Kind(Enum):
    SUBMIT = "submit"
    READ = "read"
    # /readyz with nothing, and for one purpose.
    READY = "ready"
    READY_SUBMIT = "ready-submit"
    READY_READ = "ready-read"


class Fate(Enum):
    ANSWERED = "answered"
    # No connection: certainly not sent.
    REFUSED = "refused"
    # The connection broke after the request may have been sent.
    UNKNOWN = "unknown"
    HUNG = "hung"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One request; times of `time.monotonic`."""

    kind: Kind
    # Of a submission: the affinity key that its record bears.
    mark: str = ""
    sent: float
    ended: float
    fate: Fate
    status: int = 0
    retry_after: str | None = None
    # Of a problem: the end of its type.
    problem: str | None = None
    task_id: str | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.sent


@dataclass
class Ledger:
    attempts: list[Attempt] = field(default_factory=list)
    # By how much the client itself was late to send, at the most, in seconds.
    client_lag: float = 0.0

    def of(
        self, kind: Kind, *, status: int | None = None, after: float = 0.0, before: float = float("inf")
    ) -> list[Attempt]:
        """Those of a kind that were answered so, and were sent and ended within these times."""
        return [
            each
            for each in list(self.attempts)
            if each.kind is kind
            and status in (None, each.status)
            and each.sent >= after
            and each.ended <= before
        ]

    def counts(self) -> dict[str, int]:
        """How often each kind was answered how."""
        return dict(
            sorted(
                Counter(
                    f"{each.kind.value} {each.problem or each.status or each.fate.value}"
                    for each in self.attempts
                ).items()
            )
        )


class Traffic:
    """Sends in the background while the context is open, then waits for the answers."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        run: str,
        task_type: str,
        reading: Sequence[str],
        submissions_per_second: float,
        reads_per_second: float,
    ) -> None:
        """Submit tasks of this type, read these ids in turn, and ask `/readyz`."""
        self.ledger = Ledger()
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._token = token
        self._run = run
        self._task_type = task_type
        self._reading = itertools.cycle(reading)
        self._paces = {Kind.SUBMIT: 1 / submissions_per_second, Kind.READ: 1 / reads_per_second}
        self._numbers = itertools.count()
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._flow()), daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(HANGS_SECONDS + 30)
        assert not self._thread.is_alive()

    async def _flow(self) -> None:
        async with asyncio.TaskGroup() as group:
            for kind in Kind:
                group.create_task(self._pace(group, kind, self._paces.get(kind, PROBE_SECONDS)))

    async def _pace(self, group: asyncio.TaskGroup, kind: Kind, pause: float) -> None:
        due = time.monotonic()
        while not self._over.is_set():
            self.ledger.client_lag = max(self.ledger.client_lag, time.monotonic() - due)
            group.create_task(self._one(kind))
            due += pause
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _one(self, kind: Kind) -> None:
        mark = f"{self._run}-{next(self._numbers)}" if kind is Kind.SUBMIT else ""
        sent = time.monotonic()
        fate, status, headers, document = Fate.REFUSED, 0, dict[str, str](), dict[str, Any]()
        try:
            async with asyncio.timeout(HANGS_SECONDS):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                fate = Fate.UNKNOWN
                try:
                    writer.write(self._request(kind, mark))
                    status, headers, document = _answer(await reader.read())
                    fate = Fate.ANSWERED
                finally:
                    writer.close()
        except TimeoutError:
            fate = Fate.HUNG
        except OSError:
            pass
        self.ledger.attempts.append(
            Attempt(
                kind=kind,
                mark=mark,
                sent=sent,
                ended=time.monotonic(),
                fate=fate,
                status=status,
                retry_after=headers.get("retry-after"),
                problem=str(document["type"]).rpartition(":")[2] if status >= 400 else None,
                task_id=document.get("task_id"),
            )
        )

    def _request(self, kind: Kind, mark: str) -> bytes:
        """A connection for each: what the test looks at is the server, and a pool has opinions of its own about a broken one."""
        method, path, body = "GET", "/readyz", b""
        if kind is Kind.SUBMIT:
            document = {"task_type": self._task_type, "payload": {"mark": mark}, "affinity_key": mark}
            method, path, body = "POST", "/tasks", json.dumps(document).encode()
        elif kind is Kind.READ:
            path = f"/tasks/{next(self._reading)}"
        elif kind is not Kind.READY:
            path = f"/readyz?for={kind.value.removeprefix('ready-')}"
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\nauthorization: Bearer {self._token}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


def _answer(received: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, header fields and JSON of a whole answer.

    Raises:
        ConnectionError: it is none.
    """
    head, end, body = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines[1:])
    headers = {name.strip().lower(): value.strip() for name, _, value in fields}
    if not end or len(body) < int(headers.get("content-length", "0")):
        raise ConnectionError("the connection broke within the answer")
    return int(lines[0].split()[1]), headers, json.loads(body)


def first_after(
    ledger: Ledger, kind: Kind, status: int, moment: float, *, seconds: float, alive: Callable[[], None]
) -> float:
    """Wait until a request that was sent after the moment is answered so; how long after the moment that was."""
    deadline = time.monotonic() + seconds
    while not (found := ledger.of(kind, status=status, after=moment)):
        alive()
        assert time.monotonic() < deadline, f"no {status} to {kind.value} within {seconds:g} s of the heal"
        time.sleep(0.05)
    return min(each.ended for each in found) - moment
