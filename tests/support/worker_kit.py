"""Worker processes under test: started with a ledger, fed, and looked at from outside."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition
from worker_tasks import Job, registry

from taskline.infra.topics import Topics
from taskline.producers import Submission, TaskHandle, TaskProducer
from taskline.schemas.codec import Codec
from taskline.schemas.events import LifecycleBatch, LifecycleEvent, Priority
from taskline.settings import Settings, as_environment

CODEC = Codec()
DEADLINE = 90.0


def eventually(condition: Callable[[], Any], what: str, seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while True:
        # A coordinator that moves or restarts is no answer.
        with contextlib.suppress(KafkaException):
            if condition():
                return
        assert time.monotonic() < deadline, f"not in {seconds} s: {what}"
        time.sleep(0.1)


class Ledger:
    """What handlers wrote down."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def lines(self, word: str) -> list[tuple[int, int]]:
        """(number, worker, counted from 0) of each line with this word."""
        split = (line.split() for line in self.path.read_text().splitlines())
        return [(int(parts[1]), int(parts[3])) for parts in split if parts[0] == word]

    def count(self, word: str) -> collections.Counter[int]:
        return collections.Counter(number for number, _ in self.lines(word))


class Workers:
    """Worker processes on the test's topics."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.ledger = Ledger(folder / "ledger")
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, **worker_settings: object) -> subprocess.Popen[bytes]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TASKLINE_")}
        environ |= as_environment(self.settings) | {
            "LEDGER": str(self.ledger.path),
            "WORKER": str(len(self.started)),
            "PYTHONPATH": str(Path(__file__).parent),
        }
        environ |= {f"TASKLINE_WORKER__{name.upper()}": str(value) for name, value in worker_settings.items()}
        log = (self.folder / f"worker{len(self.started)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from taskline.cli import main; main()",
                    "worker",
                    *(arguments or ("worker_tasks:registry",)),
                ],
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
            )
        self.started.append(process)
        return process

    def output(self, process: subprocess.Popen[bytes]) -> str:
        return (self.folder / f"worker{self.started.index(process)}.log").read_text()

    def stop(self, process: subprocess.Popen[bytes], seconds: float = 60) -> int:
        process.send_signal(signal.SIGTERM)
        return process.wait(seconds)

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
        for number in range(len(self.started)):
            print(f"--- worker{number}\n", (self.folder / f"worker{number}.log").read_text()[-6_000:])


def submit(
    settings: Settings, jobs: Mapping[int, tuple[str, float]], priority: Priority | None = None
) -> list[TaskHandle]:
    """number → (task type, seconds)"""
    items = [
        Submission(task_type=task_type, payload=Job(number=number, seconds=seconds), priority=priority)
        for number, (task_type, seconds) in jobs.items()
    ]
    with TaskProducer(settings, registry.catalogue()) as producer:
        handles = list(producer.submit_many(items))
    assert all(isinstance(handle, TaskHandle) for handle in handles), handles[:3]
    return handles


def lag(settings: Settings) -> int:
    """Records of the default queue that no group has committed."""
    names = Topics(namespace=settings.kafka.namespace)
    total = 0
    for priority in Priority:
        topic, group = names.dispatch("default", priority), names.worker_group("default", priority)
        consumer = Consumer({"bootstrap.servers": settings.kafka.bootstrap_servers, "group.id": group})
        try:
            numbers = consumer.list_topics(topic, timeout=10).topics[topic].partitions
            for committed in consumer.committed(
                [TopicPartition(topic, number) for number in numbers], timeout=10
            ):
                _, high = consumer.get_watermark_offsets(
                    TopicPartition(topic, committed.partition), timeout=10
                )
                total += high - max(0, committed.offset)
        finally:
            consumer.close()
    return total


def read_all(settings: Settings, topic: str) -> list[Any]:
    """Every record of a topic, partition by partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": settings.kafka.bootstrap_servers,
            "group.id": "unused",
            "enable.auto.commit": False,
        }
    )
    found = []
    try:
        for number in consumer.list_topics(topic, timeout=10).topics[topic].partitions:
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=10)
            if low == high:
                continue
            consumer.assign([TopicPartition(topic, number, low)])
            while True:
                message = consumer.poll(10)
                assert message is not None
                assert message.error() is None, message.error()
                found.append(message)
                if message.offset() == high - 1:
                    break
            consumer.unassign()
    finally:
        consumer.close()
    return found


def events(settings: Settings) -> dict[Any, list[LifecycleEvent]]:
    """Each task's lifecycle events in lane order."""
    by_task: dict[Any, list[LifecycleEvent]] = collections.defaultdict(list)
    for message in read_all(settings, Topics(namespace=settings.kafka.namespace).lifecycle):
        for entry in CODEC.decode(message.value(), LifecycleBatch).events:
            event = CODEC.decode(entry.event, LifecycleEvent)
            by_task[event.task_id].append(event)
    return by_task


def mixed_jobs(count: int, seed: int, durations: tuple[float, ...]) -> dict[int, tuple[str, float]]:
    rng = random.Random(seed)
    return {
        number: (rng.choice(["test.async", "test.async", "test.plain"]), rng.choice(durations))
        for number in range(count)
    }
