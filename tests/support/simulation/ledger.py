"""What callers were told and handlers did: kept outside of every process, and compared with the log and the view in the end."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulation.plan import WORK, Job
from taskline import Permanent, Registry, Retry, TaskContext
from taskline.schemas.ids import TaskId
from taskline.state.fold import TaskHistory
from taskline.testing.process import current_process
from taskline.workers.executor import ChildDied

if TYPE_CHECKING:
    from simulation.run import Simulation


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A handler's first line, or a task lent."""

    at: float
    now_ms: int
    process: str
    attempt: int


@dataclass(kw_only=True, slots=True)
class Entry:
    """One task as its caller knows it."""

    job: Job
    # The instant before which it must not start, by its caller's clock; None: at once.
    due_ms: int | None = None
    # When a request to cancel was answered with 200.
    cancelled_at: float | None = None
    # Requests that were refused because it ran or was over, and those whose outcome is unknown.
    refused: int = 0
    asked: int = 0
    # True: it replays another one.
    replays: bool = False


@dataclass(kw_only=True, slots=True)
class Ledger:
    # By id: acknowledged submissions, and those whose outcome is unknown.
    accepted: dict[TaskId, Entry] = field(default_factory=dict)
    unknown: dict[TaskId, Entry] = field(default_factory=dict)
    # Numbers of jobs that certainly were not taken.
    refused: set[int] = field(default_factory=set)
    # Of the jobs whose submission broke off without an id.
    lost: set[int] = field(default_factory=set)
    replayed: dict[TaskId, TaskId] = field(default_factory=dict)
    starts: dict[TaskId, list[Start]] = field(default_factory=lambda: defaultdict(list))
    numbers: dict[TaskId, int] = field(default_factory=dict)
    # Tasks of which a lease's report was taken, by what it said.
    taken: dict[TaskId, set[str]] = field(default_factory=lambda: defaultdict(set))
    # What was wrong at the moment when it happened.
    wrong: list[str] = field(default_factory=list)
    told: dict[TaskId, TaskHistory] = field(default_factory=dict)

    def entry(self, task_id: TaskId) -> Entry | None:
        return self.accepted.get(task_id) or self.unknown.get(task_id)


def registry_of(simulation: Simulation) -> Registry:
    """The simulation's task types: their handlers do what their payload says for the attempt."""
    registry = Registry()

    @registry.task("sim.async", queue=WORK)
    async def work(payload: dict[str, object], ctx: TaskContext) -> int:
        act = simulation.begun(ctx.task_id, ctx.attempt, payload)
        verb, _, seconds = act.partition(" ")
        if seconds:
            await asyncio.sleep(float(seconds))
        return _do(verb, float(seconds or 0), ctx) if verb != "hang" else await _hang()

    @registry.task("sim.plain", queue=WORK)
    def plain(payload: dict[str, object], ctx: TaskContext) -> int:
        verb, _, seconds = simulation.begun(ctx.task_id, ctx.attempt, payload).partition(" ")
        return _do(verb, float(seconds or 0), ctx)

    @registry.task("sim.leased")
    def leased(payload: dict[str, object]) -> None:
        raise AssertionError("it is lent")

    return registry


def act_of(payload: dict[str, object], attempt: int) -> str:
    acts = payload["acts"]
    assert isinstance(acts, list)
    return str(acts[min(attempt, len(acts)) - 1])


async def _hang() -> int:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


def _do(verb: str, seconds: float, ctx: TaskContext) -> int:
    if verb == "fail":
        raise ValueError("as asked")
    if verb == "permanent":
        raise Permanent("as asked")
    if verb == "retry":
        raise Retry(after=seconds, reason="as asked")
    if verb in ("die", "beside"):
        raise ChildDied("as asked", alone=verb == "die")
    return ctx.attempt


def process_name() -> str:
    process = current_process()
    return "-" if process is None else process.name
