"""A dead letter as the view has it, and the writes that bring it there.

Invariant: the two writes commute and may be repeated. A letter's cells and those of its resolution are different cells of one
row, whose key (tenant, day, instant, id) both know. Of two resolutions the older one stays whole; of two letters with
one id, which a worker's death in the wrong moment leaves, the older one is the letter and the other its copy.

A letter's id is its task's. Bytes that are no task get one that is derived from where they came from and what they are
(`raw_letter_id`), a UUIDv8, so that the two kinds can be told apart by the id alone.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from taskline.infra.log import Position
from taskline.schemas.events import LetterAction
from taskline.schemas.ids import TaskId, from_ms

DAY_MS = 86_400_000
# Whose raw bytes are: nobody's. No task has this tenant (a tenant has at least one character).
NOBODY = ""
# Write timestamps that count down from here let the older of two writes win.
FAR_FUTURE_US = 4_000_000_000_000_000
_RAW_VERSION = 8


class LetterKind(StrEnum):
    """What stands on the dead-letter topic."""

    # A task that was given up.
    TASK = "task"
    # Bytes that could not be read.
    RAW = "raw"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """What was done about a dead letter."""

    action: LetterAction
    # In ms since the epoch.
    at_ms: int
    by: str
    replayed_as: TaskId | None = None
    note: str | None = None

    @property
    def at(self) -> datetime:
        """When (aware, UTC)."""
        return from_ms(self.at_ms)


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterKey:
    """Where a letter's row is."""

    letter_id: TaskId
    # "" of raw bytes.
    tenant: str
    # When it died, in ms since the epoch; of raw bytes, when they were put on the dead-letter topic.
    at_ms: int

    @property
    def day(self) -> int:
        """Days since the epoch."""
        return day_of(self.at_ms)


@dataclass(frozen=True, kw_only=True, slots=True)
class Letter:
    """A dead letter in short; the whole one is on the log at `place`."""

    key: LetterKey
    kind: LetterKind
    # "" of raw bytes, as are the error's class and category.
    task_type: str = ""
    # None: not known.
    queue: str | None = None
    reason: str
    category: str = ""
    error_class: str = ""
    # Of raw bytes: why they could not be read. Shortened.
    message: str
    # The last one; 0 of raw bytes.
    attempt: int = 0
    # How many replays led here.
    generation: int = 0
    root_id: TaskId | None = None
    replay_of: TaskId | None = None
    # Where its dispatch record, or the raw bytes, came from; None: they were put straight onto the dead-letter topic.
    source: Position | None = None
    # Where it stands on the dead-letter topic; the topic's name is the settings'.
    dlq_partition: int
    dlq_offset: int
    # Of its record's value.
    size_bytes: int
    # None: nothing yet; it is open.
    resolution: Resolution | None = None

    @property
    def letter_id(self) -> TaskId:
        """Its task's id, or for raw bytes the derived one."""
        return self.key.letter_id

    @property
    def at(self) -> datetime:
        """When it died (aware, UTC)."""
        return from_ms(self.key.at_ms)


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterWrite:
    """A dead letter, without a resolution."""

    letter: Letter
    # Seconds until the store may forget it; at least 1.
    ttl_seconds: int

    @property
    def timestamp_us(self) -> int:
        """The write timestamp of its row."""
        return self.letter.key.at_ms * 1000

    @property
    def first_timestamp_us(self) -> int:
        """The write timestamp of its place by id: the older of two letters stays."""
        return FAR_FUTURE_US - self.letter.key.at_ms * 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolutionWrite:
    """What was done about a letter that has been stored, or will be."""

    key: LetterKey
    resolution: Resolution
    ttl_seconds: int

    @property
    def timestamp_us(self) -> int:
        """The write timestamp: the older of two resolutions stays."""
        return FAR_FUTURE_US - self.resolution.at_ms * 1000


def day_of(at_ms: int) -> int:
    """Days since the epoch of an instant."""
    return at_ms // DAY_MS


def is_raw_letter(letter_id: TaskId) -> bool:
    """Whether the id was derived by `raw_letter_id`."""
    return letter_id.version == _RAW_VERSION and letter_id.variant == uuid.RFC_4122


def raw_letter_id(source: str, key: bytes | None, value: bytes | None) -> TaskId:
    """The id of bytes that are no task: a UUIDv8 (RFC 9562 §5.8) of 122 bits of a SHA-256.

    Over where they came from, so that the same bytes at another place are another letter, and over themselves, since several
    events of one batch share their place. So bytes that are dead-lettered twice have one id.
    """
    digest = hashlib.sha256()
    for part in (source.encode(), key, value):
        # With lengths, so that no two inputs run together alike; -1: absent.
        digest.update((-1 if part is None else len(part)).to_bytes(8, "big", signed=True))
        digest.update(part or b"")
    bits = int.from_bytes(digest.digest()[:16], "big")
    bits = bits & ~(0xF << 76) | (_RAW_VERSION << 76)
    return uuid.UUID(int=bits & ~(0b11 << 62) | (0b10 << 62))
