"""The subscribers: an HTTP server on 127.0.0.1 that misbehaves by its scenarios, and writes down who came when.

An event is known by its `Idempotency-Key`, which is the same in every attempt and replay: it is taken in once.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from examples.webhooks.scenarios import BY_NAME, OK, TAKEN, Answer, Scenario

_HOST = "127.0.0.1"
# How long a hanging answer holds its thread: longer than any sender waits for it, short enough to end by itself.
_HANG_SECONDS = 30.0
_POLL_SECONDS = 0.05


@dataclass(kw_only=True, slots=True)
class Record:
    """What the receiver knows of one key."""

    # When each delivery came, in seconds since the epoch.
    came: list[float] = field(default_factory=list)
    # What each got to hear: a status, "hang" or "drop".
    heard: list[str] = field(default_factory=list)
    # How often its event was taken in: at most once, whoever repeats it.
    taken: int = 0
    # The sender was asked not to come before, in seconds since the epoch.
    stay_away_until: float = 0.0
    # How often it came nevertheless.
    too_early: int = 0


class Ledger:
    """The records by key; safe to share between threads."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = defaultdict(Record)
        self._mended = False
        self._lock = threading.Lock()

    def mend(self) -> None:
        """From now on everything is answered with 200."""
        with self._lock:
            self._mended = True

    def receive(self, scenario: Scenario, key: str, now: float) -> tuple[Answer, bool, float]:
        """Take one delivery down.

        Args:
            scenario: the subscriber.
            key: the event's.
            now: in seconds since the epoch.

        Returns:
            What to answer, whether the event had been taken in before, and until when the sender is asked to stay away.
        """
        with self._lock:
            record = self._records[key]
            answer = TAKEN if self._mended else scenario.answer(len(record.came) + 1)
            record.came.append(now)
            record.heard.append(answer.silence or str(answer.status))
            record.too_early += now < record.stay_away_until
            if answer.stay_away is not None:
                until = now + answer.stay_away
                # A date has whole seconds: upwards, so that it never names less than was meant.
                record.stay_away_until = math.ceil(until) if answer.asks == "date" else until
            known = record.taken > 0
            if answer.takes and not known:
                record.taken += 1
            return answer, known, record.stay_away_until

    def record(self, key: str) -> Record | None:
        """What is known of a key; None: it never came."""
        with self._lock:
            return self._records.get(key)

    def __len__(self) -> int:
        with self._lock:
            return len(self._records)


class _Server(ThreadingHTTPServer):
    # A thread that hangs by its scenario does not keep the process.
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, ledger: Ledger, closing: threading.Event) -> None:
        super().__init__((_HOST, 0), _Subscriber, bind_and_activate=False)
        self.ledger = ledger
        self.closing = closing
        # Bound but not listening: connections are refused, and nobody else gets the port.
        self.server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as socketserver declares it
        """A sender that left is part of the story."""


class _Subscriber(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        scenario = BY_NAME.get(self.path.rpartition("/")[2])
        key = self.headers.get("idempotency-key")
        if scenario is None or not key or "date" not in json.loads(body):
            # No scenario has this: a fault of the sender shows as a difference.
            self._answer(422, {"error": "no such subscriber, no key, or no event"})
            return
        answer, known, until = self.server.ledger.receive(scenario, key, time.time())
        if answer.silence == "hang":
            self.server.closing.wait(_HANG_SECONDS)
        if answer.silence is not None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        headers = {}
        if answer.stay_away is not None and answer.asks != "body":
            headers["retry-after"] = (
                formatdate(until, usegmt=True) if answer.asks == "date" else f"{answer.stay_away:g}"
            )
        body_out = {"duplicate": known} if answer.status == OK else {"busy_for_seconds": answer.stay_away}
        self._answer(answer.status, body_out, headers)

    def _answer(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as http.server names it
        """The ledger is the log."""


class Receiver:
    """All subscribers on one port, and one more port for those who are away. A context manager."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._closing = threading.Event()
        self._main = _Server(self.ledger, self._closing)
        self._away = _Server(self.ledger, self._closing)
        self._serving: list[tuple[_Server, threading.Thread]] = []

    def url(self, scenario: Scenario) -> str:
        """Where the subscriber wants its events."""
        port = (self._away if scenario.away else self._main).server_address[1]
        return f"http://{_HOST}:{port}/hooks/{scenario.name}"

    def come_back(self) -> None:
        """Those who are away take connections from now on."""
        self._serve(self._away)

    def mend(self) -> None:
        """Every subscriber behaves from now on."""
        self.ledger.mend()

    def __enter__(self) -> Self:
        self._serve(self._main)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        # Only one that serves can be shut down: the call waits for its loop.
        for server, thread in self._serving:
            server.shutdown()
            thread.join()
        self._main.server_close()
        self._away.server_close()

    def _serve(self, server: _Server) -> None:
        server.server_activate()
        thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
        thread.start()
        self._serving.append((server, thread))
