"""What ran in a worker that died, and a worker that stood still for so long that others may have taken it for dead."""

from __future__ import annotations

import asyncio
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from taskline.infra.holes import decode_running
from taskline.schemas.events import Priority
from taskline.workers.context import TaskContext
from taskline.workers.executor import ChildDied
from taskline.workers.registry import Registry, Task


class Alone:
    """An executor whose every process dies of its handler."""

    interruptible = True
    remote = True
    capacity = None

    def __init__(self) -> None:
        self.ran: list[TaskContext] = []

    async def run(self, task: Task, payload: Any, ctx: TaskContext) -> Any:
        self.ran.append(ctx)
        raise ChildDied("killed by signal 11", alone=True)

    def close(self) -> None: ...


def test_what_ran_in_a_worker_that_died_is_run_alone(bench, virtually) -> None:
    registry = Registry()

    @registry.task("note")
    async def note(payload: Any) -> None:
        await asyncio.sleep(5)

    async def scenario() -> None:
        async with bench(registry, concurrency=2) as b:
            b.assign(0)
            b.push(*(b.submission("note", number) for number in range(4)))
            await asyncio.sleep(1)
            left = b.committed()
            assert decode_running(0, left.metadata) == (0, 1)
        # Handed over: nobody died of it.
        assert b.committed().metadata == ""

        alone = Alone()
        async with bench(registry, alone=alone, poison_deaths=1) as b:
            b.assign(0, metadata=left.metadata)
            tasks = [b.submission("note", number) for number in range(4)]
            b.push(*tasks)
            await asyncio.sleep(10)
            assert {ctx.task_id for ctx in alone.ran} == {task.task_id for task in tasks[:2]}
            assert [b.log.kinds(task.task_id)[-1] for task in tasks] == ["DeadLettered"] * 2 + [
                "Succeeded"
            ] * 2

    virtually(scenario())


def test_a_process_that_stood_still_starts_nothing_until_its_group_has_heard_of_it(bench, virtually) -> None:
    registry = Registry()
    ran: list[int] = []

    @registry.task("note")
    async def note(payload: Any) -> None:
        ran.append(payload)

    async def scenario() -> None:
        async with bench(registry, commit_interval_seconds=1) as b:
            b.assign(0, 1)
            intake = b.intakes[Priority.NORMAL]
            await asyncio.sleep(5)
            intake.commit_error = KafkaException(KafkaError(KafkaError.UNKNOWN_MEMBER_ID))
            # As if no time had passed for the process while it did for all others.
            b.engine._awake_at -= 10
            b.push(b.submission("note", 1))
            await asyncio.sleep(3)
            assert ran == []
            intake.lose(b.name(0))
            await asyncio.sleep(3)
            assert ran == []
            b.push(b.submission("note", 2), partition=1)
            await asyncio.sleep(3)
            assert ran == []
            # It is a member still, or again.
            intake.commit_error = None
            await asyncio.sleep(2)
            assert ran == [2]

    virtually(scenario())


def test_a_process_that_stood_still_and_owns_nothing_any_more_goes_on_with_what_comes(
    bench, virtually
) -> None:
    registry = Registry()
    ran: list[int] = []

    @registry.task("note")
    async def note(payload: Any) -> None:
        ran.append(payload)

    async def scenario() -> None:
        async with bench(registry, commit_interval_seconds=1) as b:
            b.assign(0)
            intake = b.intakes[Priority.NORMAL]
            await asyncio.sleep(5)
            intake.commit_error = KafkaException(KafkaError(KafkaError.UNKNOWN_MEMBER_ID))
            b.engine._awake_at -= 10
            b.push(b.submission("note", 1))
            await asyncio.sleep(1)
            intake.lose(b.name(0))
            b.assign(1)
            b.push(b.submission("note", 2), partition=1)
            await asyncio.sleep(1)
            assert ran == [2]

    virtually(scenario())
