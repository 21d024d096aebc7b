"""The real dependencies of the app, and their lives.

None of them is needed before the port opens: what is away is looked for until it is there, and asked every few seconds after
that. Topics are checked as every role does, and wrong ones end the process. A view that was not made, or was made for
other settings, is reported by `/readyz` and looked at again, since submissions do without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TypeVar

import structlog
from cassandra import DriverException
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from taskline.api.claims import Claims
from taskline.api.deps import ApiDeps
from taskline.api.health import KAFKA, VIEW, Health
from taskline.api.late import LateClaims, LateKeys, LateTypes, LateView
from taskline.api.letter_desk import LateLetters, LetterDesk
from taskline.api.limits import RateLimits
from taskline.api.metrics import ApiMetrics
from taskline.api.replacing import Replacing
from taskline.api.submissions import Submissions
from taskline.api.watching import PROBE_TIMEOUT_SECONDS, Probe, watch
from taskline.errors import Unavailable, WrongTopology
from taskline.infra.kafka.admin import check_topology
from taskline.infra.kafka.asynclog import KafkaLog
from taskline.infra.kafka.client import client_config, new_client, translated
from taskline.infra.kafka.fetch import KafkaRecords, RecordFetcher
from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.role import Clock, SystemClock, process_name
from taskline.infra.topics import Topics
from taskline.producers.cancelling import Canceller
from taskline.producers.preparation import codec_of
from taskline.producers.replayer import Replayer
from taskline.settings import ProducerSettings, Settings
from taskline.state.cassandra import CassandraStore
from taskline.state.dead_letters import DeadLetters
from taskline.state.lists import TaskLists
from taskline.state.migrations import check_view
from taskline.state.reader import StatusReader

log = structlog.get_logger(__name__)

# What is limited is the encoded payload; its JSON is up to a few times as long, since Avro has neither field names nor digits.
_BODY_BYTES_PER_PAYLOAD_BYTE = 4
# Room for the other fields.
_BODY_EXTRA_BYTES = 16_384
# A caller of HTTP wants to know soon that the buffer is full; a library's caller would rather wait.
_MAX_BLOCK_SECONDS = 1.0
# The topics are looked at before the port opens, so that wrong ones are refused at once; an absent Kafka must not delay that long.
_FIRST_CHECK_SECONDS = 3.0
# Bounds how long a stop waits for a look that is under way.
_CHECK_SECONDS = 5.0
_TYPES_SECONDS = 10.0

T = TypeVar("T")


class Wiring:
    """Makes the dependencies, keeps them connected, and closes them."""

    def __init__(self, settings: Settings) -> None:
        """Make what needs no server; call from the loop that will serve.

        Raises:
            InvalidSettings: the Kafka client refuses the settings, or a rate limit can't be read.
            MissingExtra: rate limits are counted in Redis, and its client is not installed.
        """
        self._settings = settings
        metrics = ApiMetrics()
        self._limits = RateLimits.of(settings.api, metrics)
        self._codec = codec_of(settings.schemas)
        self._log = KafkaLog(
            settings.model_copy(update={"producer": _bounded(settings)}), client_id="taskline-api"
        )
        self._types, self._view, self._letters = LateTypes(), LateView(), LateLetters()
        self._keys, self._claims = LateKeys(), LateClaims()
        self._cleanup = AsyncExitStack()
        clock = SystemClock()
        cancels = Canceller(self._log, self._view, self._codec, settings, worker=process_name(), clock=clock)
        self.deps = ApiDeps(
            settings=settings.api,
            submissions=Submissions(
                self._log,
                self._types,
                self._codec,
                settings,
                clock=clock,
                claims=_claims(self._claims, self._view, settings, clock),
                replacing=Replacing(
                    cancels, retention_days=settings.producer.task_retention_days, clock=clock
                ),
            ),
            status=self._view,
            lists=self._view,
            types=self._types,
            cancels=cancels,
            max_body_bytes=body_limit(settings.producer.max_payload_bytes),
            letters=self._letters,
            keys=self._keys,
            limits=self._limits,
            health=Health(metrics=metrics),
            metrics=metrics,
            clock=clock,
        )

    async def first_check(self) -> None:
        """Look at the topics before anything is promised to anybody.

        Raises:
            WrongTopology: they are not as declared, and Kafka is there to say so.
        """
        try:
            await _in_thread(lambda: check_topology(self._settings, timeout_seconds=_FIRST_CHECK_SECONDS))
        except Unavailable as error:
            self.deps.health.report(KAFKA, up=False, detail=str(error))

    async def watch(self) -> None:
        """Connect, and keep looking, for ever.

        Raises:
            WrongTopology: the topics are not as declared.
        """
        watches = [
            asyncio.create_task(watch(KAFKA, self._connect_kafka, self.deps.health), name="watch-kafka"),
            asyncio.create_task(watch(VIEW, self._connect_view, self.deps.health), name="watch-view"),
        ]
        try:
            await asyncio.gather(*watches)
        finally:
            for each in watches:
                each.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def close(self) -> None:
        """Wait until what was appended is acknowledged, then close all connections."""
        unacknowledged = await self._log.close()
        if unacknowledged:
            log.error("stopped with unacknowledged submissions", records=unacknowledged)
        await self._cleanup.aclose()
        if self._limits is not None:
            await self._limits.close()

    async def _connect_kafka(self) -> Probe:
        settings = self._settings
        await _in_thread(lambda: check_topology(settings, timeout_seconds=_CHECK_SECONDS))
        directory = TypeDirectory(settings)
        try:
            await _in_thread(lambda: directory.start(_TYPES_SECONDS))
        except BaseException:
            directory.close()
            raise
        self._cleanup.push_async_callback(_in_thread, directory.close)
        self._types.source = directory
        return kafka_probe(settings)

    async def _connect_view(self) -> Probe:
        settings = self._settings
        try:
            await _in_thread(lambda: check_view(settings))
            store = await CassandraStore.connect(settings)
        except (WrongTopology, DriverException) as error:
            # Mended from outside, while submissions go on.
            raise Unavailable(str(error)) from error
        self._cleanup.push_async_callback(store.close)
        self._keys.source = await store.keys()
        self._claims.source = await store.claims()
        self._view.queries = StatusReader(store, self._codec, settings.api)
        self._view.lists = TaskLists(store, self._codec)
        self._letters.desk = self._letter_desk(store)
        return store.ping

    def _letter_desk(self, store: CassandraStore) -> LetterDesk:
        settings = self._settings
        fetcher = RecordFetcher(settings.kafka, client_id="taskline-api-letters")
        self._cleanup.push_async_callback(_in_thread, fetcher.close)
        records = KafkaRecords(fetcher, settings.api.request_timeout_seconds)
        return LetterDesk(
            DeadLetters(store, settings),
            Replayer(self._log, records, store, self._codec, settings, by=process_name()),
            self._types,
            self._codec,
            max_payload_bytes=settings.producer.max_payload_bytes,
            timeout_seconds=settings.api.request_timeout_seconds,
        )


def body_limit(max_payload_bytes: int) -> int:
    """The largest request body that is read at all, in bytes."""
    return _BODY_BYTES_PER_PAYLOAD_BYTE * max_payload_bytes + _BODY_EXTRA_BYTES


def _bounded(settings: Settings) -> ProducerSettings:
    """The producer's settings with the patience of an HTTP caller."""
    producer, patience = settings.producer, settings.api.request_timeout_seconds
    return producer.model_copy(
        update={
            "delivery_timeout_seconds": min(producer.delivery_timeout_seconds, patience),
            "max_block_seconds": min(producer.max_block_seconds, _MAX_BLOCK_SECONDS),
        }
    )


def _claims(store: LateClaims, view: LateView, settings: Settings, clock: Clock) -> Claims:
    producer = _bounded(settings)
    return Claims(
        store,
        view,
        patience_seconds=settings.api.request_timeout_seconds,
        # A record may wait for room in the buffer first.
        delivery_seconds=producer.delivery_timeout_seconds + producer.max_block_seconds,
        clock=clock,
    )


def kafka_probe(settings: Settings) -> Probe:
    """Asks the brokers for the metadata of one topic."""
    topic = Topics(namespace=settings.kafka.namespace).types
    admin = new_client(AdminClient, client_config(settings.kafka, client_id="taskline-api-probe"))

    def ask() -> None:
        try:
            admin.list_topics(topic=topic, timeout=PROBE_TIMEOUT_SECONDS)
        except KafkaException as error:
            raise translated(error, "describing a topic") from error
        finally:
            # Writes the log lines that librdkafka has queued.
            admin.poll(0)

    async def probe() -> None:
        await _in_thread(ask)

    return probe


async def _in_thread(blocking: Callable[[], T]) -> T:
    return await asyncio.to_thread(blocking)
