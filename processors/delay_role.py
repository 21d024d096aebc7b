"""The delay role as a process: checks, the tiers that there are, the engine on Kafka, a clean stop.

Invariant: every topic of the namespace in which records may wait is read, also one whose tier is not declared any more: it is
emptied into the declared ones. Kafka being away is waited for, at the start as at any later time; what waiting can't mend
ends the process with the reason and a non-zero status.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import structlog
from confluent_kafka import KafkaException

from taskline.errors import OffsetLost, WrongTopology
from taskline.infra.available import Stopped, when_available
from taskline.infra.backoff import pauses
from taskline.infra.intake import TopicPartition
from taskline.infra.kafka.admin import check_topology
from taskline.infra.kafka.asynclog import KafkaLog
from taskline.infra.kafka.client import translated
from taskline.infra.kafka.consumer import IntakeOptions
from taskline.infra.kafka.intake import KafkaIntake
from taskline.infra.kafka.offsets import GroupTopic, committed
from taskline.infra.kafka.records import LogEnds
from taskline.infra.kafka.requests import CHECK_TIMEOUT_SECONDS, admin_client
from taskline.infra.outbox import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS
from taskline.infra.role import SystemClock, process_name, run_role
from taskline.infra.tiers import Tier, Tiers, tier_of
from taskline.infra.topics import Topics
from taskline.processors.delay_core import Router, Stage
from taskline.processors.delay_engine import HAND_OVER_SECONDS, DelayEngine
from taskline.processors.delay_upkeep import Upkeep
from taskline.settings import Settings

log = structlog.get_logger(__name__)

T = TypeVar("T")

# Acknowledgements still under way when the engine has ended are of records that the next owner forwards again.
_FLUSH_SECONDS = 2.0
# What the client keeps at hand beside the engine's own buffers; this bounds the process's memory, whatever waits.
_QUEUED_RECORDS = 200
_QUEUED_KBYTES = 4_096
_FETCH_BYTES = 65_536
# A full partition that is resumed waits behind a fetch that was sent without it; the half of its buffer that is left covers this.
_FETCH_WAIT_MS = 20
_BATCH_RECORDS = 200


def main(settings: Settings) -> None:
    """Forward what waits until SIGTERM or SIGINT.

    Raises:
        WrongTopology: the topics or groups are not as declared.
        OffsetLost: what the group was to forward is not in the log any more.
    """
    run_role("delay", settings.telemetry, lambda stop: run_delay(settings, stop))


async def run_delay(settings: Settings, stop: asyncio.Event) -> None:
    """Forward what waits until `stop` is set; errors as `main`."""
    name = process_name()

    def there(step: Callable[[], T]) -> Awaitable[T]:
        waits = pauses(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        return when_available(lambda: asyncio.to_thread(step), stop, waits, what="Kafka")

    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.enter_context(contextlib.suppress(Stopped))
        await there(partial(check_topology, settings, queues=settings.topics.queues, delays=True))
        # What is due goes at once; under load requests fill by themselves.
        appends = KafkaLog(settings, client_id=name, linger_ms=0.0)
        cleanup.push_async_callback(appends.close, _FLUSH_SECONDS)
        ends = cleanup.enter_context(LogEnds(settings.kafka, client_id=f"{name}-upkeep"))
        waits = pauses(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        while not stop.is_set():
            retired = await there(partial(retired_tiers, settings))
            try:
                await _forward(settings, appends, ends, retired, name=name, stop=stop)
            except WrongTopology:
                # A retired tier's topic was deleted, as it may be.
                if retired == await there(partial(retired_tiers, settings)):
                    raise
                log.info("a retired tier is gone")
            except OffsetLost as error:
                # A member that was stopped for long reads where another has forwarded and deleted since.
                if await there(partial(_really_lost, settings, ends, error.topic)):
                    raise
                log.warning("read where another member has deleted; joining anew", error=str(error))
                await asyncio.sleep(next(waits))


def retired_tiers(settings: Settings) -> tuple[Tier, ...]:
    """The tiers that have a topic and are not declared any more, shortest first.

    Raises:
        Unavailable: the cluster does not answer.
    """
    prefix = Topics(namespace=settings.kafka.namespace).delay_prefix
    try:
        with admin_client(settings.kafka) as admin:
            listed = admin.list_topics(timeout=CHECK_TIMEOUT_SECONDS).topics
    except KafkaException as error:
        raise translated(error, "listing topics") from error
    found: list[Tier] = []
    for topic in listed:
        name = topic.removeprefix(prefix)
        if topic.startswith(prefix) and name not in settings.delay.tiers:
            # Somebody else's topic, then.
            with contextlib.suppress(ValueError):
                found.append(tier_of(name))
    return tuple(sorted(found))


async def _forward(
    settings: Settings,
    appends: KafkaLog,
    ends: LogEnds,
    retired: Sequence[Tier],
    *,
    name: str,
    stop: asyncio.Event,
) -> None:
    """One membership of the group, from joining to leaving."""
    topics = Topics(namespace=settings.kafka.namespace)
    tiers = Tiers.of(settings.delay.tiers)
    router = Router(topics, tiers, settings.topics.queues)
    emptied = [router.stage(tier) for tier in retired]
    stages: list[Stage] = [router.scheduled(), *map(router.stage, tiers.tiers), *emptied]
    intake = KafkaIntake(
        settings.kafka,
        IntakeOptions(
            batch=_BATCH_RECORDS,
            grace_seconds=HAND_OVER_SECONDS,
            fetch_wait_ms=_FETCH_WAIT_MS,
            queued_messages=_QUEUED_RECORDS,
            queued_kbytes=_QUEUED_KBYTES,
            fetch_bytes=_FETCH_BYTES,
            unseeded=frozenset(stage.topic for stage in emptied),
        ),
        topics=[stage.topic for stage in stages],
        group=topics.delay_group,
        client_id=name,
    )
    clock = SystemClock()
    engine = DelayEngine(intake, appends, router, stages=stages, settings=settings.delay, clock=clock)
    upkeep = Upkeep(settings, ends, lambda: engine.lanes, retired=emptied, clock=clock)
    log.info(
        "forwarding",
        client_id=name,
        tiers=list(settings.delay.tiers),
        retired=[tier.name for tier in retired],
        queues=list(settings.topics.queues),
    )
    looking = asyncio.create_task(upkeep.run(), name="delay-upkeep")
    looking.add_done_callback(partial(_upkeep_ended, engine))
    try:
        await engine.run(stop)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def _upkeep_ended(engine: DelayEngine, task: asyncio.Task[None]) -> None:
    """What is not foreseen must not end in silence: the log would grow without an end."""
    if not task.cancelled() and isinstance(error := task.exception(), Exception):
        engine.failed(error)


def _really_lost(settings: Settings, ends: LogEnds, topic: str) -> bool:
    """Whether the group's own commits point below a topic's first records.

    Raises:
        Unavailable: the cluster does not answer.
    """
    group = Topics(namespace=settings.kafka.namespace).delay_group
    with admin_client(settings.kafka) as admin:
        try:
            count = len(admin.list_topics(timeout=CHECK_TIMEOUT_SECONDS).topics[topic].partitions)
        except KafkaException as error:
            raise translated(error, "listing topics") from error
    reader = GroupTopic(group, topic)
    offsets = committed(settings.kafka, (reader,), {topic: count}, CHECK_TIMEOUT_SECONDS)[reader]
    first = ends.earliest([TopicPartition(topic, number) for number in offsets], CHECK_TIMEOUT_SECONDS)
    return any(offset < first[TopicPartition(topic, number)] for number, offset in offsets.items())
