"""The directory of task types: `tasks.types`, read to its end and followed.

Invariant: the catalogue is the fold of the topic's records in log order (`taskline.schemas.catalogue`), so every process comes to the same
one, and a race between two registrations is settled by the log: the first wins, the second hears of it. The topic has one
partition, keeps its records for ever and is not compacted, since a fold over less would come out differently.

Reads never wait and may come from any thread or an event loop; `start`, `register`, `refresh`, `wait_for` and `find_writer_schema`
wait for the log, so asyncio code calls them in a thread. One directory serves a process.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable
from types import TracebackType

import structlog
from confluent_kafka import Message
from prometheus_client import Counter

from taskline.errors import DeliveryError, IncompatibleSchema, UndecodableRecord
from taskline.infra.kafka.publisher import Publisher
from taskline.infra.kafka.tail import Tail
from taskline.infra.log import OutRecord, Position
from taskline.infra.role import Clock, SystemClock
from taskline.infra.topics import Topics
from taskline.schemas.catalogue import Outcome, Registration, TypeCatalogue
from taskline.schemas.codec import Codec
from taskline.schemas.confluent import codec_for
from taskline.schemas.events import TaskTypeRegistered
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType
from taskline.settings import Settings

log = structlog.get_logger(__name__)

# Reading a topic of some thousand registrations takes a second; the rest is for a broker that is just starting.
DEFAULT_TIMEOUT_SECONDS = 30.0
_CLIENT_ID = "taskline-types"

SKIPPED = Counter(
    "taskline_types_skipped",
    "Records of tasks.types that changed nothing: undecodable, or refused as incompatible.",
    ["reason"],
)


class TypeDirectory:
    """The task types that are registered on the log; a source of types for producers, workers and the API."""

    def __init__(self, settings: Settings, *, clock: Clock | None = None, codec: Codec | None = None) -> None:
        """Prepare; nothing connects before `start`.

        Args:
            settings: where the log is, and how its records are framed.
            clock: dates registrations.
            codec: instead of the one that the settings ask for.
        """
        self._settings = settings
        self._clock = clock or SystemClock()
        self._topic = Topics(namespace=settings.kafka.namespace).types
        self._codec = codec or codec_for(settings.schemas)
        self._fold = _Fold(self._codec)
        self._tail = Tail(settings.kafka, self._topic, self._fold, client_id=_CLIENT_ID)

    def start(self, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """Read everything that is registered now, and go on following.

        Raises:
            WrongTopology: there is no `tasks.types`.
            Unavailable: the log does not answer in time.
        """
        self._tail.start(timeout_seconds)
        self._fold.following = True
        log.debug("task types read", types=len(self.catalogue), offset=self._tail.position)

    def close(self) -> None:
        """Stop following; what is known stays readable. A second call does nothing."""
        self._tail.close()

    def __enter__(self) -> TypeDirectory:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    @property
    def catalogue(self) -> TypeCatalogue:
        """All that is known now; it goes on changing as the log does."""
        return self._fold.catalogue

    def get(self, name: str) -> TaskType:
        """The latest version of a type.

        Raises:
            UnknownTaskType: no such type.
        """
        return self.catalogue.get(name)

    def names(self) -> tuple[str, ...]:
        """The names of all types, sorted."""
        return self.catalogue.names()

    def writer_schema(self, fingerprint: bytes) -> PayloadSchema | None:
        """The schema that lays out payloads with this fingerprint; None: not known, or not yet (`find_writer_schema`)."""
        return self.catalogue.writer_schema(fingerprint)

    def find_writer_schema(
        self, fingerprint: bytes, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> PayloadSchema | None:
        """As `writer_schema`, but reads to the end of the log before it says that nobody has registered it.

        A submission can be newer than what was read so far; its type was registered before it.

        Raises:
            Unavailable: the log does not answer in time.
        """
        found = self.writer_schema(fingerprint)
        if found is None:
            self.refresh(timeout_seconds)
            found = self.writer_schema(fingerprint)
        return found

    def refresh(self, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """Return when everything that is registered now is known here.

        Raises:
            Unavailable: the log does not answer in time.
        """
        self._tail.catch_up(timeout_seconds)

    def wait_for(self, name: str, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> TaskType:
        """Wait until somebody has registered a type of this name.

        Raises:
            Unavailable: nobody has in time.
        """
        self._tail.wait_until(
            lambda: name in self.catalogue, timeout_seconds, f"a registration of task type {name!r}"
        )
        return self.get(name)

    def register(
        self, types: Iterable[TaskType], timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> tuple[Registration, ...]:
        """Publish what is new or changed, and return when it is folded in here.

        Nothing is published when one of the types would be refused; another process that registers at the same moment may still come
        first, and then the log's order decides.

        Returns:
            What became of each type, in order.

        Raises:
            IncompatibleSchema: a type can't read what is queued under an earlier schema.
            Unavailable: the log does not answer in time.
            DeliveryError: a registration was not acknowledged.
        """
        deadline = time.monotonic() + timeout_seconds
        self.refresh(timeout_seconds)
        # The types may also contradict each other.
        trial = self.catalogue.copy()
        wanted = tuple(types)
        outcomes = tuple(map(trial.register, wanted))
        _raise_refused(outcomes)
        changed = [
            each
            for each, outcome in zip(wanted, outcomes, strict=True)
            if outcome.outcome is Outcome.ACCEPTED
        ]
        if changed:
            end = 1 + max(self._publish(changed, deadline - time.monotonic()))
            self._tail.wait_until(
                lambda: self._tail.position >= end,
                deadline - time.monotonic(),
                f"offset {end} of {self._topic}",
            )
            _raise_refused(map(self.catalogue.judge, changed))
        return outcomes

    def _publish(self, types: Iterable[TaskType], timeout_seconds: float) -> list[int]:
        """Append the registrations; their offsets."""
        acks: queue.SimpleQueue[Position | DeliveryError] = queue.SimpleQueue()
        sent = 0
        publisher = Publisher(
            self._settings.kafka,
            self._settings.producer,
            client_id=_CLIENT_ID,
            max_record_bytes=self._settings.topics.max_record_bytes,
        )
        try:
            for task_type in types:
                value = self._codec.encode(task_type.record(self._clock.now_ms()))
                record = OutRecord(topic=self._topic, key=task_type.name.encode(), value=value, partition=0)
                publisher.send(record, acks.put)
                sent += 1
        finally:
            # Gives up, as unknown, what is not acknowledged by then; so every record is answered.
            publisher.close(max(0.0, timeout_seconds))
        answers = [acks.get() for _ in range(sent)]
        for answer in answers:
            if isinstance(answer, DeliveryError):
                raise answer
        return [answer.offset for answer in answers if isinstance(answer, Position)]


class _Fold:
    """What the tail feeds: records become the catalogue."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.catalogue = TypeCatalogue()
        # False while the log is read for the first time, when old news is not worth a line.
        self.following = False

    def restart(self) -> None:
        self.catalogue = TypeCatalogue()

    def take(self, message: Message) -> None:
        offset = message.offset()
        try:
            record = self._codec.decode(message.value(), TaskTypeRegistered)
        except UndecodableRecord as error:
            SKIPPED.labels("undecodable").inc()
            # The reason says all; a trace of the decoder would not help.
            log.error(  # noqa: TRY400
                "undecodable task type skipped", topic=message.topic(), offset=offset, error=str(error)
            )
            return
        registration = self.catalogue.apply(record)
        if registration.outcome is Outcome.REFUSED:
            SKIPPED.labels("refused").inc()
            log.warning(
                "task type refused",
                task_type=record.task_type,
                offset=offset,
                problems=list(registration.problems),
            )
        elif self.following and registration.outcome is Outcome.ACCEPTED:
            log.info("task type registered", task_type=record.task_type, queue=record.queue, offset=offset)


def _raise_refused(registrations: Iterable[Registration]) -> None:
    for registration in registrations:
        if registration.outcome is Outcome.REFUSED:
            raise IncompatibleSchema(registration.task_type, registration.problems)
