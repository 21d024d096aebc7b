"""The projection of the dead-letter topic: letters and what was done about them in, rows of the view out. Pure.

Invariant: nothing on the dead-letter topic is ever rejected to it again. What is neither a dead letter nor a resolution that can be
kept is *raw*: a row that says why, with an id derived from where the bytes came from (`raw_letter_id`). So the projector's
own rejects come back to it as rows, and there it ends.

A record under a schema that is not known here halts its partition when its header names a letter and no cause is with it (then a newer
Taskline wrote it); with a cause it is bytes that somebody else could not read.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

from taskline.errors import UndecodableRecord, UnknownSchema
from taskline.infra.log import HEADER_CAUSE, HEADER_SOURCE, HEADER_TASK_ID, InRecord, Position
from taskline.schemas.codec import Codec
from taskline.schemas.events import DeadLetter, DeadLetterResolved, TaskSubmitted
from taskline.schemas.ids import MAX_CLOCK_AHEAD_MS, TaskId
from taskline.state.letter_row import (
    NOBODY,
    Letter,
    LetterKey,
    LetterKind,
    LetterWrite,
    Resolution,
    ResolutionWrite,
    is_raw_letter,
    raw_letter_id,
)

# The reason of raw rows; dead letters have their own (taskline.schemas.events.DeadLettered).
UNDECODABLE = "undecodable"
# What a row keeps of texts: enough to find and to judge a letter by. The whole texts are in the letter.
_MAX_NAME_CHARS = 300
_MAX_MESSAGE_CHARS = 1_000
# A tenant is part of a key; no producer takes a longer one.
_MAX_TENANT_CHARS = 200
_ID_BYTES = 16
_TASK_VERSION = 7
_SOURCE = re.compile(r"([a-zA-Z0-9._-]{1,249})/([0-9]{1,9})/([0-9]{1,18})", re.ASCII)


class _Unusable(Exception):
    """A record that is not what it should be; the message says why."""


class LetterProjection:
    """Takes records of the dead-letter topic one by one."""

    def __init__(self, codec: Codec, *, now_ms: int, retention_ms: int, max_ttl_seconds: int) -> None:
        """Read with `codec`; keep what died less than `retention_ms` before `now_ms`."""
        self._codec = codec
        self._now_ms = now_ms
        self._retention_ms = retention_ms
        self._max_ttl = max_ttl_seconds
        # By key: of the same letter, the newest place on the topic is the one that is deleted last.
        self.letters: dict[LetterKey, LetterWrite] = {}
        self.resolutions: list[ResolutionWrite] = []

    def take(self, record: InRecord) -> str:
        """Project one record.

        Returns:
            What it was, for the counts: letters, resolutions, raw_letters or expired.

        Raises:
            UnknownSchema: a newer Taskline wrote it.
        """
        if HEADER_CAUSE in record.headers:
            return self._raw(record, record.headers[HEADER_CAUSE].decode("utf-8", "replace"))
        try:
            kind = self._codec.kind_of(record.value or b"")
            if kind is DeadLetterResolved:
                return self._resolution(record)
            return self._letter(record)
        except UnknownSchema as error:
            if _names_letter(record.headers):
                raise
            return self._raw(record, str(error))
        except (UndecodableRecord, _Unusable) as error:
            return self._raw(record, str(error))

    def _letter(self, record: InRecord) -> str:
        letter = self._codec.decode(record.value, DeadLetter)
        if letter.task_id.version != _TASK_VERSION or letter.task_id.variant != uuid.RFC_4122:
            raise _Unusable(f"a dead letter of {letter.task_id}, which is not a UUIDv7")
        if not letter.tenant:
            raise _Unusable("a dead letter of nobody's")
        key = _key(letter.task_id, letter.tenant, letter.at, record)
        submission = self._submission(letter.submission)
        row = Letter(
            key=key,
            kind=LetterKind.TASK,
            task_type=letter.task_type[:_MAX_NAME_CHARS],
            queue=None if submission is None else submission.queue[:_MAX_NAME_CHARS],
            reason=letter.reason[:_MAX_NAME_CHARS],
            category=letter.category.value,
            error_class=letter.error_class[:_MAX_NAME_CHARS],
            message=letter.message[:_MAX_MESSAGE_CHARS],
            attempt=letter.attempt,
            generation=0 if submission is None else submission.generation,
            root_id=None if submission is None else submission.root_id,
            replay_of=None if submission is None else submission.replay_of,
            source=Position(
                topic=letter.source_topic[:_MAX_NAME_CHARS],
                partition=letter.source_partition,
                offset=letter.source_offset,
            ),
            dlq_partition=record.position.partition,
            dlq_offset=record.position.offset,
            size_bytes=len(record.value or b""),
        )
        return self._keep(row, "letters")

    def _resolution(self, record: InRecord) -> str:
        told = self._codec.decode(record.value, DeadLetterResolved)
        key = _key(told.letter_id, told.tenant, told.letter_at, record)
        # Its write timestamp counts down from this.
        _check_instant("at", told.at, record)
        ttl = self._ttl(key.at_ms)
        if ttl <= 0:
            return "expired"
        resolution = Resolution(
            action=told.action,
            at_ms=told.at,
            by=told.by[:_MAX_NAME_CHARS],
            replayed_as=told.replayed_as,
            note=None if told.note is None else told.note[:_MAX_MESSAGE_CHARS],
        )
        self.resolutions.append(ResolutionWrite(key=key, resolution=resolution, ttl_seconds=ttl))
        return "resolutions"

    def _raw(self, record: InRecord, cause: str) -> str:
        given = record.headers.get(HEADER_SOURCE, b"").decode("utf-8", "replace")
        source = _source(given)
        row = Letter(
            key=LetterKey(
                letter_id=raw_letter_id(
                    str(record.position) if source is None else str(source), record.key, record.value
                ),
                tenant=NOBODY,
                at_ms=record.timestamp_ms,
            ),
            kind=LetterKind.RAW,
            reason=UNDECODABLE,
            message=cause[:_MAX_MESSAGE_CHARS],
            source=source,
            dlq_partition=record.position.partition,
            dlq_offset=record.position.offset,
            size_bytes=len(record.value or b""),
        )
        return self._keep(row, "raw_letters")

    def _keep(self, letter: Letter, what: str) -> str:
        ttl = self._ttl(letter.key.at_ms)
        if ttl <= 0:
            return "expired"
        self.letters[letter.key] = LetterWrite(letter=letter, ttl_seconds=ttl)
        return what

    def _submission(self, data: bytes) -> TaskSubmitted | None:
        # What can't be read here is still listed; a replay finds out by itself.
        try:
            return self._codec.decode(data, TaskSubmitted)
        except UndecodableRecord:
            return None

    def _ttl(self, at_ms: int) -> int:
        return min((at_ms + self._retention_ms - self._now_ms) // 1000, self._max_ttl)


def _key(letter_id: TaskId, tenant: str, at_ms: int, record: InRecord) -> LetterKey:
    if len(tenant) > _MAX_TENANT_CHARS:
        raise _Unusable(f"its tenant has {len(tenant)} characters")
    _check_instant("its letter's instant", at_ms, record)
    return LetterKey(letter_id=letter_id, tenant=tenant, at_ms=at_ms)


def _check_instant(what: str, at_ms: int, record: InRecord) -> None:
    """Refuse what no clock can have said, by the broker's, so that it is refused at every reading."""
    if not 0 < at_ms <= record.timestamp_ms + MAX_CLOCK_AHEAD_MS:
        raise _Unusable(f"{what} is {at_ms} ms, which lies outside all time before its record")


def _source(text: str) -> Position | None:
    found = _SOURCE.fullmatch(text)
    if found is None:
        return None
    return Position(topic=found[1], partition=int(found[2]), offset=int(found[3]))


def _names_letter(headers: Mapping[str, bytes]) -> bool:
    header = headers.get(HEADER_TASK_ID)
    if header is None or len(header) != _ID_BYTES:
        return False
    letter_id = uuid.UUID(bytes=header)
    return letter_id.version == _TASK_VERSION or is_raw_letter(letter_id)
