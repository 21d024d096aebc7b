"""What every process that runs or lends tasks stands on: the types, the lanes and the cancel notices, once Kafka is there.

Invariant: what is returned is ready, and what could not be made ready has been closed again, so that each attempt begins anew.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from taskline.infra.available import when_available
from taskline.infra.backoff import pauses
from taskline.infra.kafka.asynclog import KafkaLog
from taskline.infra.kafka.cancel_notices import KafkaNotices
from taskline.infra.kafka.lifecycle import DEFAULT_MAX_BATCH_BYTES, LifecycleLog
from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.outbox import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS
from taskline.infra.role import SystemClock
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.settings import Settings
from taskline.workers.cancels import CancelGate, TaskView

# A lifecycle batch has a frame around its events, and a record one around it.
_BATCH_MARGIN_BYTES = 2_048


def followed_types(settings: Settings, codec: Codec) -> TypeDirectory:
    """A directory that has read what is registered; it can't be started twice, so each attempt makes its own."""
    directory = TypeDirectory(settings, codec=codec)
    try:
        directory.start()
    except BaseException:
        directory.close()
        raise
    return directory


def lifecycle_log(settings: Settings, kafka_log: KafkaLog, codec: Codec, topics: Topics) -> LifecycleLog:
    """The lanes, in batches that their topic takes."""
    return LifecycleLog(
        kafka_log,
        codec,
        topics,
        settings.topics.lanes,
        settings.worker.lifecycle_linger_ms,
        max_batch_bytes=min(DEFAULT_MAX_BATCH_BYTES, settings.topics.max_record_bytes - _BATCH_MARGIN_BYTES),
    )


async def cancel_gate(
    settings: Settings,
    codec: Codec,
    view: TaskView,
    topic: str,
    *,
    name: str,
    stop: asyncio.Event,
    cleanup: AsyncExitStack,
) -> CancelGate:
    """The gate, once the notices of a day have been read; `cleanup` closes them.

    Raises:
        Stopped: `stop` came first.
        WrongTopology: there is no such topic.
    """

    async def follow() -> CancelGate:
        notices = KafkaNotices(settings.kafka, topic, codec, client_id=name)
        gate = CancelGate(notices, view, codec, SystemClock())
        try:
            await notices.start(gate.heard)
        except BaseException:
            await notices.close()
            raise
        cleanup.push_async_callback(notices.close)
        return gate

    return await when_available(follow, stop, pauses(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS), what="Kafka")
