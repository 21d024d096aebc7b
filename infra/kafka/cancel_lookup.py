"""Where a partition ends now: asked on a thread of its own, over a connection on which nothing waits for records.

Invariant: an answer comes with a moment before its request began, and is true of all that was acknowledged before that moment. One request is under way at
a time. A server that is away, or a client that has gone wrong, only makes the answer late: the client is made anew until there is one.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from taskline.infra.kafka.client import client_config, new_client, reason_of
from taskline.infra.role import elapsed_seconds
from taskline.settings import KafkaSettings

log = structlog.get_logger(__name__)

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
        answered: Callable[[Bounds, float], None],
    ) -> None:
        """Ask for `topic`.

        Args:
            kafka: how to reach the log.
            topic: whose partition 0 is meant.
            client_id: a name for the broker's logs.
            known: up to where the topic was read; called on any thread.
            answered: called on the loop with each answer, and the moment (`elapsed_seconds`) as of which it is true.
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
        self._busy = False
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=client_id, daemon=True)

    @property
    def busy(self) -> bool:
        """Whether an answer is on its way."""
        return self._busy

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def ask(self) -> None:
        """Ask, unless an answer is on its way."""
        if not self._busy:
            self._busy = True
            self._orders.put(True)

    def close(self) -> None:
        """Stop; a question may stay unanswered. Blocks for as long as a request may take."""
        self._stopping.set()
        self._orders.put(False)
        if self._thread.is_alive():
            self._thread.join()

    def _settle(self, bounds: Bounds, as_of: float) -> None:
        self._busy = False
        self._answered(bounds, as_of)

    # ---- on the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        consumer: Consumer | None = None
        while self._orders.get():
            bounds, as_of = None, 0.0
            while bounds is None and not self._stopping.is_set():
                try:
                    if consumer is None:
                        consumer = new_client(Consumer, self._config)
                    as_of = elapsed_seconds()
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
                    self._loop.call_soon_threadsafe(self._settle, bounds, as_of)
                except RuntimeError:
                    # The loop was closed: nobody asks any more.
                    break
        if consumer is not None:
            consumer.close()

    def _request(self, consumer: Consumer) -> Bounds:
        known = self._known()
        (found,) = consumer.offsets_for_times([self._end], timeout=_REQUEST_SECONDS)
        if found.error is not None:
            raise KafkaException(found.error)
        if found.offset < known:
            # The topic was made anew (or lost its end), and the tail has not noticed: what it read says nothing about this one.
            raise KafkaException(KafkaError(KafkaError.OFFSET_OUT_OF_RANGE))
        if found.offset == known:
            return Bounds(end=found.offset, empty=False)
        begin, end = consumer.get_watermark_offsets(self._place, timeout=_REQUEST_SECONDS, cached=False)
        return Bounds(end=end, empty=begin >= end)
