"""Where a partition ends now: asked on a thread of its own, over a connection on which nothing waits for records.

Invariant: a question is answered by a request that began after it was asked. All that are asked while a request is under way share the next
one. A server that is away, or a client that has gone wrong, only makes the answer late: the client is made anew until there is one.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from asyncio import Future
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from confluent_kafka import OFFSET_END, Consumer, KafkaException, TopicPartition

from taskline.infra.kafka.client import client_config, new_client, reason_of
from taskline.settings import KafkaSettings

log = structlog.get_logger(__name__)

# Under load a request leaves so long after the one before it: what is asked in between shares it. One costs 0.2 ms of CPU, its thread's
# wake-ups included, so this is 4% of a core at most, and at thousands of tasks a second a few µs each.
SPACING_SECONDS = 0.005
# A broker answers in half a millisecond; without an answer for so long the connection is made anew.
_REQUEST_SECONDS = 2.0
_RETRY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offset that a partition's next record gets; and whether there is anything to read up to there."""

    end: int
    empty: bool


class EndLookup:
    """Asks for the bounds of partition 0 of one topic, on behalf of one event loop."""

    def __init__(
        self,
        kafka: KafkaSettings,
        topic: str,
        *,
        client_id: str,
        known: Callable[[], int],
        answered: Callable[[Bounds, list[Future[None]]], None],
    ) -> None:
        """Ask for `topic`.

        Args:
            kafka: how to reach the log.
            topic: whose partition 0 is meant.
            client_id: a name for the broker's logs.
            known: up to where the topic was read; called on any thread.
            answered: called on the loop with each answer, and with who asked.
        """
        self._place = TopicPartition(topic, 0)
        # One request, where asking for both ends of a partition takes two.
        self._end = TopicPartition(topic, 0, OFFSET_END)
        self._known = known
        self._answered = answered
        self._config = client_config(kafka, client_id=client_id) | {
            # The client insists on a name; nothing joins or commits under it.
            "group.id": client_id,
            "enable.auto.commit": False,
        }
        self._loop = asyncio.get_running_loop()
        self._asking: list[Future[None]] = []
        # True: a request is under way, or about to leave.
        self._busy = False
        self._last_left = float("-inf")
        self._orders: queue.SimpleQueue[list[Future[None]] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=client_id, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def ask(self) -> Future[None]:
        """A question; the future is for `answered` to resolve."""
        future: Future[None] = self._loop.create_future()
        self.ask_for([future])
        return future

    def ask_for(self, futures: list[Future[None]]) -> None:
        """Ask again on behalf of those whose answer is of no use any more."""
        self._asking += futures
        if not self._busy:
            self._busy = True
            due = self._last_left + SPACING_SECONDS
            if due <= self._loop.time():
                # At the end of this turn of the loop, with what else is asked in it.
                self._loop.call_soon(self._leave)
            else:
                self._loop.call_at(due, self._leave)

    def close(self) -> None:
        """Stop; questions stay unanswered. Blocks for as long as a request may take."""
        self._stopping.set()
        self._orders.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _leave(self) -> None:
        asking, self._asking = self._asking, []
        self._last_left = self._loop.time()
        self._orders.put(asking)

    def _settle(self, bounds: Bounds, asked: list[Future[None]]) -> None:
        self._busy = False
        self._answered(bounds, asked)
        if self._asking:
            self.ask_for([])

    # ---- on the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        consumer: Consumer | None = None
        while (asked := self._orders.get()) is not None:
            bounds: Bounds | None = None
            while bounds is None and not self._stopping.is_set():
                try:
                    if consumer is None:
                        consumer = new_client(Consumer, self._config)
                    bounds = self._request(consumer)
                except (KafkaException, TypeError) as error:
                    # (TypeError: None where an answer belongs, which says that there was none in time.)
                    log.warning(
                        "reading where cancel notices end", topic=self._place.topic, error=reason_of(error)
                    )
                    if consumer is not None:
                        consumer.close()
                        consumer = None
                    self._stopping.wait(_RETRY_SECONDS)
            if bounds is not None:
                try:
                    self._loop.call_soon_threadsafe(self._settle, bounds, asked)
                except RuntimeError:
                    # The loop was closed: nobody asks any more.
                    break
        if consumer is not None:
            consumer.close()

    def _request(self, consumer: Consumer) -> Bounds:
        (found,) = consumer.offsets_for_times([self._end], timeout=_REQUEST_SECONDS)
        if found.error is not None:
            raise KafkaException(found.error)
        if found.offset <= self._known():
            return Bounds(end=found.offset, empty=False)
        begin, end = consumer.get_watermark_offsets(self._place, timeout=_REQUEST_SECONDS, cached=False)
        return Bounds(end=end, empty=begin >= end)
