"""The engine with real child processes: a handler that dies or hangs costs its own attempt, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

from child_kit import config, exists, until
from child_tasks import registry

from taskline.schemas.events import Crashed, ErrorCategory, Failed, Succeeded
from taskline.workers.children import ProcessExecutor
from taskline.workers.children_loop import LoopExecutor
from taskline.workers.children_server import ForkServer


def test_one_dies_one_hangs_and_the_others_complete(bench, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = ForkServer(config())
        await server.start()
        executor = ProcessExecutor(server, 2)
        async with bench(registry, executor, executor, concurrency=8) as b:
            b.assign(0)
            dies = b.submission("end", 3)
            hangs = b.submission("hang", str(tmp_path / "pid"), timeout_ms=3_000)
            others = [b.submission("echo", number) for number in range(20)]
            b.push(dies, hangs, *others)
            await until(lambda: b.log.kinds().count("Succeeded") == 20, 60)
            await until(lambda: "Failed" in b.log.kinds() and "Crashed" in b.log.kinds(), 60)
            events = b.log.events()
            (crashed,) = (event for event in events if isinstance(event, Crashed))
            assert (crashed.task_id, crashed.cause, crashed.alone) == (dies.task_id, "exit status 3", True)
            (failed,) = (event for event in events if isinstance(event, Failed))
            assert (failed.task_id, failed.category) == (hangs.task_id, ErrorCategory.TIMEOUT)
            assert not exists(int((tmp_path / "pid").read_text()))
            results = {event.task_id: event.result for event in events if isinstance(event, Succeeded)}
            assert results == {each.task_id: b"%d" % number for number, each in enumerate(others)}
        await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_what_ran_beside_a_coroutine_that_eats_memory_spends_no_attempt(bench) -> None:
    async def scenario() -> None:
        server = ForkServer(config(memory_mb=128))
        await server.start()
        alone, loops = ProcessExecutor(server, 2), LoopExecutor(server, 1, 30)
        async with bench(registry, alone, alone, loops, concurrency=8) as b:
            b.assign(0)
            hoards = b.submission("hoard.async", 500)
            others = [b.submission("sleep", 0.4) for _ in range(6)]
            b.push(*others, hoards)
            await until(lambda: b.log.kinds().count("Succeeded") == 6, 60)
            await until(lambda: "Failed" in b.log.kinds(), 60)
            events = b.log.events()
            # Once beside others, which is held against nobody; and then alone, which is.
            (crashed,) = (event for event in events if isinstance(event, Crashed))
            assert (crashed.task_id, crashed.alone) == (hoards.task_id, False)
            assert "out of memory" in crashed.cause
            (failed,) = (event for event in events if isinstance(event, Failed))
            assert (failed.task_id, failed.attempt, failed.category) == (
                hoards.task_id,
                1,
                ErrorCategory.MEMORY,
            )
            assert {event.task_id for event in events if isinstance(event, Succeeded)} == {
                each.task_id for each in others
            }
        await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))
