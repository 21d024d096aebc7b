"""The delay role: how late it is, what it costs while records wait, and how many hops a delay takes.

    TASKLINE_KAFKA__BOOTSTRAP_SERVERS=127.0.0.1:9092 python -m bench.delay [--quick] [lateness] [starts] [waiting] [hops] [cost]

Each part runs alone. All figures are of one real `taskline delay` process on topics of its own, except the hops, which the pure core
is driven through by a virtual clock.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import click
import psutil
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from bench.producer import own_topics
from taskline.infra.local.roles import Role
from taskline.infra.log import HEADER_DUE, HEADER_TARGET, InRecord, OutRecord, Position
from taskline.infra.tiers import Tiers, delayed, tier_of
from taskline.infra.topics import Topics, waiting_topics
from taskline.processors.delay_core import Router
from taskline.producers import TaskProducer
from taskline.schemas.events import Priority
from taskline.settings import Settings, load_settings
from taskline.workers import Registry

PARTS = ("lateness", "starts", "waiting", "hops", "cost")
VALUE = bytes(300)
TASK_ID = bytes(16)
SEED = 7
# A forwarder wakes up, appends, and the next stage's fetch returns.
HOP_LATE_MS = (1, 8)
_DAY_MS = 86_400_000
_PATIENCE_SECONDS = 120.0


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def target(settings: Settings) -> str:
    return Topics(namespace=settings.kafka.namespace).dispatch("default", Priority.NORMAL)


def submission(settings: Settings, due_ms: int) -> OutRecord:
    headers = {
        "taskline-task-id": TASK_ID,
        HEADER_DUE: b"%d" % due_ms,
        HEADER_TARGET: target(settings).encode(),
    }
    topic = Topics(namespace=settings.kafka.namespace).scheduled
    return OutRecord(topic=topic, key=b"%d" % due_ms, value=VALUE, headers=headers)


class Arrivals:
    """What reaches the dispatch topic."""

    def __init__(self, settings: Settings) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": settings.kafka.bootstrap_servers,
                "group.id": "unused",
                "enable.auto.commit": False,
            }
        )
        count = settings.topics.dispatch_partitions
        self._consumer.assign([TopicPartition(target(settings), number, 0) for number in range(count)])

    def take(self, count: int, seconds: float) -> list[Message]:
        found: list[Message] = []
        deadline = time.monotonic() + seconds
        while len(found) < count and time.monotonic() < deadline:
            batch = self._consumer.consume(10_000, timeout=0.5)
            found += [message for message in batch if message.error() is None]
        if len(found) < count:
            raise SystemExit(f"{len(found)} of {count} records arrived in {seconds:.0f} s")
        return found

    def close(self) -> None:
        self._consumer.close()


class Feeder:
    """A producer that keeps its promise or ends the bench."""

    def __init__(self, settings: Settings) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": settings.kafka.bootstrap_servers,
                "linger.ms": 5,
                "compression.type": "lz4",
                "queue.buffering.max.messages": 500_000,
            }
        )

    def put(self, record: OutRecord) -> None:
        headers = list(record.headers.items())
        while True:
            try:
                self._producer.produce(record.topic, record.value, record.key, headers=headers)
            except BufferError:
                self._producer.poll(0.1)
            else:
                return

    def flush(self) -> None:
        if self._producer.flush(_PATIENCE_SECONDS):
            raise SystemExit("Kafka did not take the records")


@contextmanager
def role(settings: Settings) -> Iterator[psutil.Process]:
    """A delay process that has its partitions."""
    with tempfile.TemporaryDirectory() as name:
        started = Role(("delay",), settings, log=Path(name) / "delay.log")
        with started:
            started.wait_until(
                lambda: "partitions assigned" in started.log.read_text(), seconds=60, what="assigned"
            )
            yield psutil.Process(started.pid)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def lateness(settings: Settings, *, quick: bool) -> None:
    count, longest_ms = (200, 10_000) if quick else (1_000, 90_000)
    rng = random.Random(SEED)
    feeder, arrivals = Feeder(settings), Arrivals(settings)
    with role(settings):
        # Connections and metadata first.
        feeder.put(submission(settings, now_ms() + 300))
        feeder.flush()
        arrivals.take(1, 30)
        for _ in range(count):
            feeder.put(submission(settings, now_ms() + rng.randint(200, longest_ms)))
            feeder.flush()
        messages = arrivals.take(count, longest_ms / 1_000 + 30)
    arrivals.close()
    late = sorted(message.timestamp()[1] - int(dict(message.headers())[HEADER_DUE]) for message in messages)
    print(
        f"{count} delays of 0.2-{longest_ms / 1_000:.0f} s: late p50 {late[len(late) // 2]} ms, "
        f"p99 {late[len(late) * 99 // 100]} ms, max {late[-1]} ms; {sum(each < 0 for each in late)} early"
    )


STARTS = "BENCH_STARTS"
registry = Registry()


@registry.task("bench.start")
async def start(due_ms: int) -> None:
    now = time.time_ns()
    with Path(os.environ[STARTS]).open("a") as file:  # noqa: ASYNC230 - measured before
        file.write(f"{now / 1e6 - due_ms:.3f}\n")


def starts(settings: Settings, *, quick: bool) -> None:
    """From the instant at which a task is due to its handler's first line, with one worker."""
    count, longest = (200, 10.0) if quick else (1_000, 90.0)
    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory() as name:
        ledger = Path(name) / "starts"
        ledger.touch()
        worker = Role(
            ("worker", "bench.delay:registry"),
            settings,
            log=Path(name) / "worker.log",
            environ={STARTS: str(ledger)},
        )
        with role(settings), worker, TaskProducer(settings, registry) as producer:
            # Connections, the children, the first import.
            producer.submit("bench.start", now_ms(), priority="high")
            worker.wait_until(lambda: bool(ledger.read_text()), seconds=60, what="running")
            for _ in range(count):
                due = now_ms() + rng.uniform(200, longest * 1_000)
                instant = datetime.fromtimestamp(math.ceil(due) / 1_000, UTC)
                producer.submit("bench.start", math.ceil(due), not_before=instant, priority="high")
            worker.wait_until(
                lambda: ledger.read_text().count("\n") > count, seconds=longest + 30, what="all started"
            )
        late = sorted(float(line) for line in ledger.read_text().split()[1:])
    print(
        f"{count} tasks delayed by 0.2-{longest:.0f} s: handler starts late p50 {late[len(late) // 2]:.1f} ms, "
        f"p99 {late[len(late) * 99 // 100]:.1f} ms, max {late[-1]:.1f} ms; {sum(each < 0 for each in late)} early"
    )


def waiting(settings: Settings, *, quick: bool) -> None:
    count, seconds = (100_000, 10) if quick else (1_000_000, 60)
    topics, tiers = Topics(namespace=settings.kafka.namespace), Tiers.of(settings.delay.tiers)
    rng = random.Random(SEED)
    with role(settings) as process:
        time.sleep(5)
        empty = process.memory_info().rss / 2**20
        cpu = cpu_seconds(process)
        time.sleep(seconds)
        idle = cpu_seconds(process) - cpu
        feeder, now = Feeder(settings), now_ms()
        cpu = cpu_seconds(process)
        peak = empty
        for number in range(count):
            # None comes due, or hops, while this runs.
            due = now + rng.randint(_DAY_MS // 12, 30 * _DAY_MS)
            record = OutRecord(
                topic=target(settings),
                key=b"%d" % number,
                value=VALUE,
                headers={"taskline-task-id": TASK_ID},
            )
            feeder.put(delayed(record, due_ms=due, now_ms=now, topics=topics, tiers=tiers))
            if number % 50_000 == 0:
                peak = max(peak, process.memory_info().rss / 2**20)
        feeder.flush()
        time.sleep(5)
        taken = cpu_seconds(process) - cpu
        cpu = cpu_seconds(process)
        time.sleep(seconds)
        full = process.memory_info().rss / 2**20
        busy = cpu_seconds(process) - cpu
    print(
        f"{count} waiting: RSS {empty:.1f} -> {full:.1f} MB ({full - empty:+.1f}, peak {max(peak, full):.1f}); "
        f"CPU in {seconds} s: {idle:.2f} s with nothing, {busy:.2f} s with all that ({taken:.2f} s while they came)"
    )


def hops(settings: Settings, *, quick: bool) -> None:
    topics, tiers = Topics(namespace=settings.kafka.namespace), Tiers.of(settings.delay.tiers)
    router = Router(topics, tiers, settings.topics.queues)
    stages = {topics.delay(tier.name): router.stage(tier) for tier in map(tier_of, settings.delay.tiers)}
    stages[topics.scheduled] = router.scheduled()
    rng = random.Random(SEED)
    rounds = 200 if quick else 2_000

    def travel(delay_ms: int) -> int:
        now, record, count = 0, submission(settings, delay_ms), 0
        while record.topic in stages:
            place = Position(topic=record.topic, partition=0, offset=0)
            read = InRecord(position=place, value=None, key=None, headers=record.headers, timestamp_ms=now)
            held = router.admit(read, stages[record.topic], now)
            now = max(now, held.until_ms) + rng.randint(*HOP_LATE_MS)
            record = router.release(held, now)
            count += 1
        return count

    for name, nominal in (("10 s", 10), ("100 s", 100), ("1,000 s", 1_000), ("1 h", 3_600), ("1 d", 86_400)):
        jittered = name.endswith("s")
        found = [
            travel(round(1_000 * nominal * (rng.uniform(0.5, 1.5) if jittered else 1))) for _ in range(rounds)
        ]
        print(
            f"{name:>8}{' x [0.5, 1.5)' if jittered else '':13} hops from tasks.scheduled: "
            f"mean {statistics.mean(found):.1f}, max {max(found)}"
        )


def cost(settings: Settings, *, quick: bool) -> None:
    count = 5_000 if quick else 30_000
    feeder, arrivals = Feeder(settings), Arrivals(settings)
    with role(settings) as process:
        figures = []
        # The first round warms up.
        for _ in range(3):
            ends = _ends(settings)
            cpu, wall = cpu_seconds(process), time.perf_counter()
            due = now_ms() + 6_000
            for number in range(count):
                feeder.put(submission(settings, due + number % 4_000))
            feeder.flush()
            arrivals.take(count, _PATIENCE_SECONDS)
            time.sleep(1)
            moved = sum(after - before for before, after in zip(ends, _ends(settings), strict=True))
            figures.append(((cpu_seconds(process) - cpu) / moved * 1e6, moved / (time.perf_counter() - wall)))
    arrivals.close()
    best = min(figures[1:])
    rest = ", ".join(f"{each[0]:.0f}" for each in figures)
    print(f"a hop: {best[0]:.1f} µs of CPU, all threads, at {best[1]:.0f} hops/s   (rounds: {rest})")


def _ends(settings: Settings) -> list[int]:
    """The end of every topic from which the role takes records: their growth is its hops."""
    consumer = Consumer({"bootstrap.servers": settings.kafka.bootstrap_servers, "group.id": "unused"})
    with contextlib.closing(consumer):
        return [
            consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=10)[1]
            for topic in waiting_topics(settings)
            for number in range(settings.topics.delay_partitions)
        ]


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
@click.option("--quick", is_flag=True, help="Smaller numbers, for a look.")
def main(parts: tuple[str, ...], quick: bool) -> None:
    """Run the PARTS (all by default), each on topics of its own."""
    measures = {"lateness": lateness, "starts": starts, "waiting": waiting, "hops": hops, "cost": cost}
    for part in parts or PARTS:
        if part == "hops":
            hops(load_settings(), quick=quick)
            continue
        with own_topics(load_settings()) as settings:
            measures[part](settings, quick=quick)


if __name__ == "__main__":
    main()
