"""`AsyncTaskProducer`: submit tasks from asyncio code, on Kafka or on any other `AsyncLog`.

Invariant: as in `taskline.producers.producer`. No thread is used here, so that a loop with virtual time can drive it.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, Unpack

from taskline.errors import DeliveryError, ProducerClosed, TasklineError, Undelivered
from taskline.infra.kafka.asynclog import KafkaLog
from taskline.infra.log import AsyncLog, Position
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
from taskline.producers.type_source import HasCatalogue, TypesAtHand, TypeSource
from taskline.schemas.codec import Codec
from taskline.schemas.ids import TaskId
from taskline.settings import Settings


class ClosableLog(AsyncLog, Protocol):
    """A log that its producer closes."""

    async def close(self, timeout_seconds: float | None = None) -> int:
        """Stop; how many records were given up."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sent:
    task_id: TaskId
    index: int
    future: Future[Position]


class AsyncTaskProducer:
    """Puts tasks into a log; belongs to one event loop. Close it, or use it as an async context manager."""

    def __init__(
        self,
        log: AsyncLog,
        settings: Settings,
        types: TypeSource | HasCatalogue | None = None,
        *,
        clock: Clock | None = None,
        codec: Codec | None = None,
    ) -> None:
        """Submit to a log that somebody else closes; `on_kafka` makes a producer with a log of its own.

        Args:
            log: where records go.
            settings: limits, retention, namespace.
            types: where task types are found: a catalogue, a directory, or a registry of handlers; None: read from Kafka.
            clock: gives creation times; the machine's when None.
            codec: encodes records; as settings.schemas says when None.
        """
        self._log = log
        self._owned: ClosableLog | None = None
        self._types = TypesAtHand(settings, types)
        self._preparation = Preparation(settings, self._types.source, clock or SystemClock(), codec)
        self._delivery_timeout = settings.producer.delivery_timeout_seconds
        # Sent and not acknowledged, or failed and not yet reported to the caller.
        self._open: dict[Future[Position], TaskId] = {}
        self._closed = False

    @classmethod
    def on_kafka(
        cls,
        settings: Settings,
        types: TypeSource | HasCatalogue | None = None,
        *,
        clock: Clock | None = None,
        codec: Codec | None = None,
        client_id: str = "taskline-producer",
    ) -> Self:
        """A producer with a Kafka client of its own, for the running loop; arguments as above.

        Raises:
            InvalidSettings: the Kafka client refuses the settings.
        """
        log = KafkaLog(settings, client_id=client_id)
        producer = cls(log, settings, types, clock=clock, codec=codec)
        producer._owned = log
        return producer

    async def submit(self, task_type: str, payload: Any, **options: Unpack[OptionFields]) -> TaskHandle:  # noqa: ANN401 - the schema's
        """Submit a task; returns when the broker has acknowledged it.

        A cancelled call takes nothing back: the task may be in the log.

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
            Unavailable: task types are read from Kafka, and it does not answer.
        """
        await self._types_ready()
        chosen = SubmitOptions(**options) if options else DEFAULT_OPTIONS
        result = await self._result(self._send(self._preparation.prepare(task_type, payload, chosen), 0))
        if isinstance(result, TaskFailure):
            raise result.error
        return result

    async def submit_many(
        self, items: Iterable[Submission] | AsyncIterable[Submission]
    ) -> AsyncIterator[TaskHandle | TaskFailure]:
        """Submit tasks as a pipeline; the results come in the order of the items.

        Nothing is sent before the results are iterated, and items are taken as room appears, so an endless input is fine. An
        item that is wrong, or was not acknowledged, gives a TaskFailure and does not stop the others.

        Raises:
            ProducerClosed: the producer was closed meanwhile; the results of what was sent before come first.
        """
        await self._types_ready()
        window: deque[_Sent | TaskFailure] = deque()
        limit = self._preparation.window
        closed: ProducerClosed | None = None
        index = 0
        async for item in _each(items):
            try:
                window.append(self._send(self._preparation.prepare_item(item), index))
            except ProducerClosed as error:
                closed = error
                break
            except TasklineError as error:
                window.append(TaskFailure(index=index, error=error))
            index += 1
            if len(window) >= limit:
                # Waiting for the middle one, not for the first, wakes this task once per half a window.
                await _settled(window[limit // 2])
            while window and _is_settled(window[0]):
                yield await self._result(window.popleft())
        while window:
            yield await self._result(window.popleft())
        if closed is not None:
            raise closed

    async def close(self, timeout_seconds: float | None = None) -> None:
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
        waiting = [future for future in self._open if not future.done()]
        if waiting:
            patience = self._delivery_timeout if timeout_seconds is None else timeout_seconds
            await asyncio.wait(waiting, timeout=patience)
        # A future's callbacks run a turn of the loop after it is done, so its state is asked, not its place in the book.
        undelivered = sorted(
            str(task_id) for future, task_id in tuple(self._open.items()) if not _is_acknowledged(future)
        )
        if self._owned is not None:
            await self._owned.close(0)
        if self._types.ready:
            self._types.close()
        if undelivered:
            raise Undelivered(undelivered)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except Undelivered as undelivered:
            if error is None:
                raise
            # The block's own error is the one to see.
            error.add_note(str(undelivered))

    async def _types_ready(self) -> None:
        if not self._types.ready:
            await asyncio.to_thread(self._types.source)

    def _send(self, prepared: Prepared, index: int) -> _Sent:
        if self._closed:
            raise ProducerClosed("the producer is closed")
        future = self._log.append(prepared.record)
        self._open[future] = prepared.task_id
        future.add_done_callback(self._acknowledged)
        return _Sent(task_id=prepared.task_id, index=index, future=future)

    def _acknowledged(self, future: Future[Position]) -> None:
        if _is_acknowledged(future):
            self._open.pop(future, None)

    async def _result(self, entry: _Sent | TaskFailure) -> TaskHandle | TaskFailure:
        """The outcome in the caller's terms, waited for if need be."""
        if isinstance(entry, TaskFailure):
            return entry
        try:
            position = await entry.future
        except DeliveryError as error:
            self._open.pop(entry.future, None)
            error.task_id = str(entry.task_id)
            return TaskFailure(index=entry.index, error=error, task_id=entry.task_id)
        later = position.topic == self._preparation.scheduled_topic
        return TaskHandle(
            task_id=entry.task_id, position=position, status="scheduled" if later else "pending"
        )


def _is_acknowledged(future: Future[Position]) -> bool:
    """Also of one that its caller has cancelled: nobody is owed its outcome."""
    return future.done() and (future.cancelled() or future.exception() is None)


def _is_settled(entry: _Sent | TaskFailure) -> bool:
    return isinstance(entry, TaskFailure) or entry.future.done()


async def _settled(entry: _Sent | TaskFailure) -> None:
    if isinstance(entry, _Sent) and not entry.future.done():
        await asyncio.wait([entry.future])


async def _each(items: Iterable[Submission] | AsyncIterable[Submission]) -> AsyncIterator[Submission]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
