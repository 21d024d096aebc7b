"""CPU µs per no-op task in the worker and in its children, and the time that a task takes longer than its handler. No servers.

    python -m bench.children [--tasks 20000] [--rounds 3] [--loop uvloop|asyncio]

Each executor runs the tasks alone, without the engine, the log and the view: with many in flight for the CPU (best round, and what
each round gave), one after another for the latency.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import psutil
import uvloop

from bench.producer import PAYLOAD
from taskline.schemas.events import Priority
from taskline.schemas.ids import new_task_id
from taskline.workers import Registry, TaskContext
from taskline.workers.child import ChildConfig
from taskline.workers.children import ProcessExecutor
from taskline.workers.children_loop import LoopExecutor
from taskline.workers.children_server import ForkServer
from taskline.workers.executor import Executor, InlineExecutor, ThreadExecutor
from taskline.workers.registry import Task

registry = Registry()
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}
MAX_RESULT_BYTES = 65_536
STALL_SECONDS = 30.0
SINGLES = 2_000


@registry.task("bench.async")
async def coroutine(payload: dict[str, Any]) -> None: ...


@registry.task("bench.plain")
def plain(payload: dict[str, Any]) -> None: ...


def context() -> TaskContext:
    task_id = new_task_id(time.time_ns() // 1_000_000)
    return TaskContext(
        task_id=task_id,
        root_id=task_id,
        task_type="bench",
        attempt=1,
        tenant="default",
        queue="default",
        priority=Priority.NORMAL,
        deadline_ms=0,
    )


def cpu_seconds(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


async def flood(executor: Executor, task: Task, tasks: int, in_flight: int) -> None:
    left = iter(range(tasks))

    async def one_after_another() -> None:
        for _ in left:
            await executor.run(task, PAYLOAD, ctx)

    ctx = context()
    await asyncio.gather(*(one_after_another() for _ in range(in_flight)))


async def measure(name: str, executor: Executor, task: Task, tasks: int, rounds: int, in_flight: int) -> None:
    await flood(executor, task, tasks // 10, in_flight)
    own, figures = [psutil.Process().pid], []
    for _ in range(rounds):
        pids = executor.pids if isinstance(executor, LoopExecutor | ProcessExecutor) else []
        before, children, wall = cpu_seconds(own), cpu_seconds(pids), time.perf_counter()
        await flood(executor, task, tasks, in_flight)
        wall = time.perf_counter() - wall
        figures.append(
            (
                (cpu_seconds(own) - before) / tasks * 1e6,
                (cpu_seconds(pids) - children) / tasks * 1e6,
                tasks / wall,
            )
        )
    waits = []
    for _ in range(SINGLES):
        begun = time.perf_counter()
        await executor.run(task, PAYLOAD, context())
        waits.append((time.perf_counter() - begun) * 1e3)
        await asyncio.sleep(0)
    waits.sort()
    worker, child, rate = min(figures)
    rest = ", ".join(f"{each[0]:.0f}+{each[1]:.0f}" for each in figures)
    print(
        f"{name:26} worker {worker:6.1f} µs, child {child:6.1f} µs, {rate:7.0f} tasks/s; "
        f"latency p50 {statistics.median(waits):.3f} ms, p99 {waits[int(SINGLES * 0.99)]:.3f} ms   (rounds: {rest})",
        flush=True,
    )


async def compare(tasks: int, rounds: int) -> None:
    config = ChildConfig(registry="bench.children:registry", max_result_bytes=MAX_RESULT_BYTES, telemetry={})
    server = ForkServer(config)
    loops, processes = LoopExecutor(server, 1, STALL_SECONDS), ProcessExecutor(server, 2)
    threads = ThreadExecutor(2)
    try:
        await measure("coroutine, inline", InlineExecutor(), coroutine, tasks, rounds, 64)
        await measure("coroutine, child", loops, coroutine, tasks, rounds, 64)
        await measure("plain, thread", threads, plain, tasks, rounds, 2)
        await measure("plain, child", processes, plain, tasks, rounds, 2)
        await measure("coroutine, alone", processes, coroutine, tasks // 10, rounds, 2)
    finally:
        for executor in (loops, processes, threads):
            executor.close()
        await server.close()


@click.command()
@click.option("--tasks", default=20_000, show_default=True, help="Tasks of a round.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--loop", type=click.Choice(list(LOOPS)), default="uvloop", show_default=True)
def main(tasks: int, rounds: int, loop: str) -> None:
    """Print what running a handler costs, by where it runs."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(compare(tasks, rounds))


if __name__ == "__main__":
    main()
