"""Memory of a worker and its children over many tasks. No servers.

    python -m bench.memory [--tasks 200000]

The executors of a worker run no-op tasks alone, without the engine and the log: half of them coroutines in a loop child, half plain functions in
processes. Resident memory is printed at the start (after a warm-up, when caches and heaps have their size), after every tenth, and at the end;
beyond the allowance from start to end the command fails.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import click
import psutil
import uvloop

from bench.children import MAX_RESULT_BYTES, STALL_SECONDS, coroutine, flood, plain
from taskline.workers.child import ChildConfig
from taskline.workers.children import ProcessExecutor
from taskline.workers.children_loop import LoopExecutor
from taskline.workers.children_server import ForkServer

WARM_UP = 10_000
# Heaps breathe by a few MB; 200,000 tasks that leaked 64 bytes each would be 12 MB.
ALLOWED_MB = 8.0
_TENTHS = 10
_MB = 1024 * 1024


def rss_mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / _MB


async def watch(tasks: int) -> float:
    """Run the tasks; the most by which a process has grown, in MB."""
    config = ChildConfig(registry="bench.children:registry", max_result_bytes=MAX_RESULT_BYTES, telemetry={})
    server = ForkServer(config)
    loops, processes = LoopExecutor(server, 1, STALL_SECONDS), ProcessExecutor(server, 2)
    begun = time.perf_counter()
    try:

        async def run(count: int) -> None:
            await asyncio.gather(
                flood(loops, coroutine, count // 2, 32), flood(processes, plain, count - count // 2, 2)
            )

        def look(done: int) -> list[float]:
            pids = [os.getpid(), *loops.pids, *sorted(processes.pids)]
            sizes = [rss_mb(pid) for pid in pids]
            children = ", ".join(f"{size:.1f}" for size in sizes[1:])
            print(
                f"{done:>9} tasks: worker {sizes[0]:.1f} MB, children {children} MB   "
                f"({time.perf_counter() - begun:.0f} s, load {os.getloadavg()[0]:.1f})",
                flush=True,
            )
            return sizes

        await run(min(WARM_UP, tasks))
        first = last = look(0)
        for tenth in range(_TENTHS):
            await run(tasks // _TENTHS)
            last = look((tenth + 1) * (tasks // _TENTHS))
        return max(after - before for before, after in zip(first, last, strict=True))
    finally:
        loops.close()
        processes.close()
        await server.close()


@click.command()
@click.option("--tasks", default=200_000, show_default=True)
def main(tasks: int) -> None:
    """Print whether memory stays flat."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        grown = runner.run(watch(tasks))
    print(f"grown by {grown:.1f} MB at the most (allowed: {ALLOWED_MB:g})")
    sys.exit(grown > ALLOWED_MB)


if __name__ == "__main__":
    main()
