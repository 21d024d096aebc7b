"""The log as the roles see it: records in, records out, acknowledgements. Kafka implements it, and so does `taskline.testing`."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

# Headers that route a dispatch record without decoding it (docs/reference: topics).
HEADER_TASK_ID = "taskline-task-id"  # 16 bytes, as in the record
HEADER_ATTEMPT = "taskline-attempt"  # ASCII decimal, from 1; absent: 1
# Headers of a record that waits, or waited, in the delay tiers.
HEADER_DUE = "taskline-due"  # ASCII decimal, ms since the epoch: not delivered earlier
HEADER_TARGET = "taskline-target"  # the dispatch topic that it goes to; gone when it is there
# Headers of another attempt.
HEADER_DEATHS = "taskline-deaths"  # ASCII decimal: how many processes it has killed that ran nothing else
HEADER_TRAIL = "taskline-trail"  # the errors of earlier attempts, bounded (taskline.workers.trail)
HEADER_UNFETCHED = (
    "taskline-unfetched"  # ASCII decimal: how often it was handed on since nobody fetched its type
)
# Headers that are added to bytes which go to the dead-letter topic verbatim.
HEADER_CAUSE = "taskline-cause"
HEADER_SOURCE = "taskline-source"  # topic/partition/offset

# A cause is for people; a decoder's message can quote a lot, and the bytes beside it say the rest.
_MAX_CAUSE_BYTES = 1_000

Headers = Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The place of a record in the log."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OutRecord:
    """A record to append."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Headers = field(default_factory=dict)
    # None: chosen by the key.
    partition: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InRecord:
    """A record that was read."""

    position: Position
    value: bytes | None
    key: bytes | None
    headers: Headers
    # Append time in ms since the epoch, by the broker's clock.
    timestamp_ms: int


def verbatim_dead_letter(
    dlq: str, *, value: bytes | None, key: bytes | None, headers: Headers, source: Position, cause: str
) -> OutRecord:
    """Bytes that nobody can read, for the dead-letter topic `dlq`: as they came, with the cause and the source in headers."""
    told = {
        HEADER_CAUSE: cause.encode("utf-8", "replace")[:_MAX_CAUSE_BYTES],
        HEADER_SOURCE: str(source).encode(),
    }
    return OutRecord(topic=dlq, value=value, key=key, headers={**headers, **told})


class AsyncLog(Protocol):
    """Appends for asyncio code."""

    def append(self, record: OutRecord) -> Future[Position]:
        """Hand a record over; the future resolves when the broker has acknowledged it (acks=all).

        The future raises:
            DeliveryFailed: certainly not in the log.
            DeliveryUnknown: may be in the log.
            QueueFull: the send buffer stayed full; not in the log.
        """
        ...
