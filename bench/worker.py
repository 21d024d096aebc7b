"""CPU µs that a worker spends on a no-op task, its threads and child processes counted, on a real Kafka.

    TASKLINE_KAFKA__BOOTSTRAP_SERVERS=127.0.0.1:9092 python -m bench.worker [--tasks 20000] [--rounds 3] [--concurrency 64]

One `taskline worker` is started on topics of its own and warmed up; then each round submits the tasks as one flood, and the figure is what
the worker's user + system time grew by until the last offset was committed. The last line is the pickup of an idle worker: from submit's
acknowledgement to the handler's first line, by one machine's clock.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import psutil
from confluent_kafka import Consumer, TopicPartition

from bench.producer import PAYLOAD, own_topics
from taskline.infra.topics import DEFAULT_QUEUE, Topics
from taskline.producers import Submission, TaskHandle, TaskProducer
from taskline.schemas.events import Priority
from taskline.settings import Settings, as_environment, load_settings
from taskline.workers import Registry

registry = Registry()
SCHEMA = {
    "type": "record",
    "name": "Place",
    "fields": [
        {
            "name": name,
            "type": "string" if isinstance(value, str) else "double" if isinstance(value, float) else "long",
        }
        for name, value in PAYLOAD.items()
    ],
}
PICKUPS = "BENCH_PICKUPS"
WARM_UP = 3_000
SINGLES = 100


@registry.task("bench.async", schema=SCHEMA)
async def in_loop(payload: dict[str, Any]) -> None: ...


@registry.task("bench.plain", schema=SCHEMA)
def in_thread(payload: dict[str, Any]) -> None: ...


@registry.task("bench.pickup", schema=SCHEMA)
async def pickup(payload: dict[str, Any]) -> None:
    now = time.time_ns()
    with Path(os.environ[PICKUPS]).open("a") as file:  # noqa: ASYNC230 - measured before
        file.write(f"{now}\n")


class Group:
    """How far the workers are on the normal topic."""

    def __init__(self, settings: Settings) -> None:
        names = Topics(namespace=settings.kafka.namespace)
        topic = names.dispatch(DEFAULT_QUEUE, Priority.NORMAL)
        self._consumer = Consumer(
            {
                "bootstrap.servers": settings.kafka.bootstrap_servers,
                "group.id": names.worker_group(DEFAULT_QUEUE, Priority.NORMAL),
            }
        )
        self._partitions = [
            TopicPartition(topic, number) for number in range(settings.topics.dispatch_partitions)
        ]

    def lag(self) -> int:
        ends = (self._consumer.get_watermark_offsets(each, timeout=10)[1] for each in self._partitions)
        done = (each.offset for each in self._consumer.committed(self._partitions, timeout=10))
        return int(sum(ends) - sum(done))

    def wait(self) -> None:
        while self.lag():
            time.sleep(0.05)


@contextmanager
def worker(settings: Settings, concurrency: int, folder: Path) -> Iterator[psutil.Process]:
    command = "from taskline.cli import main; main()"
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                command,
                "worker",
                "bench.worker:registry",
                "--concurrency",
                str(concurrency),
            ],
            env=dict(os.environ) | as_environment(settings) | {PICKUPS: str(folder / "pickups")},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield psutil.Process(process.pid)
        process.terminate()
        if process.wait(60):
            raise SystemExit((folder / "worker.log").read_text())
    finally:
        process.kill()


def flood(producer: TaskProducer, task_type: str, count: int) -> None:
    for result in producer.submit_many(
        Submission(task_type=task_type, payload=PAYLOAD) for _ in range(count)
    ):
        if not isinstance(result, TaskHandle):
            raise SystemExit(f"not accepted: {result}")


def cpu_seconds(process: psutil.Process) -> float:
    """Of the worker and the processes that its handlers run in."""
    spent = 0.0
    for each in (process, *process.children(recursive=True)):
        times = each.cpu_times()
        spent += times.user + times.system
    return spent


@click.command()
@click.option("--tasks", default=20_000, show_default=True, help="Tasks of a round.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--concurrency", default=64, show_default=True)
def main(tasks: int, rounds: int, concurrency: int) -> None:
    """Print what running a task costs besides its handler."""
    with (
        own_topics(load_settings()) as settings,
        tempfile.TemporaryDirectory() as name,
        worker(settings, concurrency, Path(name)) as process,
        TaskProducer(settings, registry.catalogue()) as producer,
    ):
        group = Group(settings)
        for task_type in ("bench.async", "bench.plain"):
            flood(producer, task_type, WARM_UP)
            group.wait()
            figures = []
            for _ in range(rounds):
                cpu, wall = cpu_seconds(process), time.perf_counter()
                flood(producer, task_type, tasks)
                group.wait()
                wall = time.perf_counter() - wall
                figures.append(((cpu_seconds(process) - cpu) / tasks * 1e6, tasks / wall))
            best = min(figures)
            rest = ", ".join(f"{each[0]:.0f}" for each in figures)
            print(
                f"{task_type:32} {best[0]:7.1f} µs/task {best[1]:9.0f} tasks/s   (rounds: {rest})", flush=True
            )
        begun = []
        for _ in range(SINGLES):
            producer.submit("bench.pickup", PAYLOAD)
            begun.append(time.time_ns())
            time.sleep(0.02)
        group.wait()
        ended = [int(line) for line in (Path(name) / "pickups").read_text().split()]
        waits = sorted((end - begin) / 1e6 for begin, end in zip(begun, ended, strict=True))
        print(
            f"{'pickup of an idle worker':32} p50 {statistics.median(waits):.1f} ms, p99 {waits[-2]:.1f} ms after the acknowledgement"
        )


if __name__ == "__main__":
    main()
