"""Dead letters as `taskline dlq` prints them: lines of JSON for scripts, tables and pages for people. Pure."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any, Protocol

from pydantic_core import to_jsonable_python

from taskline.errors import UndecodablePayload, UnknownTaskType
from taskline.infra.log import InRecord
from taskline.schemas.events import DeadLetter, TaskSubmitted
from taskline.schemas.ids import from_ms
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType
from taskline.state.fold import TaskHistory
from taskline.state.letter_row import Letter, LetterKind

# Of bytes that nobody can read, what a person looks at.
_PREVIEW_BYTES = 512
_HEX_LINE_BYTES = 16
HEADINGS = ("id", "died", "tenant", "task type", "reason", "error", "attempt", "generation", "resolved")


class Types(Protocol):
    """A `TypeDirectory` or a `TypeCatalogue`."""

    def get(self, name: str) -> TaskType:
        """The task type of this name, or UnknownTaskType."""
        ...

    def writer_schema(self, fingerprint: bytes) -> PayloadSchema | None:
        """The schema with this fingerprint; None: nobody has registered it."""
        ...


def letter_document(letter: Letter) -> dict[str, Any]:
    """A letter in short, as JSON takes it."""
    source, resolution = letter.source, letter.resolution
    return {
        "letter_id": str(letter.letter_id),
        "kind": letter.kind.value,
        "tenant": letter.key.tenant,
        "at": instant(letter.at),
        "task_type": letter.task_type,
        "queue": letter.queue,
        "reason": letter.reason,
        "category": letter.category,
        "error_class": letter.error_class,
        "message": letter.message,
        "attempt": letter.attempt,
        "generation": letter.generation,
        "root_id": plain(letter.root_id),
        "replay_of": plain(letter.replay_of),
        "source": None if source is None else str(source),
        "dlq_partition": letter.dlq_partition,
        "dlq_offset": letter.dlq_offset,
        "size_bytes": letter.size_bytes,
        "resolution": None
        if resolution is None
        else {
            "action": resolution.action.value,
            "at": instant(resolution.at),
            "by": resolution.by,
            "replayed_as": plain(resolution.replayed_as),
            "note": resolution.note,
        },
    }


def table_row(letter: Letter) -> tuple[str, ...]:
    """A letter as a line of a table (HEADINGS)."""
    error = letter.message if letter.kind is LetterKind.RAW else f"{letter.error_class}: {letter.message}"
    resolution = letter.resolution
    return (
        str(letter.letter_id),
        instant(letter.at),
        letter.key.tenant or "-",
        letter.task_type or "(raw bytes)",
        letter.reason,
        " ".join(error.split())[:100],
        str(letter.attempt),
        str(letter.generation),
        "" if resolution is None else resolution.action.value,
    )


def task_document(
    letter: Letter,
    whole: DeadLetter,
    submission: TaskSubmitted,
    types: Types | None,
    told: TaskHistory | None,
) -> dict[str, Any]:
    """A dead task with its payload, all its errors, where it came from, and its attempts from the view."""
    payload, unread = _payload(submission, types)
    return letter_document(letter) | {
        # In full, where the view has shortened them.
        "message": whole.message,
        "traceback": whole.traceback,
        "worker": whole.worker,
        "errors": [plain(asdict(error)) | {"at": instant(from_ms(error.at))} for error in whole.errors],
        "priority": submission.priority.value,
        "max_retries": submission.max_retries,
        "affinity_key": submission.affinity_key,
        "payload": payload,
        "payload_unread": unread,
        "attempts": None
        if told is None
        else [
            {
                "attempt": attempt.attempt,
                "outcome": attempt.outcome.value,
                "worker": attempt.worker,
                "started_at": instant(attempt.started_at),
                "ended_at": None if attempt.ended_at is None else instant(attempt.ended_at),
                "error": None
                if attempt.error is None
                else f"{attempt.error.error_class}: {attempt.error.message}",
            }
            for attempt in told.attempts
        ],
        "replayed_as": None if told is None else plain(told.state.replayed_as),
    }


def raw_document(letter: Letter, record: InRecord) -> dict[str, Any]:
    """Bytes that could not be read."""
    return letter_document(letter) | {
        "cause": letter.message,
        "key": plain(record.key),
        "value": None if record.value is None else base64.b64encode(record.value).decode(),
        "headers": {name: plain(value) for name, value in record.headers.items()},
    }


def lines_of(document: Mapping[str, Any]) -> list[str]:
    """A document as lines for people: a name and a value each, lists and objects below their names."""
    lines = []
    for name, value in document.items():
        if value is None or value == "":
            continue
        if isinstance(value, dict | list):
            text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
            lines.append(f"{name}:")
            lines += [f"  {line}" for line in text.splitlines()]
        elif isinstance(value, str) and "\n" in value:
            lines.append(f"{name}:")
            lines += [f"  {line}" for line in value.splitlines()]
        else:
            lines.append(f"{name:14} {value}")
    return lines


def hex_lines(data: bytes | None) -> list[str]:
    """The beginning of some bytes as hex with their text beside it."""
    if data is None:
        return ["(null)"]
    shown = data[:_PREVIEW_BYTES]
    lines = []
    for start in range(0, len(shown), _HEX_LINE_BYTES):
        part = shown[start : start + _HEX_LINE_BYTES]
        text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in part)
        lines.append(f"{start:06x}  {part.hex(' '):47}  {text}")
    if len(data) > len(shown):
        lines.append(f"… {len(data) - len(shown)} more bytes")
    return lines or ["(zero bytes)"]


def instant(at: datetime) -> str:
    """ISO 8601 in UTC with milliseconds."""
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def plain(value: Any) -> Any:  # noqa: ANN401 - any value of a record
    """A value as JSON takes it; bytes in base64, as payloads take them."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    # Instants, durations, decimals: in the forms that payloads take them in.
    return to_jsonable_python(value, timedelta_mode="iso8601")


def _payload(submission: TaskSubmitted, types: Types | None) -> tuple[Any, str | None]:
    """The payload under the schema that it was written under, else its bytes in base64 and why it could not be read."""
    encoded = base64.b64encode(submission.payload).decode()
    if types is None:
        return encoded, "the task types could not be read"
    try:
        found = types.get(submission.task_type)
        return plain(
            found.decode(submission.payload, submission.payload_fingerprint, types.writer_schema)
        ), None
    except (UnknownTaskType, UndecodablePayload) as error:
        return encoded, str(error)
