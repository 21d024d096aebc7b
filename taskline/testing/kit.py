"""`InMemoryTaskline`: the whole of Taskline in one process and in no time, for tests of tasks.

Only Kafka, Cassandra and the clock are replaced. Submissions are checked and encoded, handlers are run, outcomes, dead letters and
the view come about by the very code that runs in production, so what a test sees here is what the servers do.

Everything happens on one virtual loop, and only while a method of the kit runs. Plain `def` handlers run inline on it, so
a test needs no thread and races with nothing. Task ids are random as in production, and with them partitions and lanes: the order
between tasks of one instant is not promised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import orjson

from taskline.infra.log import HEADER_CAUSE, Headers, InRecord, OutRecord, Position
from taskline.infra.topics import Topics, topology
from taskline.producers import AsyncTaskProducer, Submission, TaskFailure, TaskHandle
from taskline.producers.cancelling import Cancellation, Canceller
from taskline.producers.replay import Edit
from taskline.producers.replayer import Handled, Replayer
from taskline.producers.submission import OptionFields
from taskline.schemas.catalogue import TypeCatalogue
from taskline.schemas.codec import Codec
from taskline.schemas.events import DeadLetter, DeadLetterResolved
from taskline.schemas.ids import TaskId, from_ms
from taskline.settings import Settings
from taskline.state.dead_letters import MAX_PAGE, DeadLetters, LetterFilter
from taskline.state.fold import TaskHistory
from taskline.state.letter_row import Letter
from taskline.state.reader import StatusReader
from taskline.state.status import TaskState
from taskline.testing.broker import MemoryBroker
from taskline.testing.clock import DEFAULT_START, VirtualClock
from taskline.testing.delay import MemoryDelay
from taskline.testing.errors import BackgroundError
from taskline.testing.loop import VirtualLoop
from taskline.testing.process import track
from taskline.testing.projector import MemoryProjector
from taskline.testing.records import MemoryRecords
from taskline.testing.view import MemoryView
from taskline.testing.worker import MemoryWorker
from taskline.testing.world import World
from taskline.workers.registry import Registry

T = TypeVar("T")

# Virtual seconds that `run_until_idle` allows: longer than any handler's default time limit, and soon over when nothing ends.
IDLE_LIMIT_SECONDS = 3_600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    settings: Settings
    start: datetime
    codec: Codec
    workers: bool


class InMemoryTaskline:
    """Submit tasks, let time pass, look at what became of them; use it as a context manager.

    A worker for each queue of the registry (unless `workers=False`), a projector and a delay role run from the beginning.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        settings: Settings | None = None,
        start: datetime = DEFAULT_START,
        codec: Codec | None = None,
        workers: bool = True,
    ) -> None:
        """Make an empty Taskline.

        Args:
            registry: the tasks that can be submitted and that the workers run.
            settings: limits, partitions, time-outs; the defaults when None (the environment is not read). Its
                `topics.queues` are completed by the registry's.
            start: where virtual time begins, an aware datetime.
            codec: how records are framed; Avro single objects when None.
            workers: False: none runs until `start_worker`.
        """
        self._registry = registry
        self._asked = _Asked(
            settings=_with_queues(settings or Settings(), registry),
            start=start,
            codec=codec or Codec(),
            workers=workers,
        )
        self._producer: AsyncTaskProducer | None = None
        self._projector: MemoryProjector | None = None
        self._delay: MemoryDelay | None = None
        self._workers: list[MemoryWorker] = []
        self._background: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        if self._producer is not None:
            raise RuntimeError("this InMemoryTaskline was used before: make a new one")
        self._loop = VirtualLoop()
        try:
            self._build()
            self.start_projector()
            self.start_delay()
            if self._asked.workers:
                self.start_worker()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._loop.run_until_complete(self._close())
        finally:
            self._loop.close()
        if error is None:
            self._raise_background()

    # ---- tasks -------------------------------------------------------------------------------------------

    def submit(self, task_type: str, payload: Any, **options: Unpack[OptionFields]) -> TaskHandle:  # noqa: ANN401 - the schema's
        """Submit a task, as `TaskProducer.submit`; it is in the log when this returns."""
        return self._call(self._submitter.submit(task_type, payload, **options))

    def submit_many(self, items: Iterable[Submission]) -> list[TaskHandle | TaskFailure]:
        """Submit tasks, as `TaskProducer.submit_many`."""

        async def collect() -> list[TaskHandle | TaskFailure]:
            return [result async for result in self._submitter.submit_many(items)]

        return self._call(collect())

    def status(self, task_id: TaskId, *, tenant: str = "default") -> TaskState:
        """The task's state, as the view has it; an id that is not in the view yet is waited for as by the HTTP API.

        Raises:
            TaskNotFound: unknown, or another tenant's.
        """
        return self._call(self._reader.get(task_id, tenant=tenant))

    def result(self, task_id: TaskId, *, tenant: str = "default") -> Any:  # noqa: ANN401 - JSON
        """What a completed task's handler returned, decoded from its JSON; None: nothing, or not completed."""
        encoded = self.status(task_id, tenant=tenant).result
        return None if encoded is None else orjson.loads(encoded)

    def history(self, task_id: TaskId, *, tenant: str = "default") -> TaskHistory:
        """The task's state, executions and events."""
        return self._call(self._reader.history(task_id, tenant=tenant))

    def cancel(self, task_id: TaskId, *, running: bool = False, tenant: str = "default") -> Cancellation:
        """Cancel a task, as `DELETE /tasks/{task_id}`; `running`: as with `?running=abort`.

        Raises:
            TaskNotFound: unknown, or another tenant's.
            DeliveryError: the log did not acknowledge it.
        """
        return self._call(self._canceller.cancel(task_id, tenant=tenant, abort=running))

    # ---- time --------------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The virtual time, UTC."""
        return from_ms(self.clock.now_ms())

    @property
    def elapsed_seconds(self) -> float:
        """Virtual seconds since the beginning."""
        return self._loop.time()

    def advance(self, seconds: float) -> None:
        """Let that much virtual time pass, and everything happen that falls into it."""
        self._call(asyncio.sleep(seconds))

    def run_until_idle(self, *, limit_seconds: float = IDLE_LIMIT_SECONDS) -> None:
        """Let time pass until workers, projector and delay role have done and committed all that is in the log for them.

        Delayed tasks and retries come due on the way, so time passes as far as the last of them. What has nobody to do it is not
        waited for: tasks of a queue without a worker, the view while no projector runs, what waits while no delay role runs.

        Raises:
            NeverIdle: something was still outstanding after `limit_seconds` of virtual time; it is named. Give more for delays that
                are longer, or use `advance`.
        """
        self.run_until(lambda: not self._outstanding(), limit_seconds=limit_seconds)

    def run_until(self, condition: Callable[[], bool], *, limit_seconds: float = IDLE_LIMIT_SECONDS) -> None:
        """Let time pass until `condition` holds; it is asked at each moment before time would move.

        The condition may look at the test's own objects and at the kit's attributes (`broker`, `view`), but must not call the
        kit's methods that run things.

        Raises:
            NeverIdle: it did not hold within `limit_seconds` of virtual time.
        """

        def checked() -> bool:
            self._check_roles()
            return condition()

        self._loop.run_until(checked, limit_seconds=limit_seconds, outstanding=self._outstanding)
        self._raise_background()

    # ---- the log -----------------------------------------------------------------------------------------

    def records(self, topic: str) -> tuple[InRecord, ...]:
        """What is on a topic (`tl.topics` has the names), in the order of the appends."""
        return self.broker.records(topic)

    def inject(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> Position:
        """Put any bytes on a topic, as a broken or hostile producer would."""
        record = OutRecord(topic=topic, value=value, key=key, headers=headers or {}, partition=partition)
        return self.broker.append(record)

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """The tasks on the dead-letter topic, in the order in which they got there."""
        return tuple(
            self._world.codec.decode(record.value, DeadLetter)
            for record in self.records(self.topics.dlq)
            if HEADER_CAUSE not in record.headers
            and self._world.codec.kind_of(record.value or b"") is not DeadLetterResolved
        )

    def letters(self, wanted: LetterFilter | None = None) -> tuple[Letter, ...]:
        """The dead letters that the view has, as `taskline dlq list` shows them: the newest MAX_PAGE.

        Args:
            wanted: which; None: the open ones.
        """
        page = self._call(self._letters.list(wanted or LetterFilter(), limit=MAX_PAGE))
        return page.letters

    def replay(self, letter_id: TaskId, *, edit: Edit | None = None) -> Handled:
        """Replay a dead letter, as `taskline dlq replay`.

        Args:
            letter_id: the dead task, or the id of raw bytes.
            edit: another payload (`taskline.producers.replay.edited`).

        Raises:
            DeadLetterError: there is none, or it can't be replayed.
        """

        async def replay() -> Handled:
            return await self._replayer.replay(await self._letters.get(letter_id), edit=edit)

        return self._call(replay())

    def discard(self, letter_id: TaskId, *, note: str | None = None) -> Handled:
        """Discard a dead letter, as `taskline dlq discard`; raises as `replay`."""

        async def discard() -> Handled:
            return await self._replayer.discard(await self._letters.get(letter_id), note=note)

        return self._call(discard())

    def undecodable(self) -> tuple[InRecord, ...]:
        """The records on the dead-letter topic that are no tasks: bytes verbatim, the cause in a header."""
        return tuple(record for record in self.records(self.topics.dlq) if HEADER_CAUSE in record.headers)

    # ---- roles -------------------------------------------------------------------------------------------

    @property
    def workers(self) -> tuple[MemoryWorker, ...]:
        """The running workers, longest-running first."""
        return tuple(self._workers)

    def start_worker(
        self, registry: Registry | None = None, *, queue: str | None = None
    ) -> tuple[MemoryWorker, ...]:
        """Start one more worker process, for one queue or for each queue of the registry.

        Args:
            registry: what it runs; the kit's own when None. Another one's task types are registered first, as a
                deployment does, so that a type's new schema is checked against the earlier ones.
            queue: the queue that it serves; None: every queue of the registry, by one process each.

        Raises:
            IncompatibleSchema: a task type's schema can't read what may be queued.
        """
        chosen = self._registry if registry is None else registry
        self._world.register(chosen)
        started = tuple(
            MemoryWorker(self._world, chosen.for_queue(each), each)
            for each in (chosen.queues if queue is None else (queue,))
        )
        for worker in started:
            self._call(worker.start())
            self._workers.append(worker)
        return started

    def stop_worker(self, worker: MemoryWorker | None = None) -> None:
        """Let a worker (None: all) finish within its grace period, commit and leave, as on SIGTERM."""
        for each in self._take(worker):
            self._call(each.stop())

    def crash_worker(self, worker: MemoryWorker | None = None) -> None:
        """Let a worker (None: all) die at once, as on SIGKILL.

        The group notices when its session is over (`kafka.session_timeout_ms` of virtual time). Handlers are cut off
        where they wait; unlike at a real kill, their `finally` blocks run.
        """
        for each in self._take(worker):
            self._call(each.kill())

    def start_projector(self) -> None:
        """Start the projector, unless it runs."""
        if self._projector is None:
            self._projector = MemoryProjector(self._world)
            self._call(self._projector.start())

    def stop_projector(self) -> None:
        """Let the projector finish what it has begun, commit and leave."""
        projector, self._projector = self._projector, None
        if projector is not None:
            self._call(projector.stop())

    def crash_projector(self) -> None:
        """Let the projector die at once, with whatever it had not committed."""
        projector, self._projector = self._projector, None
        if projector is not None:
            self._call(projector.kill())

    def pause_projector(self) -> None:
        """Keep the projector from going on, so that the view stays as it is."""
        if self._projector is not None:
            self._projector.pause()

    def resume_projector(self) -> None:
        """Let the projector go on."""
        if self._projector is not None:
            self._projector.resume()

    def start_delay(self) -> None:
        """Start the delay role, unless it runs."""
        if self._delay is None:
            self._delay = MemoryDelay(self._world)
            self._call(self._delay.start())

    def stop_delay(self) -> None:
        """Let the delay role hand over, commit and leave; what waits stays in the log."""
        delay, self._delay = self._delay, None
        if delay is not None:
            self._call(delay.stop())

    def crash_delay(self) -> None:
        """Let the delay role die at once, with whatever it had not committed; its group notices as in `crash_worker`."""
        delay, self._delay = self._delay, None
        if delay is not None:
            self._call(delay.kill())

    # ---- inside ------------------------------------------------------------------------------------------

    def _build(self) -> None:
        asked = self._asked
        track(self._loop)
        self._loop.set_exception_handler(self._failed_in_background)
        self.settings = asked.settings
        self.topics = Topics(namespace=self.settings.kafka.namespace)
        self.clock = VirtualClock(self._loop, asked.start)
        self.broker = MemoryBroker(self.clock)
        self.broker.create_topics(topology(self.settings))
        self.view = MemoryView(self.clock)
        self._world = World(
            broker=self.broker,
            view=self.view,
            clock=self.clock,
            codec=asked.codec,
            topics=self.topics,
            settings=self.settings,
            types=TypeCatalogue(),
        )
        self._log = self._world.log()
        self._producer = AsyncTaskProducer(
            self._log, self.settings, self._world.types, clock=self.clock, codec=asked.codec
        )
        self._reader = StatusReader(self.view, asked.codec, self.settings.api, clock=self.clock)
        self._canceller = Canceller(
            self._log,
            self._reader,
            asked.codec,
            self.settings,
            worker="memory-caller",
            clock=self.clock,
        )
        self._letters = DeadLetters(self.view, self.settings, self.clock)
        self._replayer = Replayer(
            self._log,
            MemoryRecords(self.broker),
            self.view,
            asked.codec,
            self.settings,
            by="memory-operator",
            clock=self.clock,
        )
        self._world.register(self._registry)

    @property
    def _submitter(self) -> AsyncTaskProducer:
        if self._producer is None:
            raise RuntimeError("InMemoryTaskline is a context manager: use it in a `with` block")
        return self._producer

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            result = self._loop.run_until_complete(coroutine)
        except RuntimeError:
            coroutine.close()
            raise
        self._check_roles()
        self._raise_background()
        return result

    async def _close(self) -> None:
        if self._producer is not None:
            for worker in self._workers:
                await worker.kill()
            if self._projector is not None:
                await self._projector.kill()
            if self._delay is not None:
                await self._delay.kill()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()

    def _take(self, worker: MemoryWorker | None) -> list[MemoryWorker]:
        if worker is not None and worker not in self._workers:
            raise ValueError(f"{worker!r} does not run")
        taken = list(self._workers) if worker is None else [worker]
        self._workers = [each for each in self._workers if each not in taken]
        return taken

    def _outstanding(self) -> list[str]:
        """What the running roles have not done yet, in words; empty: idle."""
        found: list[str] = []
        for worker in self._workers:
            found += worker.outstanding()
        if self._projector is not None:
            found += self._projector.outstanding()
        if self._delay is not None:
            found += self._delay.outstanding()
        if self._log.unacknowledged:
            found.append(f"{self._log.unacknowledged} submission(s) without acknowledgement")
        return list(dict.fromkeys(found))

    def _check_roles(self) -> None:
        for worker in self._workers:
            worker.check()
        if self._projector is not None:
            self._projector.check()
        if self._delay is not None:
            self._delay.check()

    def _failed_in_background(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._background.append(context)

    def _raise_background(self) -> None:
        if self._background:
            context, *_ = self._background
            self._background.clear()
            raise BackgroundError(context["message"]) from context.get("exception")


def _with_queues(settings: Settings, registry: Registry) -> Settings:
    queues = tuple(dict.fromkeys((*settings.topics.queues, *registry.queues)))
    return settings.model_copy(update={"topics": settings.topics.model_copy(update={"queues": queues})})
