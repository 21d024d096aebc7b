"""Waiting for ends, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any, TypeVar

import pytest
from view_kit import event, submission

from taskline.errors import TaskNotFound, Unavailable
from taskline.schemas.events import Started, Succeeded
from taskline.schemas.ids import TaskId, new_task_id
from taskline.state.fold import fold
from taskline.state.status import TaskState, TaskStatus
from taskline.state.waiting import MAX_READS_PER_SECOND, EndWaiter
from taskline.testing.loop import VirtualLoop

NOW = 1_800_000_000_000
TASK = submission(NOW)
RUNNING = fold(TASK, [event(Started, TASK, NOW)])
DONE = fold(TASK, [event(Started, TASK, NOW), event(Succeeded, TASK, NOW)])

T = TypeVar("T")


def run(scenario: Callable[[], Awaitable[T]]) -> T:
    with closing(VirtualLoop()) as loop:
        return loop.run_until_complete(scenario())


class View:
    """A task that ends at some second; every read takes 5 ms."""

    def __init__(self, ends_at: float = 1e9) -> None:
        self.ends_at = ends_at
        self.reads: list[float] = []
        self.failure: Exception | None = None
        self.waiter = EndWaiter(self.read)

    async def read(self, task_id: TaskId, tenant: str) -> TaskState:
        now = asyncio.get_running_loop().time()
        self.reads.append(now)
        failure = self.failure
        await asyncio.sleep(0.005)
        if failure is not None:
            raise failure
        return DONE if now >= self.ends_at else RUNNING

    async def wait(self, seconds: float, **changes: Any) -> TaskState:
        return await self.waiter.wait(changes.get("task_id", TASK.task_id), tenant="acme", seconds=seconds)


@pytest.mark.parametrize(("ends_at", "late_by"), [(0.1, 0.2), (1.0, 0.7), (20.0, 2.1)])
def test_an_end_is_told_soon_after_it_comes(ends_at: float, late_by: float) -> None:
    async def scenario() -> None:
        assert (await View(ends_at).wait(60)).status is TaskStatus.COMPLETED
        assert ends_at < asyncio.get_running_loop().time() < ends_at + late_by

    run(scenario)


def test_when_the_time_is_over_the_present_state_is_told() -> None:
    async def scenario() -> None:
        assert (await View().wait(10)).status is TaskStatus.RUNNING
        assert asyncio.get_running_loop().time() == pytest.approx(10, abs=0.02)

    run(scenario)


def test_what_is_told_was_read_after_the_time_was_over() -> None:
    async def scenario() -> None:
        view = View(ends_at=10.0)
        # The last read of its own would be seconds before.
        assert (await view.wait(10)).status is TaskStatus.COMPLETED
        assert view.reads[-1] >= 10

    run(scenario)


def test_a_thousand_who_wait_for_one_task_cost_the_reads_of_one() -> None:
    async def alone() -> int:
        view = View()
        await view.wait(30)
        return len(view.reads)

    async def together() -> int:
        view = View()
        waits = [asyncio.create_task(view.wait(30)) for _ in range(1_000)]
        await asyncio.sleep(1)
        assert view.waiter.waiting == 1_000
        await asyncio.gather(*waits)
        assert view.waiter.waiting == 0
        return len(view.reads)

    assert run(together) <= run(alone) + 1 <= 30


def test_reads_are_bounded_however_many_tasks_are_waited_for() -> None:
    async def scenario() -> None:
        view = View()
        waits = [asyncio.create_task(view.wait(60, task_id=new_task_id(NOW))) for _ in range(2_000)]
        await asyncio.sleep(30)
        recent = [at for at in view.reads if at > 15]
        assert len(recent) <= 1.2 * MAX_READS_PER_SECOND * 15
        # Each is looked at all the same.
        assert len(recent) >= 2_000
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    run(scenario)


def test_who_leaves_stops_the_reads() -> None:
    async def scenario() -> None:
        view = View()
        wait = asyncio.create_task(view.wait(60))
        await asyncio.sleep(5)
        wait.cancel()
        await asyncio.gather(wait, return_exceptions=True)
        reads = len(view.reads)
        await asyncio.sleep(20)
        assert (len(view.reads), view.waiter.waiting) == (reads, 0)
        # And another who comes gets reads of its own.
        assert (await view.wait(1)).status is TaskStatus.RUNNING

    run(scenario)


def test_one_who_leaves_does_not_stop_the_others() -> None:
    async def scenario() -> None:
        view = View(ends_at=8)
        leaving, staying = (asyncio.create_task(view.wait(60)) for _ in range(2))
        await asyncio.sleep(1)
        leaving.cancel()
        assert (await staying).status is TaskStatus.COMPLETED

    run(scenario)


def test_a_drain_answers_at_once_then_and_later() -> None:
    async def scenario() -> None:
        view = View()
        waits = [asyncio.create_task(view.wait(60)) for _ in range(3)]
        await asyncio.sleep(5)
        view.waiter.drain()
        assert {state.status for state in await asyncio.gather(*waits)} == {TaskStatus.RUNNING}
        await view.wait(60)
        assert asyncio.get_running_loop().time() < 5.1

    run(scenario)


def test_who_comes_just_as_all_others_are_answered_is_answered_too() -> None:
    async def scenario() -> None:
        view = View(ends_at=1)
        late: list[asyncio.Task[TaskState]] = []

        async def read(task_id: TaskId, tenant: str) -> TaskState:
            state = await view.read(task_id, tenant)
            if state is DONE and not late:
                # Runs after the reads are over, and before the first has heard of it.
                late.append(asyncio.create_task(view.wait(60)))
            return state

        view.waiter = EndWaiter(read)
        await view.wait(60)
        assert (await late[0]).status is TaskStatus.COMPLETED

    run(scenario)


def test_a_view_that_comes_back_in_time_is_no_error() -> None:
    async def scenario() -> None:
        view = View(ends_at=5)
        view.failure = Unavailable("away")
        wait = asyncio.create_task(view.wait(30))
        await asyncio.sleep(10)
        view.failure = None
        assert (await wait).status is TaskStatus.COMPLETED

    run(scenario)


def test_a_view_that_stays_away_is_an_error_when_the_time_is_over() -> None:
    async def scenario() -> None:
        view = View()
        view.failure = Unavailable("away")
        with pytest.raises(Unavailable):
            await view.wait(10)
        assert asyncio.get_running_loop().time() == pytest.approx(10, abs=0.02)

    run(scenario)


@pytest.mark.parametrize("failure", [TaskNotFound(TASK.task_id), RuntimeError("a fault")])
def test_an_error_that_stays_is_everybody_s_at_once(failure: Exception) -> None:
    async def scenario() -> None:
        view = View()
        waits = [asyncio.create_task(view.wait(60)) for _ in range(2)]
        await asyncio.sleep(1)
        view.failure = failure
        assert await asyncio.gather(*waits, return_exceptions=True) == [failure, failure]
        assert asyncio.get_running_loop().time() < 5

    run(scenario)
