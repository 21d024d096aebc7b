"""The worker's engine: records in, handlers run, outcomes and offsets out. Knows neither Kafka nor threads.

Invariants:
- A slot is taken before Started is appended, and only then: what is buffered has not been started. It is given away and taken again
  while an execution waits to hear whether its task was cancelled (`step_aside`).
- An offset is done only when its outcome is acknowledged (`conductor`), and only while its partition is ours (`feed`).
- Nothing waits without a bound in memory: the buffer by worker.prefetch, a partition's window by worker.window, running
  handlers by the slots, unacknowledged outcomes by MAX_UNSETTLED_PER_SLOT.
- An attempt that is in flight or over here is not run from another place in the log (`duplicates`).
- What was in a process that died is run again alone (a *suspect*), and only what dies alone is held against a task.
- A process that stood still starts nothing before its group has taken a commit of it: others may have its partitions.
- Nothing that a handler raises, and no absence of the log, ends the worker.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import structlog

from taskline.infra.log import Position
from taskline.infra.tiers import Tiers
from taskline.infra.topics import Topics
from taskline.schemas.events import Priority
from taskline.schemas.ids import TaskId
from taskline.settings import WorkerSettings
from taskline.workers import metrics
from taskline.workers.admission import Rejected, Undecodable
from taskline.workers.cancels import FRESH_SECONDS
from taskline.workers.conductor import CANCEL_GRACE_SECONDS, Conductor
from taskline.workers.dispatch import ALL, Dispatcher, Gate
from taskline.workers.execution import Execution, Phase
from taskline.workers.feed import Assignment, Feed, Waiting
from taskline.workers.gates import Gates
from taskline.workers.limits import TypeLimits
from taskline.workers.lobby import Lobby
from taskline.workers.ports import WorkerPorts
from taskline.workers.recorder import RELEASE_SECONDS, Recorder
from taskline.workers.registry import Registry
from taskline.workers.slots import Slots

log = structlog.get_logger(__name__)

# Outcomes may be on their way while new handlers run; beyond this the log is slower than the handlers, and new ones wait.
MAX_UNSETTLED_PER_SLOT = 4
_LEAST_MAX_UNSETTLED = 256
# How often a process notes that it does not stand still; well below FRESH_SECONDS.
_AWAKE_SECONDS = 0.5
_HIGH = frozenset((Priority.HIGH,))
SHUTDOWN = "shutdown"
REVOKED = "revoked"
LOST = "lost"


class WorkerEngine:
    """Runs one registry's handlers on the records of its intakes."""

    def __init__(
        self,
        registry: Registry,
        ports: WorkerPorts,
        settings: WorkerSettings,
        *,
        topics: Topics,
        tiers: Tiers,
        worker: str,
    ) -> None:
        """Plug an engine together; `run` starts it.

        Args:
            registry: the tasks to serve; any other is a dead letter.
            ports: everything around.
            settings: bounds and time limits.
            topics: names the dead-letter topic and the delay tiers.
            tiers: in which retries wait.
            worker: this process's name in the log.
        """
        self._ports = ports
        self._settings = settings
        self._recorder = Recorder(ports, worker=worker, topics=topics, tiers=tiers)
        self._conductor = Conductor(ports, self._recorder, settings)
        self._feeds = {
            priority: Feed(priority, intake, self, settings) for priority, intake in ports.intakes.items()
        }
        # Where one priority alone is served there is nobody to reserve for.
        shared = Priority.HIGH in ports.intakes and len(ports.intakes) > 1
        self._slots = Slots(settings.concurrency, reserved=settings.high_reserve if shared else 0.0)
        self._gates = Gates(registry, self._slots, opened=self._opened)
        self._lobby = Lobby(
            registry,
            ports,
            dispatcher=Dispatcher(_weights(settings)),
            gates=self._gates.of,
            changed=self._schedule_pump,
        )
        # What was taken from the lobby and is not over.
        self._running: set[Execution] = set()
        # Those of them that need no slot any more, or never did.
        self._unsettled = 0
        self._max_unsettled = max(_LEAST_MAX_UNSETTLED, MAX_UNSETTLED_PER_SLOT * settings.concurrency)
        # What waits off its slot; and who of them may have one again, the oldest first.
        self._aside: set[Execution] = set()
        self._returning: deque[tuple[Execution, Future[None]]] = deque()
        if ports.cancels is not None:
            ports.cancels.listen(self._abort)
        self._pump_due = False
        # When this process was last seen to be awake, by the loop's clock; and those who must say whether it is a member still.
        self._awake_at = 0.0
        self._thawing: set[Future[None]] = set()
        self._stopping = False
        self._failure: Exception | None = None
        self._wake = asyncio.Event()
        # Hand-backs of lost partitions, kept from the garbage collector.
        self._chores: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then drain: running handlers may finish within worker.grace_seconds.

        Raises:
            Exception: an intake can't go on (`IntakeSink.failed`) or could not start, after the drain.
        """
        metrics.SLOTS.set(self._slots.total)
        self._awake_at = asyncio.get_running_loop().time()
        stopping = asyncio.ensure_future(stop.wait())
        stopping.add_done_callback(lambda _: self._wake.set())
        committing = asyncio.ensure_future(self._commit_regularly())
        try:
            for feed in self._feeds.values():
                await feed.start()
            await self._wake.wait()
        except Exception as error:
            self._failure = self._failure or error
        finally:
            self._stopping = True
            stopping.cancel()
            committing.cancel()
            await self._leave()
        if self._failure is not None:
            raise self._failure

    # ---- FeedHost: what the feeds ask for -------------------------------------------------------------------

    def limit(self, overrides: Mapping[str, TypeLimits]) -> None:
        """Put these limits in the place of the task types' own, from now on; types that are not named have their own."""
        self._gates.configure(overrides)

    def offer(self, waiting: Sequence[Waiting]) -> None:
        """See `FeedHost`."""
        self._lobby.offer(waiting)
        self._schedule_pump()

    async def drain(self, assignments: Sequence[Assignment]) -> None:
        """See `FeedHost`."""
        reason = SHUTDOWN if self._stopping else REVOKED
        runs = self._take_back(assignments)
        # At once, before an acknowledgement lets the handler of one begin.
        starting = self._interrupt([run for run in runs if run.phase is Phase.STARTING])
        handing_back = asyncio.ensure_future(self._release(starting, reason))
        outers = {run.outer: run for run in runs if run.phase is not Phase.STARTING and run.outer is not None}
        if outers:
            _, late = await asyncio.wait(outers, timeout=self._settings.grace_seconds)
            await self._hand_back([outers[outer] for outer in late], reason)
        await handing_back

    def abandon(self, assignments: Sequence[Assignment]) -> None:
        """See `FeedHost`."""
        runs = self._take_back(assignments)
        if runs:
            chore = asyncio.ensure_future(self._release(self._interrupt(runs), LOST))
            self._chores.add(chore)
            chore.add_done_callback(self._chores.discard)

    def fail(self, error: Exception) -> None:
        """See `FeedHost`."""
        self._failure = self._failure or error
        self._wake.set()

    # ---- from the buffer into slots ---------------------------------------------------------------------------

    def _schedule_pump(self) -> None:
        # Once per turn of the loop: what becomes free or arrives within one goes to the log together.
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        if self._stopping or self._frozen():
            return
        try:
            self._readmit()
            while self._unsettled + len(self._aside) < self._max_unsettled:
                run = self._lobby.refused()
                if run is None and self._slots.free:
                    run = self._lobby.next(self._gates.is_open, ALL if self._slots.general else _HIGH)
                if run is None:
                    break
                self._begin(run)
            for feed in self._feeds.values():
                feed.refill()
        except Exception as error:
            # Raised into the event loop it would only be logged, and the worker would stand still.
            self.fail(error)

    def _frozen(self) -> bool:
        """Whether this process stood still for so long that its partitions may be others' by now, and the group has not said that they are not."""
        now = asyncio.get_running_loop().time()
        if now - self._awake_at > FRESH_SECONDS:
            log.warning(
                "this process stood still; it asks its group before it starts anything",
                seconds=now - self._awake_at,
            )
            for run in self._running:
                run.stood_still = run.leaving
            for feed in self._feeds.values():
                if feed.assignments:
                    confirmed = feed.confirm()
                    self._thawing.add(confirmed)
                    confirmed.add_done_callback(self._thawed)
        self._awake_at = now
        return bool(self._thawing)

    def _thawed(self, confirmed: Future[None]) -> None:
        self._thawing.discard(confirmed)
        self._schedule_pump()

    def _begin(self, run: Execution) -> None:
        refusal = self._refusal(run)
        if refusal is not None:
            run.phase = Phase.SETTLING
            self._unsettled += 1
            self._launch(run, refusal)
            return
        assert run.executor is not None  # noqa: S101 - what has none is refused
        self._slots.take(run.executor, high=run.waiting.priority is Priority.HIGH)
        run.slot = True
        self._gates.enter(run)
        self._launch(run, self._conductor.perform(run, self))

    def _refusal(self, run: Execution) -> Coroutine[Any, Any, None] | None:
        """The way of what needs no slot, since its handler is not run; None: it is."""
        if isinstance(run.refused, Undecodable):
            return self._conductor.bury(run, run.refused.cause)
        if isinstance(run.refused, Rejected):
            return self._conductor.reject(run, run.refused)
        start_by = None if run.admitted is None else run.admitted.submission.start_by
        if start_by is not None and self._ports.clock.now_ms() > start_by:
            return self._conductor.expire(run)
        return None

    def _launch(self, run: Execution, way: Coroutine[Any, Any, None]) -> None:
        self._running.add(run)
        run.outer = asyncio.get_running_loop().create_task(way)
        run.outer.add_done_callback(partial(self._over, run))

    # ---- SlotHost: what the conductor asks for ------------------------------------------------------------------

    def handler_over(self, run: Execution) -> None:
        """See `SlotHost`: its slot goes, its outcome is on the way."""
        self._unsettled += 1
        self._give_slot(run)

    def step_aside(self, run: Execution) -> None:
        """See `SlotHost`."""
        self._aside.add(run)
        self._give_slot(run, aside=True)

    async def step_back(self, run: Execution) -> None:
        """See `SlotHost`."""
        if run in self._aside:
            admitted: Future[None] = asyncio.get_running_loop().create_future()
            self._returning.append((run, admitted))
            self._schedule_pump()
            await admitted

    async def still_ours(self, run: Execution) -> None:
        """See `SlotHost`."""
        frozen = self._frozen()
        if run.stood_still:
            # While it was being handed over, when nobody can be asked: the end of the hand-over, or the loss, ends this wait.
            await asyncio.get_running_loop().create_future()
        elif frozen:
            await run.waiting.assignment.feed.confirm()

    def _readmit(self) -> None:
        """Give free slots to those who had one before."""
        for _ in range(len(self._returning)):
            run, admitted = self._returning.popleft()
            assert run.executor is not None  # noqa: S101 - it had a slot
            if admitted.done():
                # Handed back meanwhile.
                continue
            high = run.waiting.priority is Priority.HIGH
            if (self._slots.free if high else self._slots.general) and self._slots.room(
                run.executor, high=high
            ):
                self._slots.take(run.executor, high=high)
                run.slot = True
                self._aside.discard(run)
                admitted.set_result(None)
            else:
                self._returning.append((run, admitted))

    def _abort(self, task_id: TaskId) -> None:
        """Stop what runs of a task."""
        for run in self._running:
            if run.admitted is not None and run.admitted.submission.task_id == task_id:
                self._conductor.abort(run)

    # ---- the end of an execution --------------------------------------------------------------------------------

    def _over(self, run: Execution, outer: asyncio.Task[None]) -> None:
        """The record is done, or handed back."""
        self._running.discard(run)
        self._aside.discard(run)
        if run.phase is Phase.SETTLING:
            self._unsettled -= 1
        self._give_slot(run)
        self._gates.over(run)
        self._schedule_pump()
        error = None if outer.cancelled() else outer.exception()
        if error is not None:
            # Nothing that a handler or the log does ends here: it is a fault of the worker, and to go on would leave this
            # record, and with it its partition, undone for ever.
            log.error("worker fault", exc_info=error, topic=run.position.topic, offset=run.position.offset)
            self.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        elif run.again and not run.leaving and not outer.cancelled():
            self._lobby.run_alone(run)
        else:
            self._lobby.over(run, ended=not outer.cancelled() and not run.again)

    def _give_slot(self, run: Execution, *, aside: bool = False) -> None:
        """Give its slot away; who only steps aside keeps its places within its limits."""
        handler = run.handler
        if (
            handler is not None
            and not handler.done()
            and run.executor is not None
            and not run.executor.interruptible
        ):
            # It can't be stopped and uses a thread: the slot is free when it really ends.
            handler.add_done_callback(lambda _: self._give_slot(run))
            return
        if run.slot and run.executor is not None:
            run.slot = False
            self._slots.give(run.executor, high=run.waiting.priority is Priority.HIGH)
            self._schedule_pump()
            if run.executor.capacity is not None:
                for gate in self._slots.gates(run.executor):
                    self._lobby.opened(gate)
        if not aside:
            self._gates.leave(run)

    def _opened(self, gate: Gate) -> None:
        self._lobby.opened(gate)
        self._schedule_pump()

    # ---- giving partitions back ---------------------------------------------------------------------------------

    def _take_back(self, assignments: Sequence[Assignment]) -> list[Execution]:
        """Drop what waits of these; return what was taken from the lobby and is not over."""
        leaving = set(assignments)
        self._lobby.leave(leaving)
        self._schedule_pump()
        running = [run for run in self._running if run.waiting.assignment in leaving]
        for run in running:
            run.leaving = True
            if run.line is not None:
                run.line.stop()
        return running

    async def _hand_back(self, runs: Sequence[Execution], reason: str) -> None:
        """Stop executions where they are; their offsets stay undone, and what was begun reads pending again."""
        await self._release(self._interrupt(runs), reason)

    def _interrupt(self, runs: Sequence[Execution]) -> list[Execution]:
        """Take executions no further, at once; returns those whose handler did not end."""
        for run in runs:
            if run.outer is not None:
                run.outer.cancel()
        return [run for run in runs if run.phase is not Phase.SETTLING]

    async def _release(self, runs: Sequence[Execution], reason: str) -> None:
        stoppable = [
            run.handler
            for run in runs
            if run.handler is not None and run.executor is not None and run.executor.interruptible
        ]
        for handler in stoppable:
            handler.cancel()
        if stoppable:
            await asyncio.wait(stoppable, timeout=CANCEL_GRACE_SECONDS)
        released = [self._recorder.released(run, reason) for run in runs if run.opened]
        if released:
            await _settled(released, RELEASE_SECONDS)

    async def _leave(self) -> None:
        held = [assignment for feed in self._feeds.values() for assignment in feed.assignments]
        log.info("draining", running=self._slots.used, unsettled=self._unsettled, buffered=len(self._lobby))
        await self.drain(held)
        # Their revocations find nothing left to wait for, and make the final commits.
        closing = [feed.close() for feed in self._feeds.values()]
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, Exception):
                self._failure = self._failure or outcome
        if self._chores:
            await asyncio.wait(self._chores)
        self._publish_gauges()
        for executor in self._ports.executors:
            executor.close()

    # ---- progress -----------------------------------------------------------------------------------------------

    async def _commit_regularly(self) -> None:
        try:
            due = asyncio.get_running_loop().time() + self._settings.commit_interval_seconds
            while True:
                await asyncio.sleep(min(self._settings.commit_interval_seconds, _AWAKE_SECONDS))
                self._frozen()
                now = asyncio.get_running_loop().time()
                if now >= due:
                    due = now + self._settings.commit_interval_seconds
                    for feed in self._feeds.values():
                        feed.commit()
                    self._publish_gauges()
        except Exception as error:
            # Without commits a worker repeats ever more after a crash; better now than then.
            self.fail(error)

    def _publish_gauges(self) -> None:
        in_flight = 0
        for feed in self._feeds.values():
            metrics.BUFFERED.labels(feed.priority.value).set(feed.buffered)
            in_flight += sum(assignment.tracker.unfinished for assignment in feed.assignments)
        metrics.IN_FLIGHT.set(in_flight)
        metrics.SLOTS_USED.set(self._slots.used)
        metrics.ASIDE.set(len(self._aside))


def _weights(settings: WorkerSettings) -> Mapping[Priority, int] | None:
    if settings.dispatch == "drain":
        return None
    return {
        Priority.HIGH: settings.weight_high,
        Priority.NORMAL: settings.weight_normal,
        Priority.LOW: settings.weight_low,
    }


async def _settled(futures: Sequence[Future[Position]], timeout_seconds: float) -> None:
    """Wait for futures, whatever becomes of them."""
    _, late = await asyncio.wait(futures, timeout=timeout_seconds)
    for future in futures:
        if future in late:
            future.add_done_callback(_seen)
        else:
            _seen(future)


def _seen(future: Future[Position]) -> None:
    if not future.cancelled():
        future.exception()
