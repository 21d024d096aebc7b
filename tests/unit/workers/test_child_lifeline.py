"""Children and their worker's process: signals that reach them all, and a worker that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from child_kit import exists

WORKER = """
import asyncio, sys
from child_kit import config, run
from taskline.workers.children import ProcessExecutor
from taskline.workers.children_loop import LoopExecutor
from taskline.workers.children_server import ForkServer

async def main():
    server = ForkServer(config())
    processes, loops = ProcessExecutor(server, 3), LoopExecutor(server, 2, 30)
    busy = [
        asyncio.ensure_future(run(processes, "hang", sys.argv[1])),
        asyncio.ensure_future(run(processes, "hang.family", sys.argv[2])),
        asyncio.ensure_future(run(loops, "sleep", 60)),
    ]
    await asyncio.sleep(0)
    await run(processes, "echo")
    await run(loops, "echo.async")
    busy.append(asyncio.ensure_future(run(loops, "block", 60)))
    await asyncio.sleep(0.3)
    print(server.pid, *processes.pids, *loops.pids, flush=True)
    for _ in range(600):
        await asyncio.sleep(0.1)
        print(await run(processes, "echo", "alive"), flush=True)

asyncio.run(main())
"""


@contextmanager
def worker(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process with a fork server, two hanging children, an idle one, and two loops of which one is blocked."""
    support = Path(__file__).parents[2] / "support"
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder / "hang"), str(folder / "family")],
        env=os.environ | {"PYTHONPATH": str(support)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            pids = [int(word) for word in process.stdout.readline().split()]
            assert len(pids) == 6
            yield process, pids + [int(word) for word in (folder / "family").read_text().split()]
        finally:
            process.kill()


def eventually(condition: Callable[[], bool], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_children_and_what_they_have_started_end_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    with worker(tmp_path) as (process, pids):
        assert all(map(exists, pids))
        process.kill()
        process.wait()
        eventually(lambda: not any(map(exists, pids)))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_a_terminal_or_a_supervisor_sends_to_all_of_them_end_no_child(
    tmp_path: Path, signum: signal.Signals
) -> None:
    with worker(tmp_path) as (process, pids):
        own = pids[:6]
        for pid in own:
            os.kill(pid, signum)
        assert process.stdout is not None
        # Two answers: the idle child has heard the signal before the second one.
        for _ in range(2):
            assert "alive" in process.stdout.readline()
        assert all(map(exists, own))
