"""One run: the plan's roles, callers and troubles; then everything is healed, comes to rest, and is checked.

Faults come in the first phase and safety is checked throughout; the second has none, so that whatever does not come to rest in it
never would.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulation import checks
from simulation.callers import Api, Callers, Gateway
from simulation.ledger import Ledger, Start, act_of, process_name, registry_of
from simulation.loop import SimulatedLoop
from simulation.network import SimulatedBroker, SimulatedIntake, SimulatedView, SimulatedWorld
from simulation.plan import LEASED, SESSION_SECONDS, WORK, Plan, Trouble, draw
from simulation.randomness import seeded
from simulation.trace import Trace
from taskline.infra.topics import Topics, projected_topics, topology, waiting_topics
from taskline.schemas.catalogue import TypeCatalogue
from taskline.schemas.codec import Codec
from taskline.schemas.events import Priority
from taskline.schemas.ids import TaskId, to_ms
from taskline.testing import Deadlock, MemoryProjector, MemoryWorker
from taskline.testing.clock import DEFAULT_START
from taskline.testing.delay import MemoryDelay
from taskline.testing.errors import BackgroundError
from taskline.testing.process import VirtualProcess
from taskline.testing.world import World
from taskline.workers.lease_desk import Lent

# Virtual seconds after the heal in which everything must come to rest: skewed clocks hold what waits for up to five minutes,
# a hand-over that stands still for five more.
REST_SECONDS = 1_000.0
_LOOK_SECONDS = 0.5
_MS = 1_000


class SkewedClock:
    """A wall clock that is wrong by a constant."""

    def __init__(self, loop: asyncio.AbstractEventLoop, skew_ms: int = 0) -> None:
        self._loop = loop
        self._start_ms = to_ms(DEFAULT_START) + skew_ms

    def now_ms(self) -> int:
        return self._start_ms + int(self._loop.time() * _MS + 1e-3)


@dataclass(kw_only=True, slots=True)
class Faults:
    """Chances per operation, until the heal."""

    append: float
    commit: float
    view: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What came of a seed."""

    plan: Plan
    # What is wrong, each beginning with the invariant's name; empty: nothing.
    wrong: tuple[str, ...]
    digest: str
    tail: Callable[..., list[str]]
    reached: Counter[str]
    seconds: float
    history: dict[TaskId, str] = field(default_factory=dict)


class Simulation:
    """The state of a run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(f"{plan.seed} network")
        self.loop = SimulatedLoop(random.Random(f"{plan.seed} interleaving"))
        self.loop.hold_back = plan.hold_back
        self.trace = Trace(self.loop.time)
        self.faults = Faults(append=plan.append_faults, commit=plan.commit_faults, view=plan.view_faults)
        self.ledger = Ledger()
        self.counts: Counter[str] = Counter()
        self.intakes: list[SimulatedIntake] = []
        self.roles: dict[str, list[Any]] = {
            kind: [] for kind in ("api", "worker", "projector", "delay", "gateway")
        }
        self.everyone: list[Any] = []
        self.skews: dict[str, set[int]] = {kind: set() for kind in self.roles}
        # Changes when the view is wiped: what was read before says nothing about what is read later.
        self.view_epoch = 0
        self.disturbed = 0
        self.froze = False
        self.healed = False
        # Deaths that wait for their point, each with the kind of role.
        self._armed: list[str] = []
        self._chores: set[asyncio.Task[Any]] = set()
        self._background: list[str] = []

    # ---- what the network asks for -----------------------------------------------------------------------

    def latency(self) -> float:
        most = self.plan.latency
        return self.rng.uniform(0, most) * (20 if self.rng.random() < 0.02 and not self.healed else 1)

    def strikes(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance

    def new_rng(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))

    def point(self, name: str, topic: str, process: VirtualProcess | None) -> bool:
        """A place where a process may die; True: it did."""
        if not self._armed or process is None:
            return False
        if topic:
            kind = next((kind for kind in ("lifecycle", "dlq", "delay") if kind in topic), "dispatch")
            name = f"{name} {kind}"
        if name not in self._armed:
            return False
        role = next(
            (role for roles in self.roles.values() for role in roles if role._process is process), None
        )
        if role is None:
            return False
        self._armed.remove(name)
        self.trace.note("dies", f"{process.name} {name}")
        self.reached(f"died {name}")
        process.cut()
        self.chore(self._bury(role, 1.0))
        return True

    # ---- what handlers and callers tell --------------------------------------------------------------------

    def begun(self, task_id: TaskId, attempt: int, payload: dict[str, Any]) -> str:
        """A handler's first line; returns what it is to do."""
        self._start(task_id, attempt, payload)
        return act_of(payload, attempt)

    def lent(self, lent: Lent, payload: dict[str, Any]) -> None:
        self._start(lent.task_id, lent.attempt, payload)

    def _start(self, task_id: TaskId, attempt: int, payload: dict[str, Any]) -> None:
        self.trace.note("start", f"{task_id} attempt {attempt} job {payload['n']}")
        start = Start(
            at=self.loop.time(), now_ms=self.clock.now_ms(), process=process_name(), attempt=attempt
        )
        self.ledger.starts[task_id].append(start)
        self.ledger.numbers[task_id] = payload["n"]

    def reached(self, what: str) -> None:
        self.counts[what] += 1

    def wrong(self, what: str) -> None:
        self.trace.note("WRONG", what)
        self.ledger.wrong.append(what)

    async def api(self) -> Api:
        return await self._one("api")

    async def gateway(self) -> Gateway:
        while True:
            gateway = await self._one("gateway")
            if hasattr(gateway, "gateway"):
                return gateway
            await asyncio.sleep(0.1)

    async def _one(self, kind: str) -> Any:
        while True:
            ready = [role for role in self.roles[kind] if not isinstance(role, Api) or role.ready.is_set()]
            if ready:
                return self.rng.choice(ready)
            await asyncio.sleep(0.1)

    # ---- roles ---------------------------------------------------------------------------------------------

    async def begin(self, kind: str) -> None:
        """Start one more process of a kind, with a clock of its own."""
        most = 0 if self.healed else self.plan.skew_ms
        skew = self.rng.choice([0, self.rng.randint(-most, most)])
        self.skews[kind].add(skew)
        world = self._world(skew)
        make: dict[str, Callable[[], Any]] = {
            "api": lambda: Api(world),
            "worker": lambda: MemoryWorker(world, self.registry.for_queue(WORK), WORK),
            "projector": lambda: MemoryProjector(world),
            "delay": lambda: MemoryDelay(world),
            "gateway": lambda: Gateway(world),
        }
        role = make[kind]()
        if kind == "projector":
            role._process.name = f"memory-projector-{next(self.numbers)}"
        self.trace.note("begin", f"{role._process.name} skew {skew}")
        self.roles[kind].append(role)
        self.everyone.append(role)
        await role.start()

    async def _bury(self, role: Any, seconds: float) -> None:
        """Kill a process, and start another one in its place later."""
        kind = next((kind for kind, roles in self.roles.items() if role in roles), None)
        if kind is None:
            return
        self.roles[kind].remove(role)
        self.disturbed += 1
        await role.kill()
        await asyncio.sleep(seconds)
        if not self.healed:
            await self.begin(kind)

    async def _stop(self, kind: str, role: Any, seconds: float) -> None:
        self.roles[kind].remove(role)
        self.disturbed += 1
        await role.stop()
        await asyncio.sleep(seconds)
        if not self.healed:
            await self.begin(kind)

    def _world(self, skew: int) -> World:
        return SimulatedWorld(
            broker=self.broker,
            view=self.view,
            clock=SkewedClock(self.loop, skew),
            codec=self.codec,
            topics=self.topics,
            settings=self.plan.settings,
            types=self.types,
            numbers=self.numbers,
        )

    # ---- troubles --------------------------------------------------------------------------------------------

    async def trouble(self, trouble: Trouble) -> None:
        kind, _, what = trouble.kind.partition(" ")
        if trouble.kind == "crash at":
            self._armed.append(trouble.point)
            return
        self.trace.note("trouble", f"{trouble.kind} {trouble.choice} for {trouble.seconds:.2f}")
        roles = self.roles.get(what, [])
        role = roles[trouble.choice % len(roles)] if roles else None
        match kind:
            case "crash" if role is not None:
                await self._bury(role, trouble.seconds)
            case "stop" if role is not None:
                await self._stop(what, role, trouble.seconds)
            case "join" if len(roles) < 4:
                await self.begin(what)
                self.disturbed += 1
            case "broker":
                self.disturbed += 1
                self.broker.stop()
                await asyncio.sleep(trouble.seconds)
                self.broker.start()
            case "view":
                self.view.stop()
                await asyncio.sleep(trouble.seconds)
                self.view.start()
            case "freeze":
                await self._freeze(trouble)
            case "expel":
                members = [each for each in self.intakes if not each._severed and each.process is not None]
                if members:
                    self.disturbed += 1
                    members[trouble.choice % len(members)].expel(trouble.seconds)
            case "wipe":
                await self._wipe()

    async def _freeze(self, trouble: Trouble) -> None:
        roles = [role for roles in self.roles.values() for role in roles]
        process = roles[trouble.choice % len(roles)]._process
        self.froze = True
        self.disturbed += 1
        self.trace.note("freeze", process.name)
        self.loop.freeze(process)
        if trouble.seconds > SESSION_SECONDS:
            await asyncio.sleep(SESSION_SECONDS)
            for intake in self.intakes:
                if intake.process is process:
                    intake.expel(0.0)
        await asyncio.sleep(max(0.0, trouble.seconds - SESSION_SECONDS))
        self.loop.thaw(process)
        self.trace.note("thaw", process.name)

    async def _wipe(self) -> None:
        """Lose the view, and have it made anew from the whole log."""
        group = self.broker.group(self.topics.projector_group)
        # One that is started meanwhile would go on from where the group was.
        while group.members or self.roles["projector"]:
            for role in tuple(self.roles["projector"]):
                self.roles["projector"].remove(role)
                await role.kill()
            await asyncio.sleep(_LOOK_SECONDS)
        self.view.wipe()
        self.view_epoch += 1
        self.ledger.told.clear()
        group._commits.clear()
        if not self.healed:
            await self.begin("projector")

    def chore(self, coroutine: Any) -> None:
        task = self.loop.create_task(coroutine, context=contextvars.Context())
        self._chores.add(task)
        task.add_done_callback(self._chore_over)

    def _chore_over(self, task: asyncio.Task[Any]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.wrong(f"a part of the simulation failed: {error!r}")

    # ---- the run -----------------------------------------------------------------------------------------------

    async def main(self) -> None:
        self._build()
        for kind, count in self.plan.roles.items():
            for _ in range(count):
                await self.begin(kind)
        callers = Callers(simulation=self)
        submitting = [self.loop.create_task(callers.submit(job)) for job in self.plan.jobs]
        endless = [callers.read(self.new_rng()) for _ in range(self.plan.readers)]
        if self.plan.replays:
            endless.append(callers.replay(self.new_rng()))
        if self.plan.roles["gateway"]:
            endless += [callers.lease(f"w{number}", self.new_rng()) for number in range(3)]
        others = [self.loop.create_task(each) for each in endless]
        for trouble in self.plan.troubles:
            await asyncio.sleep(max(0.0, trouble.at - self.loop.time()))
            self.chore(self.trouble(trouble))
        await asyncio.sleep(max(0.0, self.plan.seconds - self.loop.time()))
        await self._heal()
        await self._rest(submitting)
        for task in others:
            if task.done() and not task.cancelled() and task.exception() is not None:
                self.wrong(f"a caller failed: {task.exception()!r}")
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for task in submitting:
            if task.done() and not task.cancelled() and task.exception() is not None:
                self.wrong(f"a submitter failed: {task.exception()!r}")

    def _build(self) -> None:
        settings = self.plan.settings
        self.codec, self.types = Codec(), TypeCatalogue()
        self.topics = Topics(namespace=settings.kafka.namespace)
        self.clock = SkewedClock(self.loop)
        self.broker = SimulatedBroker(self.clock)
        self.view = SimulatedView(self.clock)
        self.broker.simulation = self.view.simulation = SimulatedWorld.simulation = self
        self.broker.create_topics(topology(settings))
        self.numbers = iter(range(1, 100_000))
        self.registry = registry_of(self)
        self._world(0).register(self.registry)

    async def _heal(self) -> None:
        self.trace.note("heal")
        self.healed = True
        self._armed.clear()
        self.faults = Faults(append=0.0, commit=0.0, view=0.0)
        while self._chores:
            await asyncio.sleep(_LOOK_SECONDS)
            self.broker.start()
            self.view.start()
        for kind, count in self.plan.roles.items():
            if self.plan.skew_ms:
                # Clocks are right again; what waits by a wrong one would for ten minutes.
                for role in tuple(self.roles[kind]):
                    self.roles[kind].remove(role)
                    await role.stop()
            while count and not self.roles[kind]:
                await self.begin(kind)

    async def _rest(self, submitting: list[asyncio.Task[None]]) -> None:
        deadline, quiet = self.loop.time() + REST_SECONDS, 0
        while quiet < 3:
            await asyncio.sleep(_LOOK_SECONDS)
            for roles in self.roles.values():
                for role in roles:
                    try:
                        role.check()
                    except BackgroundError as error:
                        self.wrong(f"{error}: {error.__cause__!r}")
                        return
            open_calls = sum(not task.done() for task in submitting)
            lags = self.lags()
            quiet = quiet + 1 if not lags and not open_calls else 0
            if self.loop.time() > deadline:
                self.wrong(
                    f"I6 not at rest {REST_SECONDS:.0f} s after the heal: {lags}, {open_calls} callers"
                )
                return

    def lags(self) -> dict[str, int]:
        """What the groups have not committed, by group and topic."""
        settings, topics = self.plan.settings, self.topics
        watched = [(topics.projector_group, topic) for topic in projected_topics(settings)]
        watched += [(topics.delay_group, topic) for topic in waiting_topics(settings)]
        queues = [WORK, *([LEASED] if self.plan.roles["gateway"] else [])]
        watched += [
            (topics.worker_group(queue, priority), topics.dispatch(queue, priority))
            for queue in queues
            for priority in Priority
        ]
        if self.plan.roles["gateway"]:
            watched.append((topics.lease_group(LEASED), topics.leases(LEASED)))
        lags = {f"{group} {topic}": self.broker.lag(group, topic) for group, topic in watched}
        return {name: lag for name, lag in lags.items() if lag}

    def failed_in_background(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.wrong(f"in the background: {context['message']}: {context.get('exception')!r}")

    async def end(self) -> None:
        for role in self.everyone:
            await role.kill()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def run(seed: int, change: Callable[[Plan], Plan] = lambda plan: plan) -> Report:
    """Run a seed to its end; nothing is raised for what is wrong."""
    plan = change(draw(seed))
    # When garbage is collected depends on what ran before.
    collects = gc.isenabled()
    gc.disable()
    simulation = Simulation(plan)
    simulation.loop.set_exception_handler(simulation.failed_in_background)
    try:
        with seeded(seed, lambda words: simulation.trace.note("says", words)):
            asyncio.set_event_loop(simulation.loop)
            try:
                simulation.loop.run_until_complete(simulation.main())
                checks.check(simulation)
            except Deadlock as error:
                simulation.wrong(f"deadlock: {error}")
            digest, seconds = simulation.trace.digest(), simulation.loop.time()
            simulation.loop.set_exception_handler(lambda *_: None)
            simulation.loop.thaw_all()
            with contextlib.suppress(Deadlock):
                simulation.loop.run_until_complete(simulation.end())
    finally:
        simulation.loop.close()
        asyncio.set_event_loop(None)
        if collects:
            gc.enable()
    counts = simulation.counts + Counter(simulation.trace.seen)
    return Report(
        plan=plan,
        wrong=tuple(dict.fromkeys(simulation.ledger.wrong)),
        digest=digest,
        tail=simulation.trace.tail,
        reached=counts,
        seconds=seconds,
    )
