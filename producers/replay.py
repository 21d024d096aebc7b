"""From a dead letter to what is appended when it is replayed or discarded: pure, so that command line and HTTP agree.

A replay is a *new task*: what died stays dead, with its history, and says what replays it. Invariant: its id is a function of the
dead letter and the generation. So whoever tries again, after a crash or beside somebody else, submits the same task again
and not another one. For the same reason its creation time, which is part of its id, is the instant at which the dead one died.

It is submitted as the dead one was: tenant, type, queue, priority, payload, retries, time-out, affinity, trace context. Left out are:
`start_by`, which has usually passed, so that the replay would expire; `not_before`, which has passed or it would not have run;
and the idempotency key, which names the first submission and would make the replay a duplicate of it.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass, replace
from typing import Any

from taskline.errors import GenerationsExhausted, NotReplayable, PayloadTooLarge, UndecodableRecord
from taskline.infra.log import HEADER_CAUSE, HEADER_SOURCE, HEADER_TASK_ID, InRecord, OutRecord
from taskline.infra.topics import Topics, topology
from taskline.schemas.codec import Codec
from taskline.schemas.events import (
    DeadLetter,
    DeadLetterResolved,
    LifecycleBatch,
    LifecycleEntry,
    LifecycleEvent,
    TaskSubmitted,
)
from taskline.schemas.ids import TaskId, created_at_ms, lane_of
from taskline.schemas.types import TaskType
from taskline.settings import Settings
from taskline.state.letter_row import DAY_MS, Letter, Resolution

_HASH_DOMAIN = b"taskline replay "


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """A payload that takes the dead one's place."""

    payload: bytes
    # Of the schema that it is written under; None: it is JSON.
    fingerprint: bytes | None


def edited(task_type: TaskType, payload: Any, *, max_payload_bytes: int) -> Edit:  # noqa: ANN401 - the schema's
    """Check and encode a new payload under the type as it is registered now.

    Raises:
        InvalidPayload: it is off the schema; `pointer` leads to the field.
        PayloadTooLarge: it is over the limit encoded.
    """
    encoded, fingerprint = task_type.encode(payload)
    if len(encoded) > max_payload_bytes:
        raise PayloadTooLarge(len(encoded), max_payload_bytes)
    return Edit(payload=encoded, fingerprint=fingerprint)


def replay_id(dead: TaskId, died_at_ms: int, generation: int) -> TaskId:
    """The id of the task that replays a dead one: a UUIDv7 whose random bits are a SHA-256 (RFC 9562 §5.7)."""
    digest = hashlib.sha256(_HASH_DOMAIN + dead.bytes + generation.to_bytes(8, "big")).digest()
    bits = int.from_bytes(digest[:16], "big")
    low, middle = bits & (2**62 - 1), (bits >> 62) & (2**12 - 1)
    return uuid.UUID(int=died_at_ms << 80 | 0x7 << 76 | middle << 64 | 0b10 << 62 | low)


def letter_in(letter: Letter, record: InRecord, codec: Codec) -> tuple[DeadLetter, TaskSubmitted]:
    """The whole letter and its submission.

    Raises:
        NotReplayable: they can't be read here.
    """
    try:
        whole = codec.decode(record.value, DeadLetter)
        return whole, codec.decode(whole.submission, TaskSubmitted)
    except UndecodableRecord as error:
        raise NotReplayable(
            letter.letter_id, f"dead letter {letter.letter_id} can't be read: {error}"
        ) from error


def replay_of(
    letter: Letter, submission: TaskSubmitted, *, now_ms: int, settings: Settings, edit: Edit | None = None
) -> TaskSubmitted:
    """The submission that replays a dead task.

    Args:
        letter: the dead letter.
        submission: what it holds.
        now_ms: the time; retention begins anew.
        settings: retention, and how often a task may be replayed.
        edit: another payload; None: the same.

    Raises:
        GenerationsExhausted: it has been replayed often enough.
    """
    generation = submission.generation + 1
    if generation > settings.dlq.max_generations:
        raise GenerationsExhausted(letter.letter_id, generation, settings.dlq.max_generations)
    longest_ms = round(settings.producer.task_retention_days * DAY_MS)
    asked_ms = submission.retain_until - created_at_ms(submission.task_id)
    changed: dict[str, Any] = (
        {} if edit is None else {"payload": edit.payload, "payload_fingerprint": edit.fingerprint}
    )
    return replace(
        submission,
        task_id=replay_id(submission.task_id, letter.key.at_ms, generation),
        replay_of=submission.task_id,
        generation=generation,
        retain_until=now_ms + (min(asked_ms, longest_ms) if asked_ms > 0 else longest_ms),
        start_by=None,
        not_before=None,
        idempotency_key=None,
        **changed,
    )


def raw_replay(letter: Letter, record: InRecord, *, codec: Codec, settings: Settings) -> OutRecord:
    """Bytes that could not be read, for the topic that they came from: for use after what could not read them is mended.

    They go as they came, without what was added for the dead-letter topic; onto the lifecycle topic into the lane that they
    were in. A single event, which the projector took out of its batch, goes as a batch of its own.

    Raises:
        NotReplayable: they came from nowhere that Taskline reads.
    """
    source, topics = letter.source, Topics(namespace=settings.kafka.namespace)
    if source is None:
        raise NotReplayable(
            letter.letter_id,
            f"{letter.letter_id} was put straight onto the dead-letter topic: it came from nowhere",
        )
    # The header may have been written by anybody: nothing is sent to a topic that is not Taskline's.
    if source.topic not in {spec.name for spec in topology(settings)} - {topics.dlq}:
        raise NotReplayable(
            letter.letter_id, f"{letter.letter_id} came from {source.topic!r}, which is not declared here"
        )
    if source.topic == topics.lifecycle:
        event = _event_in(record.value, codec)
        if event is not None:
            return _batch_of_one(event, record.value or b"", topics, codec, settings.topics.lanes)
    headers = {
        name: value for name, value in record.headers.items() if name not in (HEADER_CAUSE, HEADER_SOURCE)
    }
    return OutRecord(
        topic=source.topic,
        key=record.key,
        value=record.value,
        headers=headers,
        partition=source.partition if source.topic == topics.lifecycle else None,
    )


def resolution_record(letter: Letter, resolution: Resolution, *, codec: Codec, topics: Topics) -> OutRecord:
    """What is appended behind a letter, to say what was done about it."""
    resolved = DeadLetterResolved(
        letter_id=letter.letter_id,
        tenant=letter.key.tenant,
        letter_at=letter.key.at_ms,
        action=resolution.action,
        at=resolution.at_ms,
        by=resolution.by,
        replayed_as=resolution.replayed_as,
        note=resolution.note,
    )
    key = letter.letter_id.bytes
    return OutRecord(topic=topics.dlq, key=key, value=codec.encode(resolved), headers={HEADER_TASK_ID: key})


def _event_in(value: bytes | None, codec: Codec) -> LifecycleEvent | None:
    try:
        return codec.decode(value, LifecycleEvent)
    except UndecodableRecord:
        return None


def _batch_of_one(event: LifecycleEvent, data: bytes, topics: Topics, codec: Codec, lanes: int) -> OutRecord:
    entry = LifecycleEntry(task_id=event.task_id, retain_until=event.retain_until, event=data)
    return OutRecord(
        topic=topics.lifecycle,
        value=codec.encode(LifecycleBatch(events=(entry,))),
        partition=lane_of(event.task_id, lanes),
    )
