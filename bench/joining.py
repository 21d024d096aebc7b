"""The longest gap between tasks while many workers join at once, under a steady load.

    TASKLINE_KAFKA__BOOTSTRAP_SERVERS=127.0.0.1:9092 python -m bench.joining [--workers 40] [--within 10] [--partitions 24] [--rate 100]

A few workers serve. The others are started, import everything, and wait for a file, so that what starting so many interpreters costs a small machine is not
taken for a stall of the group; then they join, spread over some seconds. Each is a process with a consumer group for each priority; handlers are coroutines on its own loop. Gaps
are between handlers' first lines: of all, and of the tasks of one partition; the wait is from when a submission was due (open loop).
"""

from __future__ import annotations

import os
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import click
import psutil

from bench.producer import own_topics
from taskline.infra.topics import DEFAULT_QUEUE
from taskline.producers import Submission, TaskHandle, TaskProducer
from taskline.settings import Settings, as_environment, load_settings
from taskline.workers import Registry
from taskline.workers.role import main as work

registry = Registry()
LEDGER = "BENCH_LEDGER"
# Serve from the beginning.
FIRST = 2
# Watched after the last has joined.
AFTERWARDS_SECONDS = 15.0
START_SECONDS = 300.0
STOP_SECONDS = 120.0
_LINE = struct.Struct("<qq")


@registry.task("joining.task", isolation="inline")
async def task(number: int) -> None:
    now = time.monotonic_ns()
    file = os.open(os.environ[LEDGER], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, _LINE.pack(number, now))
    finally:
        os.close(file)


def be_member(gate: Path, delay_seconds: float) -> None:
    """Be a worker, once the gate is there."""
    print("imported", flush=True)
    while not gate.exists():
        time.sleep(0.05)
    time.sleep(delay_seconds)
    work(load_settings(), registry, DEFAULT_QUEUE)


class Member:
    """A worker process and its log."""

    def __init__(self, settings: Settings, folder: Path, name: str, gate: Path, delay_seconds: float) -> None:
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.joining", "--member", str(gate), str(delay_seconds)],
                env=dict(os.environ) | as_environment(settings) | {LEDGER: str(folder / "ledger")},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self, word: bytes) -> None:
        """Until its log has it."""
        deadline = time.monotonic() + START_SECONDS
        while word not in self.log.read_bytes():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"a worker did not get to {word!r}:\n{self.log.read_text()[-2_000:]}")
            time.sleep(0.05)


class Load:
    """Submissions at fixed times."""

    def __init__(self, settings: Settings, rate: float) -> None:
        self._settings, self._rate = settings, rate
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.due_ns: list[int] = []
        self.partitions: list[int] = []

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with TaskProducer(self._settings, registry.catalogue()) as producer:
            for result in producer.submit_many(self._items()):
                if not isinstance(result, TaskHandle):
                    raise SystemExit(f"not accepted: {result}")
                self.partitions.append(result.position.partition)

    def _items(self) -> Iterator[Submission]:
        begun = time.monotonic_ns()
        while not self._over.is_set():
            number = len(self.due_ns)
            due = begun + round(number / self._rate * 1e9)
            time.sleep(max(0.0, (due - time.monotonic_ns()) / 1e9))
            self.due_ns.append(due)
            yield Submission(task_type="joining.task", payload=number)


@contextmanager
def stopping(members: list[Member]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in members:
            each.process.terminate()
        for each in members:
            try:
                each.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                each.process.kill()


def longest(instants: Sequence[int], since: int, until: int) -> float:
    """The longest time, in s, without one of the (ascending) instants, which begins or ends within these bounds."""
    inside = [since, *(each for each in instants if since < each < until), until]
    return max(later - earlier for earlier, later in pairwise(inside)) / 1e9


def report(what: str, load: Load, lines: Sequence[tuple[int, int]], since: int, until: int) -> None:
    by_partition: defaultdict[int, list[int]] = defaultdict(list)
    for number, at in lines:
        by_partition[load.partitions[number]].append(at)
    gaps = sorted(longest(instants, since, until) for instants in by_partition.values())
    waits = sorted((at - load.due_ns[number]) / 1e9 for number, at in lines if since < at < until)
    print(
        f"{what:24} longest gap {longest([at for _, at in lines], since, until):.2f} s; of one partition"
        f" {gaps[-1]:.2f} s (median of {len(gaps)}: {statistics.median(gaps):.2f} s); wait p50 {statistics.median(waits) * 1e3:.0f} ms,"
        f" p99 {waits[int(len(waits) * 0.99)] * 1e3:.0f} ms, max {waits[-1]:.2f} s   ({(until - since) / 1e9:.0f} s, load average {os.getloadavg()[0]:.1f})",
        flush=True,
    )


def measure(settings: Settings, folder: Path, workers: int, within: float, rate: float) -> None:
    gate, at_once = folder / "gate", folder / "at-once"
    at_once.touch()
    members = [Member(settings, folder, f"first-{number}", at_once, 0.0) for number in range(FIRST)]
    with stopping(members):
        for each in members:
            each.wait(b'"serving"')
        joining = [
            Member(settings, folder, f"joins-{number}", gate, within * number / workers)
            for number in range(workers)
        ]
        members += joining
        for each in joining:
            each.wait(b"imported")
        with Load(settings, rate) as load:
            # The first tasks open connections.
            time.sleep(5.0)
            quiet_since = time.monotonic_ns()
            time.sleep(10.0)
            gate.touch()
            begun = time.monotonic_ns()
            for each in joining:
                each.wait(b'"serving"')
            serve = time.monotonic_ns()
            memory = [psutil.Process(each.process.pid).memory_info().rss / 1e6 for each in joining]
            time.sleep(AFTERWARDS_SECONDS)
            until = time.monotonic_ns()
        time.sleep(5.0)
        lines = sorted(_LINE.iter_unpack((folder / "ledger").read_bytes()), key=lambda line: line[1])
        print(
            f"{workers} workers joined {FIRST} others: the last one served {(serve - begun) / 1e9:.1f} s after the first was let in"
            f" (spread over {within:g} s); {statistics.mean(memory):.0f} MB each"
        )
        report("before", load, lines, quiet_since, begun)
        report("while they join", load, lines, begun, serve)
        report("until all is settled", load, lines, begun, until)
        print(
            f"{len(load.due_ns)} tasks, {len(load.due_ns) - len({n for n, _ in lines})} not run, {len(lines) - len({n for n, _ in lines})} run again"
        )


@click.command()
@click.option("--workers", default=40, show_default=True, help="Workers that join.")
@click.option("--within", default=10.0, show_default=True, help="Seconds from the first to the last.")
@click.option("--partitions", default=24, show_default=True, help="Of each dispatch topic.")
@click.option("--rate", default=100.0, show_default=True, help="Tasks a second.")
@click.option("--member", nargs=2, type=(click.Path(path_type=Path), float), hidden=True)
def main(
    workers: int, within: float, partitions: int, rate: float, member: tuple[Path, float] | None
) -> None:
    """Print the longest gaps."""
    if member is not None:
        be_member(*member)
        return
    base = load_settings()
    topics = base.topics.model_copy(update={"dispatch_partitions": partitions})
    with (
        own_topics(base.model_copy(update={"topics": topics})) as settings,
        tempfile.TemporaryDirectory() as name,
    ):
        measure(settings, Path(name), workers, within, rate)


if __name__ == "__main__":
    main()
