"""The API's processes and those who call them: submitters, cancellers, readers, HTTP workers, operators."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from gateway_kit import MemoryGateway, failure

from simulation.ledger import Entry, act_of
from simulation.plan import Job
from taskline.errors import (
    DeliveryFailed,
    DeliveryUnknown,
    InvalidOption,
    OutcomeUnknown,
    QueueFull,
    StaleLease,
    TasklineError,
    TaskNotFound,
    Unavailable,
)
from taskline.producers import AsyncTaskProducer
from taskline.producers.cancelling import Canceller, Fate
from taskline.producers.replayer import Replayer
from taskline.schemas.ids import TaskId, from_ms, to_ms
from taskline.state.dead_letters import MAX_PAGE, DeadLetters, LetterFilter
from taskline.state.reader import StatusReader
from taskline.testing.records import MemoryRecords
from taskline.testing.role import MemoryRole
from taskline.testing.world import World
from taskline.workers.lease_desk import Lent

if TYPE_CHECKING:
    from simulation.run import Simulation

T = TypeVar("T")
_AGAIN_SECONDS = 0.3


class Died(Exception):
    """The process that was called died before it answered."""


class Api(MemoryRole):
    """One replica of what the HTTP API does."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "api")
        self.ready = asyncio.Event()

    def outstanding(self) -> list[str]:
        return []

    async def _run(self) -> None:
        world, log = self._world, self._log()
        codec, settings, clock = world.codec, world.settings, world.clock
        self.clock = clock
        self.producer = AsyncTaskProducer(log, settings, world.types, clock=clock, codec=codec)
        self.reader = StatusReader(world.view, codec, settings.api, clock=clock)
        self.canceller = Canceller(log, self.reader, codec, settings, worker=self.name, clock=clock)
        self.letters = DeadLetters(world.view, settings, clock)
        self.replayer = Replayer(
            log, MemoryRecords(world.broker), world.view, codec, settings, by=self.name, clock=clock
        )
        self.ready.set()
        await self._stop.wait()
        await self.producer.close()
        await log.close()

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await called(self, coroutine)


class Gateway(MemoryGateway):
    """One replica of what lends tasks."""

    def __init__(self, world: World) -> None:
        super().__init__(SimpleNamespace(_world=world))  # type: ignore[arg-type]


async def called(role: MemoryRole, coroutine: Coroutine[Any, Any, T]) -> T:
    """Have a role do something, so that it dies with it."""
    if role._process.dead:
        coroutine.close()
        raise Died
    task = role._process.spawn(coroutine, name="call")
    await asyncio.wait({task})
    if task.cancelled():
        raise Died
    return task.result()


@dataclass(kw_only=True, slots=True)
class Callers:
    simulation: Simulation

    async def submit(self, job: Job) -> None:
        """Submit a job once, and note what is known of it then; then cancel it as often as it says."""
        simulation, ledger = self.simulation, self.simulation.ledger
        await asyncio.sleep(job.at)
        api = await simulation.api()
        entry = Entry(job=job)
        now = from_ms(api.clock.now_ms())
        options: dict[str, Any] = {
            "not_before": None if job.delay is None else now + timedelta(seconds=job.delay)
        }
        if job.start_by is not None:
            options["start_by"] = now + timedelta(seconds=job.start_by)
        entry.due_ms = None if job.delay is None else to_ms(options["not_before"])
        payload = {"n": job.number, "acts": list(job.acts)}
        try:
            handle = await api.call(
                api.producer.submit(
                    job.task_type,
                    payload,
                    priority=job.priority,
                    tenant=job.tenant,
                    affinity_key=job.key,
                    max_retries=job.max_retries,
                    timeout_seconds=job.timeout,
                    **options,
                )
            )
        except (DeliveryFailed, QueueFull, InvalidOption):
            ledger.refused.add(job.number)
            return
        except DeliveryUnknown as error:
            ledger.unknown[TaskId(str(error.task_id))] = entry
            return
        except Died:
            ledger.lost.add(job.number)
            return
        ledger.accepted[handle.task_id] = entry
        simulation.trace.note("accepted", f"{handle.task_id} job {job.number}")
        submitted = asyncio.get_running_loop().time()
        for after, abort in job.cancels:
            await asyncio.sleep(max(0.0, submitted + after - asyncio.get_running_loop().time()))
            await self._cancel(handle.task_id, entry, abort=abort)

    async def _cancel(self, task_id: TaskId, entry: Entry, *, abort: bool) -> None:
        simulation = self.simulation
        api = await simulation.api()
        entry.asked += 1
        try:
            answer = await api.call(api.canceller.cancel(task_id, tenant=entry.job.tenant, abort=abort))
        except (TasklineError, TimeoutError, Died) as error:
            simulation.trace.note("cancel", f"{task_id} {type(error).__name__}")
            return
        simulation.trace.note("cancel", f"{task_id} {answer.fate.name} {answer.state.status}")
        simulation.reached(f"cancel {answer.fate.name}")
        if answer.fate is Fate.CANCELLED:
            entry.cancelled_at = entry.cancelled_at or asyncio.get_running_loop().time()
        elif answer.fate is Fate.REFUSED:
            entry.refused += 1
            if not answer.state.status.ended and not answer.state.attempt:
                simulation.wrong(f"I7 cancel of {task_id} was refused, and it had not begun")

    async def read(self, rng: Any) -> None:
        """Poll tasks, and see that none goes back."""
        simulation, ledger = self.simulation, self.simulation.ledger
        while True:
            await asyncio.sleep(rng.uniform(0.02, 0.8))
            if not ledger.accepted:
                continue
            task_id = rng.choice(list(ledger.accepted))
            api, epoch = await simulation.api(), simulation.view_epoch
            before = ledger.told.get(task_id)
            try:
                now = await api.call(api.reader.history(task_id, tenant=ledger.accepted[task_id].job.tenant))
            except TaskNotFound:
                if (
                    before is not None
                    and epoch == simulation.view_epoch
                    and before is ledger.told.get(task_id)
                ):
                    simulation.wrong(f"I3 {task_id} was in the view and is not any more")
                continue
            except (Unavailable, Died):
                continue
            if epoch != simulation.view_epoch or before is not ledger.told.get(task_id):
                continue
            if before is not None and (
                now.events[: len(before.events)] != before.events
                or (before.state.status.ended and now.state.status is not before.state.status)
                or (before.state.status != "scheduled" and now.state.status == "scheduled")
            ):
                simulation.wrong(
                    f"I3 {task_id} went back: {before.state.status} after {len(before.events)} events, then "
                    f"{now.state.status} after {len(now.events)}"
                )
            ledger.told[task_id] = now

    async def replay(self, rng: Any) -> None:
        """Replay dead letters as they come up, each once; one whose replay broke off again."""
        simulation, ledger = self.simulation, self.simulation.ledger
        while True:
            await asyncio.sleep(rng.uniform(1, 5))
            if simulation.healed:
                return
            api = await simulation.api()
            try:
                page = await api.call(api.letters.list(LetterFilter(), limit=MAX_PAGE))
                for letter in page.letters:
                    first = ledger.entry(letter.letter_id)
                    if first is None or first.replays or letter.letter_id in ledger.replayed:
                        continue
                    handled = await api.call(api.replayer.replay(letter))
                    if handled.task is not None:
                        ledger.replayed[letter.letter_id] = handled.task.task_id
                        ledger.accepted[handled.task.task_id] = Entry(job=first.job, replays=True)
                        simulation.reached("replay")
            except (TasklineError, TimeoutError, Died) as error:
                simulation.trace.note("replay", type(error).__name__)

    async def lease(self, name: str, rng: Any) -> None:
        """An HTTP worker: fetches, does what its task says, and reports."""
        simulation = self.simulation
        while True:
            gateway = await simulation.gateway()
            try:
                lents = await called(
                    gateway,
                    gateway.gateway.desk.fetch(
                        name, ("sim.leased",), limit=rng.choice([1, 3]), wait_seconds=3.0
                    ),
                )
            except Died:
                lents = []
            for lent in lents:
                try:
                    await self._serve(lent)
                except Died:
                    simulation.trace.note("report", "died")
            await asyncio.sleep(0.05)

    async def _serve(self, lent: Lent) -> None:
        simulation, loop = self.simulation, asyncio.get_running_loop()
        payload = orjson.loads(lent.payload)
        simulation.lent(lent, payload)
        verb, _, seconds = act_of(payload, lent.attempt).partition(" ")
        lease = simulation.plan.settings.gateway.lease_seconds
        if verb == "silent":
            return
        if verb == "late":
            await asyncio.sleep(lease + 1.0)
        end = loop.time() + float(seconds or 0)
        while (left := end - loop.time()) > 0:
            await asyncio.sleep(min(left, lease / 3))
            if not await self._report(lent, "extend"):
                return
        await self._report(
            lent, "fail" if verb in ("fail", "permanent") else "complete", permanent=verb == "permanent"
        )

    async def _report(self, lent: Lent, report: str, *, permanent: bool = False) -> bool:
        """Report until it is known; False: the lease is over."""
        simulation = self.simulation
        while True:
            gateway = await simulation.gateway()
            outcomes = gateway.gateway.outcomes
            call: Coroutine[Any, Any, Any]
            if report == "extend":
                call = outcomes.extend(lent.task_id, lent.token, seconds=None)
            elif report == "complete":
                call = outcomes.complete(lent.task_id, lent.token, b"1")
            else:
                call = outcomes.fail(lent.task_id, lent.token, failure(permanent))
            try:
                answer = await called(gateway, call)
            except StaleLease as stale:
                simulation.trace.note("report", f"{lent.task_id} {report} stale: {stale.reason}")
                simulation.reached(f"{report} stale")
                return False
            except (TasklineError, TimeoutError, Died, OutcomeUnknown) as error:
                if report == "extend":
                    return True
                simulation.trace.note("report", f"{lent.task_id} {report} {type(error).__name__}")
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            simulation.trace.note("report", f"{lent.task_id} {report} {answer}")
            if report != "extend":
                simulation.ledger.taken[lent.task_id].add(answer.outcome)
            return True
