"""Dead letters replayed by filter: what the command reaches, and what a stop in the middle leaves.

Letters are put straight onto the dead-letter topic, and no worker runs: this measures the listing, the reading of whole letters and the
two acknowledgements of each.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterator

import click

from taskline.infra.kafka.admin import create_topics
from taskline.infra.kafka.asynclog import KafkaLog
from taskline.infra.kafka.fetch import KafkaRecords, RecordFetcher
from taskline.infra.log import HEADER_TASK_ID, InRecord, OutRecord
from taskline.infra.role import SystemClock
from taskline.infra.telemetry import configure_logging
from taskline.infra.topics import Topics
from taskline.processors.projection import Layout, project
from taskline.producers.replay_bulk import Bulk, BulkOrder
from taskline.producers.replayer import Replayer
from taskline.schemas.codec import Codec
from taskline.schemas.events import DeadLetter, Priority, TaskSubmitted
from taskline.schemas.ids import new_task_id
from taskline.settings import Settings, load_settings
from taskline.state.cassandra import CassandraStore
from taskline.state.dead_letters import DeadLetters, LetterFilter
from taskline.state.migrations import migrate

DAY_MS = 86_400_000
# Letters that are appended, and projected, at once.
CHUNK = 1_000


def letters(count: int, now_ms: int) -> Iterator[DeadLetter]:
    codec = Codec()
    for number in range(count):
        task_id = new_task_id(now_ms - 60_000)
        task = TaskSubmitted(
            task_id=task_id,
            tenant="bench",
            task_type="bench.noop" if number % 10 else "bench.other",
            queue="default",
            priority=Priority.NORMAL,
            payload=b'{"n":%d,"text":"%s"}' % (number, b"x" * 240),
            retain_until=now_ms + DAY_MS,
            max_retries=3,
            root_id=task_id,
        )
        yield DeadLetter(
            task_id=task_id,
            tenant=task.tenant,
            task_type=task.task_type,
            reason="exhausted",
            attempt=4,
            error_class="builtins.ValueError",
            message="boom",
            worker="bench",
            at=now_ms - 1_000 - count + number,
            source_topic="tasks.normal",
            source_partition=0,
            source_offset=number,
            submission=codec.encode(task),
        )


async def fill(settings: Settings, store: CassandraStore, log: KafkaLog, count: int) -> None:
    """Letters onto the topic and, as the projector would, into the view."""
    codec, dlq = Codec(), Topics(namespace=settings.kafka.namespace).dlq
    now_ms = SystemClock().now_ms()
    every = list(letters(count, now_ms))
    for start in range(0, count, CHUNK):
        outs = [
            OutRecord(
                topic=dlq,
                key=each.task_id.bytes,
                value=codec.encode(each),
                headers={HEADER_TASK_ID: each.task_id.bytes},
            )
            for each in every[start : start + CHUNK]
        ]
        positions = await asyncio.gather(*map(log.append, outs))
        records = [
            InRecord(
                position=position, value=out.value, key=out.key, headers=out.headers, timestamp_ms=now_ms
            )
            for out, position in zip(outs, positions, strict=True)
        ]
        await store.apply(project(records, codec=codec, layout=Layout.of(settings), now_ms=now_ms).writes)


async def run(settings: Settings, count: int, rate: float) -> None:
    store = await CassandraStore.connect(settings)
    log = KafkaLog(settings, client_id="bench-replay")
    fetcher = RecordFetcher(settings.kafka, client_id="bench-replay")
    try:
        began = time.monotonic()
        await fill(settings, store, log, count)
        print(f"{count} letters in {time.monotonic() - began:.1f} s")
        reader = DeadLetters(store, settings)
        replayer = Replayer(log, KafkaRecords(fetcher), store, Codec(), settings, by="bench")
        for asked in (rate, 1e6):
            wanted = LetterFilter(tenant="bench", task_type="bench.noop" if asked == rate else "bench.other")
            before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
            report = await Bulk(reader, replayer, BulkOrder(wanted=wanted, rate=asked)).run(asyncio.Event())
            seconds = time.monotonic() - began
            after = resource.getrusage(resource.RUSAGE_SELF)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(
                f"asked for {asked:g}/s: {report.handled} in {seconds:.1f} s = {report.handled / seconds:.0f}/s, "
                f"{1000 * cpu / max(1, report.handled):.2f} ms of CPU each; {dict(report.counts)}, {report.error}"
            )
    finally:
        await log.close()
        fetcher.close()
        await store.close()


@click.command()
@click.option("--letters", "count", default=10_000, show_default=True)
@click.option("--rate", default=500.0, show_default=True, help="A second.")
def main(count: int, rate: float) -> None:
    """Print what replaying reaches."""
    settings = load_settings()
    configure_logging(settings.telemetry)
    create_topics(settings)
    migrate(settings)
    asyncio.run(run(settings, count, rate))


if __name__ == "__main__":
    main()
