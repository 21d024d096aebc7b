"""`TaskProducer`: submit tasks from plain (threaded) code.

Invariant: a `TaskHandle` exists only for a task whose record the broker has acknowledged. Every submission ends in a handle, a
typed error, or a name on the list of `Undelivered`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from taskline.errors import DeliveryError, DeliveryUnknown, ProducerClosed, TasklineError, Undelivered
from taskline.infra.kafka.publisher import Publisher
from taskline.infra.log import Position
from taskline.infra.role import Clock, SystemClock
from taskline.producers.preparation import Preparation, Prepared
from taskline.producers.submission import (
    DEFAULT_OPTIONS,
    OptionFields,
    Submission,
    SubmitOptions,
    TaskFailure,
    TaskHandle,
)
from taskline.producers.ticket import Ticket
from taskline.producers.type_source import HasCatalogue, TypesAtHand, TypeSource
from taskline.schemas.codec import Codec
from taskline.settings import Settings

# The client reports a time-out up to a second late (it scans), and then the report must reach the waiting thread.
_REPORT_GRACE_SECONDS = 5.0


class TaskProducer:
    """Puts tasks into the log; safe to share between threads. Close it, or use it as a context manager."""

    def __init__(
        self,
        settings: Settings,
        types: TypeSource | HasCatalogue | None = None,
        *,
        clock: Clock | None = None,
        codec: Codec | None = None,
        client_id: str = "taskline-producer",
    ) -> None:
        """Start a producer client; it connects by itself.

        Args:
            settings: where the log is, limits, time-outs.
            types: where task types are found: a catalogue, a directory, or a registry of handlers; None: read from the log.
            clock: gives creation times; the machine's when None.
            codec: encodes records; as settings.schemas says when None.
            client_id: a name for the broker's logs and the metrics.

        Raises:
            InvalidSettings: the Kafka client refuses the settings.
        """
        self._types = TypesAtHand(settings, types)
        self._preparation = Preparation(settings, self._types.source, clock or SystemClock(), codec)
        self._delivery_timeout = settings.producer.delivery_timeout_seconds
        # Sent and not acknowledged, or failed and not yet reported to the caller.
        self._open: set[Ticket] = set()
        self._closed = False
        self._publisher = Publisher(
            settings.kafka,
            settings.producer,
            client_id=client_id,
            max_record_bytes=settings.topics.max_record_bytes,
        )

    def submit(self, task_type: str, payload: Any, **options: Unpack[OptionFields]) -> TaskHandle:  # noqa: ANN401 - the schema's
        """Submit a task and wait until the broker has acknowledged it.

        Args:
            task_type: a registered name.
            payload: the handler's argument.
            **options: as in `SubmitOptions`.

        Raises:
            InvalidRequest: unknown type, wrong payload, impossible option, too large; nothing was sent.
            QueueFull: no room in the buffer within producer.max_block_seconds; nothing was sent.
            ProducerClosed: after `close`; nothing was sent.
            DeliveryFailed: refused; the task is certainly not in the log.
            DeliveryUnknown: no acknowledgement in time; the task that the error's `task_id` names may be in the log.
            Unavailable: task types are read from the log, and it does not answer.
        """
        chosen = SubmitOptions(**options) if options else DEFAULT_OPTIONS
        ticket = self._send(self._preparation.prepare(task_type, payload, chosen), 0)
        result = self._result(ticket)
        if isinstance(result, TaskFailure):
            raise result.error
        return result

    def submit_many(self, items: Iterable[Submission]) -> Iterator[TaskHandle | TaskFailure]:
        """Submit tasks as a pipeline; the results come in the order of the items.

        Nothing is sent before the results are iterated, and items are taken as room appears, so an endless input is fine. An
        item that is wrong, or was not acknowledged, gives a TaskFailure and does not stop the others. If the caller stops
        iterating, what was sent stays sent; `close` names what then fails.

        Raises:
            ProducerClosed: the producer was closed meanwhile; the results of what was sent before come first.
        """
        window: deque[Ticket | TaskFailure] = deque()
        limit = self._preparation.window
        closed: ProducerClosed | None = None
        for index, item in enumerate(items):
            try:
                window.append(self._send(self._preparation.prepare_item(item), index))
            except ProducerClosed as error:
                closed = error
                break
            except TasklineError as error:
                window.append(TaskFailure(index=index, error=error))
            if len(window) >= limit:
                # Waiting for the middle one, not for the first, wakes this thread once per half a window.
                self._await(window[limit // 2])
            while window and _is_settled(window[0]):
                yield self._result(window.popleft())
        while window:
            yield self._result(window.popleft())
        if closed is not None:
            raise closed

    def close(self, timeout_seconds: float | None = None) -> None:
        """Take no more tasks, wait until those sent are acknowledged, and stop. A second call does nothing.

        Args:
            timeout_seconds: how long to wait; None: producer.delivery_timeout_seconds.

        Raises:
            Undelivered: names the tasks that were not acknowledged in time, and those that failed without anybody
                having been told (the caller left a `submit_many`).
        """
        if self._closed:
            return
        self._closed = True
        self._publisher.flush(self._delivery_timeout if timeout_seconds is None else timeout_seconds)
        undelivered = sorted(str(ticket.task_id) for ticket in tuple(self._open))
        self._publisher.close(0)
        self._types.close()
        if undelivered:
            raise Undelivered(undelivered)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Undelivered as undelivered:
            if error is None:
                raise
            # The block's own error is the one to see.
            error.add_note(str(undelivered))

    def _send(self, prepared: Prepared, index: int) -> Ticket:
        if self._closed:
            raise ProducerClosed("the producer is closed")
        ticket = Ticket(prepared.task_id, index)
        self._open.add(ticket)
        try:
            self._publisher.send(prepared.record, partial(self._acknowledged, ticket))
        except BaseException:
            self._open.discard(ticket)
            raise
        return ticket

    def _acknowledged(self, ticket: Ticket, outcome: Position | DeliveryError) -> None:
        """On the publisher's thread."""
        if isinstance(outcome, Position):
            self._open.discard(ticket)
        ticket.resolve(outcome)

    def _await(self, entry: Ticket | TaskFailure) -> None:
        if isinstance(entry, Ticket):
            entry.wait(self._delivery_timeout + _REPORT_GRACE_SECONDS)

    def _result(self, entry: Ticket | TaskFailure) -> TaskHandle | TaskFailure:
        """The outcome in the caller's terms, waited for if need be."""
        if isinstance(entry, TaskFailure):
            return entry
        self._await(entry)
        outcome = entry.outcome
        if isinstance(outcome, Position):
            later = outcome.topic == self._preparation.scheduled_topic
            return TaskHandle(
                task_id=entry.task_id, position=outcome, status="scheduled" if later else "pending"
            )
        if outcome is None:
            outcome = DeliveryUnknown("the client has reported nothing, long after its own time-out")
        self._open.discard(entry)
        outcome.task_id = str(entry.task_id)
        return TaskFailure(index=entry.index, error=outcome, task_id=entry.task_id)


def _is_settled(entry: Ticket | TaskFailure) -> bool:
    return isinstance(entry, TaskFailure) or entry.outcome is not None
