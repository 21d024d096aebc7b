"""The projector's Faust app: which records come in, and when their offsets may be committed.

Invariant: Faust commits an offset only below the first record that was not acknowledged to it. Records of a partition come in order, and
the projector acknowledges them in order, after they are in the view; so a crash leaves a committed offset below which
everything is in the view, and what is above it is read again.

What Faust does, and what is done here about it (0.15):

- `stream.take` acknowledges what was taken also when the agent raises or is cancelled, and the stream iterator's Python
  fallback acknowledges what it skips after a rebalance. So the topic's channel is read directly, and only `Received.settle`
  acknowledges. That also saves a third of the CPU a record costs.
- Its commit tolerates a hole of one record, and any hole in front of the first commit. So nothing is acknowledged out of order; a
  jump in the offsets that arrive means that Faust dropped records, and the app is replaced before anything behind the jump is
  acknowledged.
- Its buffer's pressure mark takes partitions out of the fetch and then sleeps for up to a second. Here a full buffer
  blocks the fetch loop instead, which a rebalance interrupts.
- A consumer that is not polled for max_poll_interval leaves its group. While Cassandra is away nothing is polled, which must not
  move the partitions about, so the interval is longer than any outage; liveness has a watchdog of its own.
- It does not look at the errors of aiokafka's group coordinator. `Source.check` does.
- Without `cramjam` aiokafka dies of the first compressed record; a source without it is refused.
- Its livelock detector takes a channel without a stream for stuck; it is given no time-out.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import faust
import structlog
from aiokafka import codec
from faust.types.auth import SASLMechanism
from faust.types.tuples import TP

from taskline.errors import MissingExtra, TasklineError
from taskline.infra.log import InRecord, Position
from taskline.infra.topics import Topics, projected_topics
from taskline.processors.projection import Partition
from taskline.settings import KafkaSettings, Settings

log = structlog.get_logger(__name__)

# What a crash leaves uncommitted is read again; once a second costs nothing.
_COMMIT_INTERVAL_SECONDS = 1.0
# Longer than any outage of Cassandra that is waited out; the protocol carries it in 31 bits of milliseconds.
_MAX_POLL_INTERVAL_SECONDS = 7 * 86_400.0
# How long the others wait for a member to rejoin; this one rejoins at once, whatever Cassandra does.
_REBALANCE_TIMEOUT_SECONDS = 30.0
# Requests must be allowed to take longer than the session, says Faust; joining a group takes as long as a rebalance.
_REQUEST_MARGIN_SECONDS = 10.0
# A session survives two lost heartbeats.
_HEARTBEATS_PER_SESSION = 3.0
# Records between Faust's fetch loop and the projector's own buffer: enough to bridge a task switch.
_CHANNEL_RECORDS = 1_000
_NEVER_SECONDS = 10 * 365 * 86_400.0


class SourceDied(TasklineError):
    """The Faust app no longer consumes; another one must take its place."""


class _App(faust.App):  # type: ignore[misc]  # faust is untyped
    # Faust names a service's logger after its module: keep this one among Faust's, which are quiet.
    logger = logging.getLogger("faust.app")

    async def on_first_start(self) -> None:
        """Keep Faust from making its folders for tables: there are none."""


@dataclass(frozen=True, slots=True)
class Received:
    """A record and its acknowledgement to Faust."""

    record: InRecord
    event: Any

    def settle(self) -> None:
        """Let the offset be committed; in the order of arrival within a partition."""
        self.event.ack()


class Source:
    """One life of a Faust app: start it, read it, stop it. A dead one is replaced, not revived."""

    def __init__(self, settings: Settings, *, client_id: str) -> None:
        """Configure the app; `client_id` is how the broker knows this process.

        Raises:
            MissingExtra: aiokafka can't read what the broker compresses.
        """
        # The topics are kept in zstd; producers may send any. aiokafka finds out when it meets the first record.
        if not (codec.has_zstd() and codec.has_lz4() and codec.has_snappy()):
            raise MissingExtra("projector", "cramjam")
        group = Topics(namespace=settings.kafka.namespace).projector_group
        self._app = _App(group, **_configuration(settings, client_id))
        topic = self._app.topic(
            *projected_topics(settings), key_serializer="raw", value_serializer="raw", acks=True
        )
        # The channel subscribes when its iteration begins, which must be before the app starts.
        self._channel = aiter(topic)
        # No pressure mark below a full buffer (the mark is at maxsize / ratio).
        self._channel.queue.pressure_high_ratio = 0.5
        # The next offset that is due from each partition, within one assignment.
        self._next: dict[Partition, int] = {}
        self._generation: Any = None
        self._starting: asyncio.Task[None] | None = None
        self._assigned: frozenset[Partition] = frozenset()
        self._app.on_partitions_assigned.connect(self._on_assigned)

    @property
    def assigned(self) -> frozenset[Partition]:
        """The partitions that the group gave to this process last."""
        return self._assigned

    @property
    def taken(self) -> dict[Partition, int]:
        """Offset after the newest record that came from each partition in the present assignment."""
        return dict(self._next)

    async def start(self) -> None:
        """Connect and join the group, in the background; `check` tells how it goes."""
        self._starting = asyncio.create_task(self._app.start(), name="faust-start")

    def check(self) -> None:
        """Return if nothing is known to be wrong.

        Raises:
            SourceDied: the app, its consumer or its group coordinator is dead.
        """
        if self._starting is not None and self._starting.done():
            error = self._starting.exception()
            if error is not None:
                raise SourceDied(f"Faust did not start: {error!r}") from error
        if self._app.should_stop:
            raise SourceDied(f"Faust crashed: {self._app.crash_reason!r}")
        thread = getattr(self._app.consumer, "_thread", None)
        driver = getattr(thread, "_consumer", None)
        coordination = getattr(getattr(driver, "_coordinator", None), "_coordination_task", None)
        if coordination is not None and coordination.done():
            raise SourceDied("the group coordinator's task has ended")

    async def records(self) -> AsyncIterator[tuple[Received, bool]]:
        """Each record as it comes, and whether it is the first of its partition since an assignment.

        Raises:
            SourceDied: records are missing before this one.
        """
        app, channel, due = self._app, self._channel, self._next
        async for event in channel:
            message = event.message
            if message.generation_id != app.consumer_generation_id:
                # Fetched under an assignment that is over: whoever has the partition now reads it again.
                continue
            if message.generation_id != self._generation:
                self._generation = message.generation_id
                due.clear()
            partition = (message.topic, message.partition)
            expected = due.get(partition)
            if expected is not None and message.offset > expected:
                raise SourceDied(f"records {expected} to {message.offset - 1} of {partition} did not arrive")
            due[partition] = message.offset + 1
            yield Received(_in_record(message), event), expected is None

    def pause(self, partition: Partition) -> None:
        """Fetch no more from a halted partition, until it is assigned anew."""
        self._app.consumer.pause_partitions({TP(*partition)})

    async def _on_assigned(self, app: Any, assigned: Any, **_: Any) -> None:  # noqa: ANN401
        self._assigned = frozenset((topic, number) for topic, number in assigned)
        log.info(
            "partitions assigned",
            generation=app.consumer_generation_id,
            partitions=sorted(f"{topic}/{number}" for topic, number in assigned),
        )

    async def stop(self) -> None:
        """Commit what is settled, leave the group, close."""
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
        await self._app.stop()
        if self._starting is not None:
            await asyncio.wait([self._starting])


def _in_record(message: Any) -> InRecord:  # noqa: ANN401
    return InRecord(
        position=Position(topic=message.topic, partition=message.partition, offset=message.offset),
        value=message.value,
        key=message.key,
        headers=dict(message.headers or ()),
        timestamp_ms=round(message.timestamp * 1000),
    )


def _configuration(settings: Settings, client_id: str) -> dict[str, Any]:
    kafka = settings.kafka
    session = kafka.session_timeout_ms / 1000
    return {
        "broker": ";".join(f"kafka://{server.strip()}" for server in kafka.bootstrap_servers.split(",")),
        "broker_client_id": client_id,
        "broker_credentials": _credentials(kafka),
        "broker_commit_interval": _COMMIT_INTERVAL_SECONDS,
        "broker_commit_livelock_soft_timeout": _NEVER_SECONDS,
        "broker_heartbeat_interval": session / _HEARTBEATS_PER_SESSION,
        "broker_max_poll_interval": _MAX_POLL_INTERVAL_SECONDS,
        "broker_rebalance_timeout": _REBALANCE_TIMEOUT_SECONDS,
        "broker_request_timeout": max(session, _REBALANCE_TIMEOUT_SECONDS) + _REQUEST_MARGIN_SECONDS,
        "broker_session_timeout": session,
        # A group without an offset folds from the beginning: that is a rebuild, and folding again is harmless.
        "consumer_auto_offset_reset": "earliest",
        "key_serializer": "raw",
        "value_serializer": "raw",
        "store": "memory://",
        # With standbys, also of no tables, Faust brings its own assignor; aiokafka's plain one will do.
        "table_standby_replicas": 0,
        "stream_buffer_maxsize": _CHANNEL_RECORDS,
        "stream_processing_timeout": _NEVER_SECONDS,
        # A rebalance does not wait for Cassandra: what is in flight is written, and read again by the next owner.
        "stream_wait_empty": False,
        "topic_allow_declare": False,
        "topic_disable_leader": True,
        "web_enabled": False,
    }


def _credentials(kafka: KafkaSettings) -> Any:  # noqa: ANN401
    if kafka.security_protocol == "PLAINTEXT":
        return None
    context = (
        ssl.create_default_context(cafile=kafka.ssl_ca_location)
        if kafka.security_protocol in ("SSL", "SASL_SSL")
        else None
    )
    if kafka.security_protocol == "SSL":
        return faust.SSLCredentials(context)
    return faust.SASLCredentials(
        username=kafka.sasl_username,
        password="" if kafka.sasl_password is None else kafka.sasl_password.get_secret_value(),
        mechanism=SASLMechanism(kafka.sasl_mechanism or "PLAIN"),
        ssl_context=context,
    )
