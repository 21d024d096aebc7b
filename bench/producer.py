"""CPU µs per task of the producers, all threads of this process counted, on a real Kafka.

    TASKLINE_KAFKA__BOOTSTRAP_SERVERS=127.0.0.1:9092 python bench/producer.py [--tasks 20000] [--rounds 5]

Topics are made in a namespace of their own and deleted at the end. The least of the rounds is what the code costs; the others
show what else the machine was doing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click

from taskline.infra.kafka.admin import create_topics
from taskline.infra.kafka.asynclog import KafkaLog
from taskline.infra.kafka.requests import admin_client
from taskline.infra.log import OutRecord
from taskline.infra.topics import Topics, topology
from taskline.producers import AsyncTaskProducer, Submission, TaskHandle, TaskProducer
from taskline.schemas.catalogue import TypeCatalogue
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType
from taskline.settings import Settings, load_settings

PLACE = {
    "type": "record",
    "name": "Place",
    "fields": [
        {"name": "iata", "type": "string"},
        {"name": "latitude", "type": "double"},
        {"name": "longitude", "type": "double"},
        {"name": "state", "type": ["null", "string"], "default": None},
    ],
}
PAYLOAD = {"iata": "SFO", "latitude": 37.62, "longitude": -122.38, "state": "CA"}
TASK_TYPE = "bench.place"
# Before measuring: connections, producer ids, metadata, caches.
WARM_UP = 2_000


@dataclass(frozen=True, kw_only=True)
class Round:
    cpu_us: float
    per_second: float


def measured(count: int, run: Callable[[], None]) -> Round:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Round(cpu_us=cpu / count * 1e6, per_second=count / wall)


def report(stage: str, rounds: list[Round]) -> None:
    best = min(rounds, key=lambda each: each.cpu_us)
    all_of_them = ", ".join(f"{each.cpu_us:.0f}" for each in rounds)
    print(f"{stage:32} {best.cpu_us:7.1f} µs/task {best.per_second:9.0f} tasks/s   (rounds: {all_of_them})")


@contextmanager
def own_topics(base: Settings) -> Iterator[Settings]:
    namespace = f"bench{secrets.token_hex(3)}."
    settings = base.model_copy(update={"kafka": base.kafka.model_copy(update={"namespace": namespace})})
    created = create_topics(settings).created
    print(f"made {len(created)} topics under {namespace} on {settings.kafka.bootstrap_servers}")
    try:
        yield settings
    finally:
        with admin_client(settings.kafka) as admin:
            for deleted in admin.delete_topics([spec.name for spec in topology(settings)]).values():
                deleted.result(30)
        print("deleted them")


def catalogue() -> TypeCatalogue:
    types = TypeCatalogue()
    types.apply(TaskType(name=TASK_TYPE, schema=PayloadSchema.parse(PLACE)).record(0))
    return types


def items(count: int) -> Iterator[Submission]:
    return (Submission(task_type=TASK_TYPE, payload=PAYLOAD) for _ in range(count))


def accepted(results: Iterator[object]) -> None:
    for result in results:
        if not isinstance(result, TaskHandle):
            raise SystemExit(f"not accepted: {result}")


def sync(settings: Settings, tasks: int, rounds: int) -> None:
    with TaskProducer(settings, catalogue()) as producer:
        accepted(producer.submit_many(items(WARM_UP)))
        report(
            "TaskProducer.submit_many",
            [measured(tasks, lambda: accepted(producer.submit_many(items(tasks)))) for _ in range(rounds)],
        )
        single = min(tasks, 500)

        def one_by_one() -> None:
            for _ in range(single):
                producer.submit(TASK_TYPE, PAYLOAD)

        report("TaskProducer.submit, one by one", [measured(single, one_by_one) for _ in range(rounds)])


def asynchronous(settings: Settings, tasks: int, rounds: int) -> None:
    with asyncio.Runner() as runner:

        async def start() -> AsyncTaskProducer:
            return AsyncTaskProducer.on_kafka(settings, catalogue())

        producer = runner.run(start())

        async def many(count: int) -> None:
            async for result in producer.submit_many(items(count)):
                if not isinstance(result, TaskHandle):
                    raise SystemExit(f"not accepted: {result}")

        async def together(count: int) -> None:
            await asyncio.gather(*(producer.submit(TASK_TYPE, PAYLOAD) for _ in range(count)))

        runner.run(many(WARM_UP))
        report(
            "AsyncTaskProducer.submit_many",
            [measured(tasks, lambda: runner.run(many(tasks))) for _ in range(rounds)],
        )
        batch = min(tasks, 2_000)
        report(
            f"AsyncTaskProducer.submit, {batch} together",
            [measured(batch, lambda: runner.run(together(batch))) for _ in range(rounds)],
        )
        runner.run(producer.close())


def appends(settings: Settings, tasks: int, rounds: int) -> None:
    topic = Topics(namespace=settings.kafka.namespace).lifecycle
    record = OutRecord(topic=topic, value=bytes(200), partition=0)

    with asyncio.Runner() as runner:

        async def start() -> KafkaLog:
            return KafkaLog(settings, client_id="bench")

        log = runner.run(start())

        async def many(count: int) -> None:
            await asyncio.gather(*(log.append(record) for _ in range(count)))

        runner.run(many(WARM_UP))
        report(
            "KafkaLog.append + acknowledgement",
            [measured(tasks, lambda: runner.run(many(tasks))) for _ in range(rounds)],
        )
        runner.run(log.close())


@click.command()
@click.option("--tasks", default=20_000, show_default=True, help="Tasks of a round.")
@click.option("--rounds", default=5, show_default=True)
def main(tasks: int, rounds: int) -> None:
    """Print what submitting costs."""
    with own_topics(load_settings()) as settings:
        sync(settings, tasks, rounds)
        asynchronous(settings, tasks, rounds)
        appends(settings, tasks, rounds)


if __name__ == "__main__":
    main()
