"""The projection: records of the log in, writes to the view out. Pure.

Invariant: the writes are a function of the records alone (the time only decides how long they are kept), and an event reaches
the store as the bytes that are on the log, under its place in the lane. So any record may be projected again, by anyone, in
any grouping. Of one task all events of a call are one write, so a reader sees a prefix of its lane.

What can't be projected:

- Lifecycle records or events that are no such thing (null, garbage, a wrong lane, an id that Taskline can't have minted) are
  *rejected*: verbatim to the dead-letter topic with the cause. A bad event does not take its batch along.
- A record under a schema that is not known here was most likely written by a newer Taskline. Skipping it would lose it for the view,
  so its partition *halts* before it: nothing from there on is settled until a projector that knows it takes over.
- Undecodable dispatch records are the workers' to dead-letter, since they consume the same topic: counted only. One under
  an unknown schema halts its partition only if its header names a task; garbage that happens to start as a frame has none.
- Re-dispatches (attempt header above 1) carry the submission once more: skipped unread. A first attempt that has waited carries it
  once more too, and marks its task as dispatched.
- A submission that replays a dead task marks that task.
- What nobody may remember any longer (retain_until) is skipped.

What is on the dead-letter topic has a projection of its own (taskline.processors.letter_projection), which rejects nothing.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from taskline.errors import UndecodableRecord, UnknownSchema
from taskline.infra.log import (
    HEADER_ATTEMPT,
    HEADER_DUE,
    HEADER_TASK_ID,
    InRecord,
    OutRecord,
    Position,
    verbatim_dead_letter,
)
from taskline.infra.topics import Topics
from taskline.processors.letter_projection import LetterProjection
from taskline.schemas.codec import Codec
from taskline.schemas.events import (
    MAX_BATCH_EVENTS,
    LifecycleBatch,
    LifecycleEntry,
    LifecycleEvent,
    TaskSubmitted,
    sequence_of,
)
from taskline.schemas.ids import MAX_CLOCK_AHEAD_MS, TaskId, bucket_of, created_at_ms, lane_of
from taskline.settings import Settings
from taskline.state.status import STATUS_AFTER, TaskStatus
from taskline.state.store import MAX_TTL_SECONDS, EventsWrite, ReplayWrite, SubmissionWrite, Write

Partition = tuple[str, int]

_ID_BYTES = 16
_UUID_VERSION = 7
_DAY_MS = 86_400_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Halt:
    """A partition that must not be projected from `position` on."""

    position: Position
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """What a run of records comes to."""

    writes: tuple[Write, ...]
    # For the dead-letter topic; acknowledged before the records are settled.
    rejects: tuple[OutRecord, ...]
    # Newly halted partitions.
    halts: Mapping[Partition, Halt]
    # What was seen, by kind: submissions, redispatches, undecodable, events, rejected, expired; of dead letters: letters,
    # raw_letters, resolutions.
    counts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where things are in the log and in the view."""

    lifecycle_topic: str
    scheduled_topic: str
    dlq_topic: str
    lanes: int
    bucket_ms: int
    # How long dead letters are kept.
    dlq_retention_ms: int = 14 * _DAY_MS

    @classmethod
    def of(cls, settings: Settings) -> Layout:
        """The layout that these settings declare."""
        topics = Topics(namespace=settings.kafka.namespace)
        return cls(
            lifecycle_topic=topics.lifecycle,
            scheduled_topic=topics.scheduled,
            dlq_topic=topics.dlq,
            lanes=settings.topics.lanes,
            bucket_ms=settings.cassandra.bucket_seconds * 1000,
            dlq_retention_ms=round(settings.topics.dlq_retention_days * _DAY_MS),
        )


def project(
    records: Sequence[InRecord],
    *,
    codec: Codec,
    layout: Layout,
    now_ms: int,
    halted: Mapping[Partition, Halt] | None = None,
) -> Projection:
    """Project records of dispatch topics, of the lifecycle topic and of the dead-letter topic; those of one partition must be in order.

    Args:
        records: what was read.
        codec: reads them.
        layout: of the log and the view.
        now_ms: the time, for how long to keep things.
        halted: what earlier calls have halted; records from a halt on are passed over.

    Raises:
        Unavailable: the schema registry did not answer; nothing is known of these records yet.
    """
    run = _Run(codec, layout, now_ms)
    for record in records:
        partition = (record.position.topic, record.position.partition)
        halt = run.halts.get(partition) or (halted or {}).get(partition)
        if halt is not None and record.position.offset >= halt.position.offset:
            continue
        try:
            if record.position.topic == layout.lifecycle_topic:
                run.lifecycle(record)
            elif record.position.topic == layout.dlq_topic:
                run.letter(record)
            else:
                run.dispatch(record)
        except UnknownSchema as error:
            run.halts[partition] = Halt(position=record.position, cause=str(error))
    return run.result()


class _Rejected(Exception):
    """An event or record that is not what it should be; the message is the cause."""


@dataclass(kw_only=True, slots=True)
class _TaskEvents:
    events: dict[int, bytes]
    tenant: str
    status: TaskStatus
    retain_until: int


class _Run:
    """One call of `project`."""

    def __init__(self, codec: Codec, layout: Layout, now_ms: int) -> None:
        self._codec = codec
        self._layout = layout
        self._now_ms = now_ms
        self._submissions: dict[TaskId, SubmissionWrite] = {}
        self._replays: dict[TaskId, ReplayWrite] = {}
        self._events: dict[TaskId, _TaskEvents] = {}
        self._rejects: list[OutRecord] = []
        self._counts: Counter[str] = Counter()
        self._letters = LetterProjection(
            codec, now_ms=now_ms, retention_ms=layout.dlq_retention_ms, max_ttl_seconds=MAX_TTL_SECONDS
        )
        self.halts: dict[Partition, Halt] = {}

    def result(self) -> Projection:
        layout = self._layout
        events = tuple(
            EventsWrite(
                task_id=task_id,
                lane=lane_of(task_id, layout.lanes),
                bucket=bucket_of(task_id, layout.bucket_ms),
                ttl_seconds=self._ttl(found.retain_until),
                events=found.events,
                tenant=found.tenant,
                status=found.status,
            )
            for task_id, found in self._events.items()
        )
        return Projection(
            writes=(
                *self._submissions.values(),
                *self._replays.values(),
                *events,
                *self._letters.letters.values(),
                *self._letters.resolutions,
            ),
            rejects=tuple(self._rejects),
            halts=self.halts,
            counts=self._counts,
        )

    def letter(self, record: InRecord) -> None:
        self._counts[self._letters.take(record)] += 1

    def dispatch(self, record: InRecord) -> None:
        if _is_redispatch(record.headers.get(HEADER_ATTEMPT)):
            self._counts["redispatches"] += 1
            return
        try:
            submission = self._codec.decode(record.value, TaskSubmitted)
        except UnknownSchema:
            if _names_task(record.headers.get(HEADER_TASK_ID)):
                raise
            self._counts["undecodable"] += 1
            return
        except UndecodableRecord:
            self._counts["undecodable"] += 1
            return
        try:
            _check_id(submission.task_id, record.timestamp_ms)
        except _Rejected as cause:
            self._reject(record, record.value, record.key, str(cause))
            return
        self._counts["submissions"] += 1
        if self._ttl(submission.retain_until) <= 0:
            self._counts["expired"] += 1
            return
        self._submission(record, submission)
        if submission.replay_of is not None:
            self._replay(submission, submission.replay_of)

    def _submission(self, record: InRecord, submission: TaskSubmitted) -> None:
        waited = HEADER_DUE in record.headers and record.position.topic != self._layout.scheduled_topic
        known = self._submissions.get(submission.task_id)
        if known is not None and known.dispatched:
            # The two topics of a task that has waited come in any order.
            return
        self._submissions[submission.task_id] = SubmissionWrite(
            task_id=submission.task_id,
            lane=lane_of(submission.task_id, self._layout.lanes),
            bucket=bucket_of(submission.task_id, self._layout.bucket_ms),
            ttl_seconds=self._ttl(submission.retain_until),
            submission=record.value or b"",
            tenant=submission.tenant,
            task_type=submission.task_type,
            queue=submission.queue,
            priority=submission.priority,
            status=TaskStatus.SCHEDULED if submission.delayed and not waited else TaskStatus.PENDING,
            dispatched=waited,
        )

    def _replay(self, submission: TaskSubmitted, dead: TaskId) -> None:
        # Anybody's bytes may stand there; a mark for an id that is none of ours would be a row that nobody reads.
        if dead.version != _UUID_VERSION or dead.variant != uuid.RFC_4122:
            return
        self._replays[dead] = ReplayWrite(
            task_id=dead,
            lane=lane_of(dead, self._layout.lanes),
            bucket=bucket_of(dead, self._layout.bucket_ms),
            ttl_seconds=self._ttl(submission.retain_until),
            replayed_as=submission.task_id,
        )

    def lifecycle(self, record: InRecord) -> None:
        try:
            batch = self._codec.decode(record.value, LifecycleBatch)
        except UnknownSchema:
            raise
        except UndecodableRecord as error:
            self._reject(record, record.value, record.key, str(error))
            return
        if len(batch.events) > MAX_BATCH_EVENTS:
            cause = f"a batch of {len(batch.events)} events; at most {MAX_BATCH_EVENTS} have places"
            self._reject(record, record.value, record.key, cause)
            return
        # All entries are judged before any is kept: an unknown kind halts the lane before the whole record.
        good: list[tuple[int, LifecycleEntry, LifecycleEvent]] = []
        bad: list[tuple[LifecycleEntry, str]] = []
        for index, entry in enumerate(batch.events):
            try:
                good.append((index, entry, self._judge(record, entry)))
            except UnknownSchema:
                raise
            except (UndecodableRecord, _Rejected) as error:
                bad.append((entry, f"event {index} of the batch: {error}"))
        for entry, cause in bad:
            self._reject(record, entry.event, entry.task_id.bytes, cause)
        for index, entry, event in good:
            self._keep(sequence_of(record.position.offset, index), entry, event)

    def _judge(self, record: InRecord, entry: LifecycleEntry) -> LifecycleEvent:
        """The event, if it is sound.

        It is decoded whole although little of it is used: a broken one in the view would make its task
        unreadable, and this is the last place where it can be set aside.
        """
        _check_id(entry.task_id, record.timestamp_ms)
        lane = lane_of(entry.task_id, self._layout.lanes)
        if lane != record.position.partition:
            # Its place in this lane says nothing about its order among its task's events.
            raise _Rejected(f"it is of a task of lane {lane}, in lane {record.position.partition}")
        event = self._codec.decode(entry.event, LifecycleEvent)
        if event.task_id != entry.task_id:
            raise _Rejected(f"it is of task {event.task_id}, filed under task {entry.task_id}")
        return event

    def _keep(self, sequence: int, entry: LifecycleEntry, event: LifecycleEvent) -> None:
        self._counts["events"] += 1
        if self._ttl(entry.retain_until) <= 0:
            self._counts["expired"] += 1
            return
        status = STATUS_AFTER[type(event)]
        task = self._events.get(entry.task_id)
        if task is None:
            self._events[entry.task_id] = _TaskEvents(
                events={sequence: entry.event},
                tenant=event.tenant,
                status=status,
                retain_until=entry.retain_until,
            )
            return
        task.events[sequence] = entry.event
        task.status = status
        task.retain_until = max(task.retain_until, entry.retain_until)

    def _reject(self, record: InRecord, value: bytes | None, key: bytes | None, cause: str) -> None:
        self._counts["rejected"] += 1
        self._rejects.append(
            verbatim_dead_letter(
                self._layout.dlq_topic, value=value, key=key, headers={}, source=record.position, cause=cause
            )
        )

    def _ttl(self, retain_until: int) -> int:
        return min((retain_until - self._now_ms) // 1000, MAX_TTL_SECONDS)


def _check_id(task_id: TaskId, appended_ms: int) -> None:
    """Refuse an id that Taskline can't have minted, by the broker's clock, so that it is refused at every reading."""
    if task_id.version != _UUID_VERSION or task_id.variant != uuid.RFC_4122:
        raise _Rejected(f"{task_id} is not a UUIDv7")
    if created_at_ms(task_id) > appended_ms + MAX_CLOCK_AHEAD_MS:
        raise _Rejected(f"{task_id} lies in the future of its record")


def _is_redispatch(attempt: bytes | None) -> bool:
    # Anything but a number above 1 is read as a first attempt: the record itself then shows what it is.
    return attempt is not None and attempt.isdigit() and int(attempt) > 1


def _names_task(header: bytes | None) -> bool:
    return (
        header is not None and len(header) == _ID_BYTES and uuid.UUID(bytes=header).version == _UUID_VERSION
    )
