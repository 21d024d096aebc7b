"""The simulation finds what it is for: each of these faults, planted, is found by one of the first 50 seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from unittest import mock

import pytest
from simulation.run import run

from taskline.processors import delay_core, projection
from taskline.schemas.events import Succeeded
from taskline.testing.projector import MemoryProjector
from taskline.workers.cancels import CancelGate
from taskline.workers.conductor import Conductor
from taskline.workers.engine import WorkerEngine
from taskline.workers.recorder import Recorder


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


# (how it is planted, the first seed that finds it, what is wrong then). A plan that is drawn otherwise finds it by another seed.
PLANTED = {
    "commit before the outcome": (commit_before_the_outcome, 48, "I1"),
    "delays are released early": (delays_are_released_early, 2, "I5"),
    "cancels are not looked up": (cancels_are_not_looked_up, 5, "I7"),
    "dead letters are not waited for": (dead_letters_are_not_waited_for, 53, "I1"),
    "outcomes are written once": (outcomes_are_written_once, 30, "I1"),
    "projector commits first": (projector_commits_first, 8, "I2"),
    "places start in each record": (places_start_in_each_record, 1, "I2"),
    "what steps aside is not forgotten": (an_asides_slot_is_lost, 1, "I9"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    plant, seed, invariant = PLANTED[name]
    with plant():
        report = run(seed)
    assert any(wrong.startswith(invariant) for wrong in report.wrong), report.wrong
