"""The log for asyncio code: the loop itself serves the client, so that no thread competes with it for the interpreter.

Invariant: records enter the client in the order of `append`, also across a full buffer: while one waits for room, all
later ones wait behind it. The loop is never blocked. A cancelled future takes nothing back: its record may be appended.

Why not a thread that waits for acknowledgements: librdkafka's Python client takes and releases the interpreter lock for each
report, and a thread that wants it from a busy loop gets it once per switch interval (5 ms), so a busy loop would see a few
hundred acknowledgements a second. Serving from the loop costs about 10 µs a look, every millisecond while something is
under way, and nothing when nothing is.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from dataclasses import dataclass
from functools import partial

import structlog

from taskline.errors import DeliveryError, ProducerClosed, QueueFull
from taskline.infra.kafka.appender import Appender
from taskline.infra.log import AsyncLog, OutRecord, Position
from taskline.settings import Settings

log = structlog.get_logger(__name__)

# Between looks while acknowledgements come: a broker on the same network needs about as long for one.
_LOOK_SECONDS = 0.001
# Without any for a while, looks become rarer in proportion, up to this: a broker that is away is not hurried by looking.
_SLOWEST_LOOK_SECONDS = 0.02
_PATIENCE_PER_LOOK = 10
# With nothing under way: librdkafka's log lines are still to be written.
_IDLE_LOOK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    record: OutRecord
    future: Future[Position]
    # The loop's time at which the wait for room is over.
    deadline: float


class KafkaLog(AsyncLog):
    """An `AsyncLog` on Kafka; bound to the loop that is running when it is made."""

    def __init__(self, settings: Settings, *, client_id: str, linger_ms: float | None = None) -> None:
        """Start a producer client for the running loop.

        Args:
            settings: of the log (kafka, producer, topics.max_record_bytes).
            client_id: a name for the broker's logs and the metrics.
            linger_ms: how long a record waits for company; None: producer.linger_ms.

        Raises:
            InvalidSettings: the client refuses the configuration.
        """
        self._loop = asyncio.get_running_loop()
        producer = settings.producer
        if linger_ms is not None:
            producer = producer.model_copy(update={"linger_ms": linger_ms})
        self._patience = producer.max_block_seconds
        self._close_timeout = producer.delivery_timeout_seconds
        # No acknowledgement of a first record comes sooner, since it waits for company.
        self._first_look = _LOOK_SECONDS + producer.linger_ms / 1000
        self._appender = Appender(
            settings.kafka,
            producer,
            client_id=client_id,
            max_record_bytes=settings.topics.max_record_bytes,
        )
        self._waiting: deque[_Waiting] = deque()
        self._closed = False
        # Set by `close`: resolved when nothing is under way any more.
        self._drained: Future[None] | None = None
        # The loop's time of the last acknowledgement, or of the first record after a pause.
        self._last_progress = self._loop.time()
        self._busy = False
        self._timer = self._loop.call_later(_IDLE_LOOK_SECONDS, self._look)

    def append(self, record: OutRecord) -> Future[Position]:
        """Hand a record over; see `AsyncLog.append`.

        When the buffer is full the record waits its turn for producer.max_block_seconds, then its future fails with
        QueueFull. After `close` it fails with ProducerClosed.
        """
        future: Future[Position] = self._loop.create_future()
        if self._closed:
            future.set_exception(ProducerClosed("the log is closed"))
            return future
        if self._waiting or not self._try_send(record, future):
            deadline = self._loop.time() + self._patience
            self._waiting.append(_Waiting(record=record, future=future, deadline=deadline))
        if not self._busy:
            self._busy = True
            self._last_progress = self._loop.time()
            self._look_again(self._first_look)
        return future

    async def close(self, timeout_seconds: float | None = None) -> int:
        """Take no more records, wait for the acknowledgements, stop. A second call does nothing.

        Args:
            timeout_seconds: how long to wait; None: producer.delivery_timeout_seconds.

        Returns:
            How many records were given up; their futures have failed (DeliveryUnknown, or QueueFull if they never left).
        """
        if self._closed:
            return 0
        self._closed = True
        if self._busy:
            self._drained = self._loop.create_future()
            patience = self._close_timeout if timeout_seconds is None else timeout_seconds
            await asyncio.wait([self._drained], timeout=patience)
        self._timer.cancel()
        never_sent = len(self._waiting)
        self._refuse_waiting(before=float("inf"))
        given_up = self._appender.close()
        if given_up or never_sent:
            log.warning("records were given up at close", unacknowledged=given_up, never_sent=never_sent)
        return given_up + never_sent

    def _try_send(self, record: OutRecord, future: Future[Position]) -> bool:
        """False: there is no room; otherwise the future is, or will be, resolved."""
        try:
            return self._appender.try_send(record, partial(_resolve, future))
        except DeliveryError as error:
            future.set_exception(error)
            return True

    def _look(self) -> None:
        now = self._loop.time()
        try:
            if self._appender.serve(0):
                self._last_progress = now
        except Exception:
            # Without the next look nothing would ever be acknowledged again.
            log.exception("serving the producer client")
        self._send_waiting()
        self._refuse_waiting(before=now)
        self._busy = bool(self._waiting) or len(self._appender) > 0
        if self._busy:
            pause = (now - self._last_progress) / _PATIENCE_PER_LOOK
            self._look_again(min(max(pause, _LOOK_SECONDS), _SLOWEST_LOOK_SECONDS))
        else:
            self._look_again(_IDLE_LOOK_SECONDS)
            if self._drained is not None and not self._drained.done():
                self._drained.set_result(None)

    def _look_again(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._look)

    def _send_waiting(self) -> None:
        while self._waiting:
            head = self._waiting[0]
            if not head.future.done() and not self._try_send(head.record, head.future):
                break
            self._waiting.popleft()

    def _refuse_waiting(self, *, before: float) -> None:
        while self._waiting and self._waiting[0].deadline <= before:
            waiting = self._waiting.popleft()
            if not waiting.future.done():
                waiting.future.set_exception(
                    QueueFull("the send buffer stayed full; the record was not sent")
                )


def _resolve(future: Future[Position], outcome: Position | DeliveryError) -> None:
    if future.done():
        return
    if isinstance(outcome, Position):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
