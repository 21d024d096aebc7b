"""How soon high-priority tasks begin while low ones wait and fill the slots, and what low ones get while high ones never end.

    TASKLINE_KAFKA__BOOTSTRAP_SERVERS=127.0.0.1:9092 python -m bench.pickup [--low 50000] [--seconds 60] [--rate 20] [--flood 30]

Pickup: high tasks are due at fixed times, whatever becomes of earlier ones (open loop), first on an idle worker, then while the low tasks, of 2 s each,
wait and every slot that is not reserved for high is taken by one. A latency counts from the time at which the submission was due to the handler's first
line, by one machine's clock, so the submitter's own delay is in it.

Shares: tasks of 0.1 s; normal and low ones stand in line, and as many high ones as needed to keep a backlog are submitted all the time. How many of each were begun is
printed beside what the weights promise.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from bench.producer import accepted, own_topics
from taskline.infra.local.roles import Role
from taskline.producers import AsyncTaskProducer, Submission, TaskProducer
from taskline.schemas.events import Priority
from taskline.settings import Settings, load_settings
from taskline.workers import Registry
from taskline.workers.slots import Slots

registry = Registry()
FOLDER = "BENCH_FOLDER"
LOW_SECONDS = 2.0
SHARE_SECONDS = 0.1
# High tasks that wait at any time of the flood: more than a worker prefetches.
BACKLOG = 500
# A handler's first line, in ns, and when its submission was due.
_PAIR = struct.Struct("<qq")


def note(name: str, data: bytes) -> None:
    """Append to a file; O_APPEND makes short writes of several processes whole."""
    file = os.open(Path(os.environ[FOLDER]) / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, data)
    finally:
        os.close(file)


@registry.task("pickup.high", priority=Priority.HIGH)
async def high(due_ns: int) -> None:
    note("pickups", _PAIR.pack(time.time_ns(), due_ns))


@registry.task("pickup.low", priority=Priority.LOW)
async def low(payload: None) -> None:
    note("low", b".")
    await asyncio.sleep(LOW_SECONDS)


@registry.task("pickup.share")
async def share(priority: str) -> None:
    note(f"share-{priority}", b".")
    await asyncio.sleep(SHARE_SECONDS)


class Count:
    """How often handlers of a kind have begun."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name

    def __call__(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0


@contextmanager
def worker(settings: Settings, folder: Path) -> Iterator[Role]:
    """One that serves."""
    log = folder / f"worker-{settings.kafka.namespace}log"
    role = Role(("worker", "bench.pickup:registry"), settings, log=log, environ={FOLDER: str(folder)})
    with role:
        role.wait_until(lambda: b'"serving"' in log.read_bytes(), seconds=60, what="serving")
        yield role


async def open_loop(producer: AsyncTaskProducer, rate: float, seconds: float) -> None:
    """Submit at the appointed times, whether or not earlier ones were acknowledged."""
    begun = time.time_ns()
    under_way = []
    for number in range(round(rate * seconds)):
        due_ns = begun + round(number / rate * 1e9)
        await asyncio.sleep(max(0.0, (due_ns - time.time_ns()) / 1e9))
        under_way.append(asyncio.create_task(producer.submit("pickup.high", due_ns)))
    await asyncio.gather(*under_way)


def pickups(settings: Settings, folder: Path, rate: float, seconds: float) -> list[float]:
    """The latencies of a run, in ms, ascending."""
    path = folder / "pickups"
    path.unlink(missing_ok=True)

    async def run() -> None:
        producer = AsyncTaskProducer.on_kafka(settings, registry.catalogue())
        try:
            await open_loop(producer, rate, seconds)
        finally:
            await producer.close()

    asyncio.run(run())
    wanted = round(rate * seconds)
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < wanted * _PAIR.size:
        if time.monotonic() > deadline:
            raise SystemExit("high tasks were not run within a minute")
        time.sleep(0.05)
    return sorted((begun - due) / 1e6 for begun, due in _PAIR.iter_unpack(path.read_bytes()))


def report(what: str, waits: Sequence[float]) -> None:
    p99 = waits[min(len(waits) - 1, int(len(waits) * 0.99))]
    print(
        f"{what:52} p50 {statistics.median(waits):6.1f} ms, p99 {p99:6.1f} ms, max {waits[-1]:6.1f} ms"
        f"   ({len(waits)} tasks, load average {os.getloadavg()[0]:.1f})",
        flush=True,
    )


def measure_pickup(settings: Settings, folder: Path, waiting: int, rate: float, seconds: float) -> None:
    slots = Slots(settings.worker.concurrency, reserved=settings.worker.high_reserve)
    with (
        worker(settings, folder),
        TaskProducer(settings, registry.catalogue()) as producer,
    ):
        pickups(settings, folder, rate, 2.0)
        report("high, idle worker", pickups(settings, folder, rate, min(seconds, 20.0)))
        accepted(
            producer.submit_many(Submission(task_type="pickup.low", payload=None) for _ in range(waiting))
        )
        begun = Count(folder, "low")
        while begun() < slots.total:
            time.sleep(0.1)
        before, since = begun(), time.monotonic()
        waits = pickups(settings, folder, rate, seconds)
        busy = (begun() - before) * LOW_SECONDS / (time.monotonic() - since)
        left = waiting - begun()
        report(f"high, {left:,} low waiting, {busy:.1f} of {slots.total} slots low", waits)


def shares(settings: Settings) -> Iterable[Submission]:
    for priority in (Priority.NORMAL, Priority.LOW):
        for _ in range(10_000):
            yield Submission(task_type="pickup.share", payload=priority.value, priority=priority)


def measure_shares(settings: Settings, folder: Path, seconds: float) -> None:
    counts = {priority: Count(folder, f"share-{priority.value}") for priority in Priority}
    with TaskProducer(settings, registry.catalogue()) as producer, worker(settings, folder):
        accepted(producer.submit_many(shares(settings)))
        submitted = 0

        def top_up() -> None:
            nonlocal submitted
            missing = BACKLOG - (submitted - counts[Priority.HIGH]())
            if missing > 0:
                item = Submission(
                    task_type="pickup.share", payload=Priority.HIGH.value, priority=Priority.HIGH
                )
                accepted(producer.submit_many(item for _ in range(missing)))
                submitted += missing

        def flood(duration: float) -> dict[Priority, int]:
            before = {priority: count() for priority, count in counts.items()}
            end = time.monotonic() + duration
            while time.monotonic() < end:
                top_up()
                time.sleep(0.02)
            return {priority: count() - before[priority] for priority, count in counts.items()}

        flood(3.0)
        begun = flood(seconds)
    total = sum(begun.values())
    weights = {
        Priority.HIGH: settings.worker.weight_high,
        Priority.NORMAL: settings.worker.weight_normal,
        Priority.LOW: settings.worker.weight_low,
    }
    promised = 1.0 - settings.worker.high_reserve
    for priority, count in begun.items():
        weight = weights[priority] / sum(weights.values())
        print(
            f"{priority.value:7} {count:6} begun, {count / total:6.1%} of {total / seconds:.0f}/s"
            f" (by weight {weight:.1%} of the slots that are not reserved for high, which are about {promised:.0%})"
        )
    print(f"load average {os.getloadavg()[0]:.1f}")


@click.command()
@click.option("--low", "waiting", default=10_000, show_default=True, help="Low tasks that wait.")
@click.option("--seconds", default=30.0, show_default=True, help="How long high tasks are submitted.")
@click.option("--rate", default=20.0, show_default=True, help="High tasks a second.")
@click.option("--flood", default=15.0, show_default=True, help="Seconds of the flood.")
def main(waiting: int, seconds: float, rate: float, flood: float) -> None:
    """Print pickup latencies and shares."""
    with tempfile.TemporaryDirectory() as name:
        with own_topics(load_settings()) as settings:
            measure_pickup(settings, Path(name), waiting, rate, seconds)
        with own_topics(load_settings()) as settings:
            measure_shares(settings, Path(name), flood)


if __name__ == "__main__":
    main()
