"""Dead letters by the handful."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from view_kit import CODEC, task_id_of

from taskline.infra.log import HEADER_TASK_ID, InRecord, Position
from taskline.schemas.events import (
    DeadLetter,
    DeadLetterResolved,
    ErrorCategory,
    LetterAction,
    TaskSubmitted,
)
from taskline.schemas.ids import TaskId
from taskline.state.letter_row import (
    NOBODY,
    Letter,
    LetterKey,
    LetterKind,
    LetterWrite,
    Resolution,
    ResolutionWrite,
    raw_letter_id,
)
from taskline.state.store import Write

NOW = 1_800_000_123_456
DLQ = "tasks.dlq"
TTL_SECONDS = 86_400


def task_letter_id(number: int) -> TaskId:
    return task_id_of(NOW - 1_000_000, number)


def letter(
    number: int, *, tenant: str = "acme", at_ms: int = NOW - 1_000, resolved: bool = False, **changes: Any
) -> Letter:
    """A row of the view; nobody's is raw."""
    raw = tenant == NOBODY
    letter_id = raw_letter_id(f"tasks.low/0/{number}", None, b"x") if raw else task_letter_id(number)
    values: dict[str, Any] = {
        "kind": LetterKind.RAW if raw else LetterKind.TASK,
        "task_type": "a.b",
        "queue": "default",
        "reason": "exhausted",
        "category": "unknown",
        "error_class": "builtins.ValueError",
        "message": "boom",
        "attempt": 4,
        "root_id": letter_id,
        "source": Position(topic="tasks.low", partition=0, offset=number),
        "dlq_partition": 0,
        "dlq_offset": number,
        "size_bytes": 300,
    }
    if raw:
        values |= {"queue": None, "root_id": None}
    made = Letter(key=LetterKey(letter_id=letter_id, tenant=tenant, at_ms=at_ms), **(values | changes))
    return replace(made, resolution=resolution(made, NOW).resolution) if resolved else made


def resolution(of: Letter, at_ms: int, *, note: str | None = None) -> ResolutionWrite:
    """Discarded when there is a note, else replayed."""
    action = LetterAction.REPLAYED if note is None else LetterAction.DISCARDED
    replayed_as = uuid.UUID(int=5) if note is None else None
    return ResolutionWrite(
        key=of.key,
        resolution=Resolution(action=action, at_ms=at_ms, by="ada@host", replayed_as=replayed_as, note=note),
        ttl_seconds=TTL_SECONDS,
    )


async def store(view: Any, letters: Iterable[Letter], *, ttl_seconds: int = TTL_SECONDS) -> None:
    writes: list[Write] = []
    for each in letters:
        writes.append(LetterWrite(letter=replace(each, resolution=None), ttl_seconds=ttl_seconds))
        if each.resolution is not None:
            writes.append(ResolutionWrite(key=each.key, resolution=each.resolution, ttl_seconds=ttl_seconds))
    await view.apply(writes)


def dead_letter(task: TaskSubmitted, at_ms: int, **changes: Any) -> DeadLetter:
    values: dict[str, Any] = {
        "task_id": task.task_id,
        "tenant": task.tenant,
        "task_type": task.task_type,
        "reason": "exhausted",
        "attempt": 4,
        "error_class": "builtins.ValueError",
        "message": "boom",
        "worker": "w1",
        "at": at_ms,
        "category": ErrorCategory.UNKNOWN,
        "source_topic": "tasks.normal",
        "source_partition": 2,
        "source_offset": 40,
        "submission": CODEC.encode(task),
    }
    return DeadLetter(**(values | changes))


def resolved(of: DeadLetter, at_ms: int, **changes: Any) -> DeadLetterResolved:
    values: dict[str, Any] = {
        "letter_id": of.task_id,
        "tenant": of.tenant,
        "letter_at": of.at,
        "action": LetterAction.DISCARDED,
        "at": at_ms,
        "by": "ada@host",
        "note": "never mind",
    }
    return DeadLetterResolved(**(values | changes))


def on_dlq(
    record: DeadLetter | DeadLetterResolved | bytes | None,
    *,
    offset: int = 7,
    partition: int = 1,
    now_ms: int = NOW,
    key: bytes | None = None,
    headers: dict[str, bytes] | None = None,
) -> InRecord:
    """A record of the dead-letter topic, as its writers put it there."""
    if isinstance(record, DeadLetter | DeadLetterResolved):
        key = (record.task_id if isinstance(record, DeadLetter) else record.letter_id).bytes
        value: bytes | None = CODEC.encode(record)
        headers = {HEADER_TASK_ID: key} | (headers or {})
    else:
        value = record
    return InRecord(
        position=Position(topic=DLQ, partition=partition, offset=offset),
        value=value,
        key=key,
        headers=headers or {},
        timestamp_ms=now_ms,
    )
