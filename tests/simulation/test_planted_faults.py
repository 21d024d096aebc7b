"""The simulation finds what it is for: each planted fault is found within a few seeds."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

from simulation.run import run

from taskline.processors import delay_core, projection
from taskline.schemas.events import Succeeded
from taskline.testing.projector import MemoryProjector
from taskline.workers.cancels import CancelGate
from taskline.workers.conductor import Conductor
from taskline.workers.engine import WorkerEngine
from taskline.workers.recorder import Recorder

# The package has a function of that name.
fold = sys.modules["taskline.state.fold"]


@contextmanager
def commit_before_the_outcome() -> Iterator[None]:
    """The record counts as done when its handler is."""
    settle = Conductor._settle

    async def hasty(self, run, admitted):
        run.waiting.assignment.complete(run.position.offset)
        await settle(self, run, admitted)

    with mock.patch.object(Conductor, "_settle", hasty), _completing_twice():
        yield


@contextmanager
def _completing_twice() -> Iterator[None]:
    from taskline.workers.feed import Assignment

    complete = Assignment.complete
    done: set[tuple[Assignment, int]] = set()

    def once(self, offset):
        if (self, offset) not in done:
            done.add((self, offset))
            complete(self, offset)

    with mock.patch.object(Assignment, "complete", once):
        yield


def started_supersedes_nothing() -> AbstractContextManager[object]:
    return mock.patch.object(fold, "_supersede", return_value=None)


@contextmanager
def expired_supersedes_nothing() -> Iterator[None]:
    def expired(task, event, over):
        return task.status if task.running() else fold.TaskStatus.EXPIRED

    with mock.patch.dict(fold._RULES, {fold.Expired: expired}):
        yield


@contextmanager
def delays_are_released_early() -> Iterator[None]:
    until = delay_core.Router._until

    def early(self, record, stage, due_ms, now_ms):
        return until(self, record, stage, due_ms, now_ms) - 30

    release = delay_core.Router.release

    def on_to_its_target(self, held, now_ms):
        return release(self, held, now_ms + 30)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(delay_core.Router, "_until", early))
        patches.enter_context(mock.patch.object(delay_core.Router, "release", on_to_its_target))
        yield


def cancels_are_not_looked_up() -> AbstractContextManager[object]:
    async def named(self, task_id):
        return False

    return mock.patch.object(CancelGate, "named", named)


@contextmanager
def dead_letters_are_not_waited_for() -> Iterator[None]:
    async def hasty(append, *, what, task_id):
        futures = append()
        if what == "dead letter":
            for future in futures:
                future.add_done_callback(lambda done: done.cancelled() or done.exception())
            return
        await asyncio.gather(*futures)

    from taskline.workers import recorder

    deliver = recorder.deliver

    async def chosen(append, *, what, task_id):
        await (hasty if what == "dead letter" else deliver)(append, what=what, task_id=task_id)

    with mock.patch.object(recorder, "deliver", chosen):
        yield


@contextmanager
def outcomes_are_written_once() -> Iterator[None]:
    """An append of Succeeded that fails is not repeated."""
    events = Recorder._events

    async def once(self, *found):
        if isinstance(found[0], Succeeded):
            future = self._lifecycle.append(found[0])
            await asyncio.wait([future])
            future.exception()
            return
        await events(self, *found)

    with mock.patch.object(Recorder, "_events", once):
        yield


@contextmanager
def projector_commits_first() -> Iterator[None]:
    """The projector commits what it has not written yet."""
    commit = MemoryProjector._commit
    from taskline.processors.projector import Projector

    fold_all = Projector.fold

    async def later(self, records):
        task = asyncio.ensure_future(fold_all(self, records))
        await asyncio.sleep(0)
        return task

    with mock.patch.object(Projector, "fold", later), mock.patch.object(MemoryProjector, "_commit", commit):
        yield


@contextmanager
def places_start_in_each_record() -> Iterator[None]:
    """Two events of one batch have one place."""
    with mock.patch.object(projection, "sequence_of", lambda offset, index: offset * 1000):
        yield


@contextmanager
def an_asides_slot_is_lost() -> Iterator[None]:
    """What steps aside is not forgotten when it is over."""

    def over(self, run, outer):
        real(self, run, outer)
        if run.checked_at is not None and run.key is not None:
            self._aside.add(run)

    real = WorkerEngine._over
    with mock.patch.object(WorkerEngine, "_over", over):
        yield


@dataclass(frozen=True)
class Planted:
    plant: object
    # What finds it.
    invariants: tuple[str, ...]
    # How many seeds are tried.
    seeds: int = 40


PLANTED = {
    "commit before the outcome": Planted(commit_before_the_outcome, ("I1",)),
    "started supersedes nothing": Planted(started_supersedes_nothing, ("I1", "I2", "I7")),
    "expired supersedes nothing": Planted(expired_supersedes_nothing, ("I1",), 400),
    "delays are released early": Planted(delays_are_released_early, ("I5",)),
    "cancels are not looked up": Planted(cancels_are_not_looked_up, ("I7",)),
    "dead letters are not waited for": Planted(dead_letters_are_not_waited_for, ("I1",), 100),
    "outcomes are written once": Planted(outcomes_are_written_once, ("I1",)),
    "projector commits first": Planted(projector_commits_first, ("I2",)),
    "places start in each record": Planted(places_start_in_each_record, ("I2",)),
    "what steps aside is not forgotten": Planted(an_asides_slot_is_lost, ("I9",)),
}


def seeds_until_found(name: str) -> int | None:
    """Which seed finds a planted fault first; None: none of those tried."""
    planted = PLANTED[name]
    with planted.plant():
        for seed in range(1, planted.seeds + 1):
            report = run(seed)
            if any(wrong.startswith(planted.invariants) for wrong in report.wrong):
                return seed
    return None
