"""From a record on a dispatch topic to a handler and its argument, or to the reason why there is none. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from taskline.errors import Unavailable, UndecodablePayload, UndecodableRecord, UnknownTaskType
from taskline.infra.log import HEADER_ATTEMPT, HEADER_DEATHS, Headers, InRecord
from taskline.schemas.codec import Codec
from taskline.schemas.events import TaskSubmitted
from taskline.schemas.payloads import PayloadSchema
from taskline.workers.registry import Registry, Task

UNREGISTERED = "unregistered"
PAYLOAD_UNDECODABLE = "payload_undecodable"

# Decimal digits of a number that a header may have; int() of a longer one is somebody's attack.
_MAX_DIGITS = 9


class WriterSchemas(Protocol):
    """The payload schemas that submitters have used."""

    def writer_schema(self, fingerprint: bytes) -> PayloadSchema | None:
        """The schema with that fingerprint; None: not known here, or not yet."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """A task that can be run."""

    submission: TaskSubmitted
    attempt: int
    # How many processes earlier attempts have killed that ran nothing else.
    deaths: int = 0
    task: Task
    # The payload as plain values, which any process can be sent; `Task.instance` makes the handler's argument of it.
    value: Any
    # The handler's argument.
    payload: Any
    # Under which the task type's limits per key count it; None: under none.
    concurrency_key: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A task that can't be run by this registry: a dead letter."""

    submission: TaskSubmitted
    attempt: int
    reason: str
    error: Exception


@dataclass(frozen=True, kw_only=True, slots=True)
class Undecodable:
    """Bytes that are no task: they go to the dead-letter topic verbatim."""

    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NotYet:
    """A record that may be readable in a moment."""

    # What it is if it does not become readable; None: it is waited for without end.
    rejection: Rejected | None


Admission = Admitted | Rejected | Undecodable | NotYet


def admit(record: InRecord, registry: Registry, codec: Codec, types: WriterSchemas) -> Admission:
    """Decide what becomes of a dispatch record."""
    try:
        submission = codec.decode(record.value, TaskSubmitted)
        attempt = _number(record.headers, HEADER_ATTEMPT, least=1, otherwise=1)
        deaths = _number(record.headers, HEADER_DEATHS, least=0, otherwise=0)
    except UndecodableRecord as error:
        return Undecodable(cause=str(error))
    except Unavailable:
        # The schema registry: it says nothing about the record.
        return NotYet(rejection=None)
    task = registry.get(submission.task_type)
    if task is None:
        return Rejected(
            submission=submission,
            attempt=attempt,
            reason=UNREGISTERED,
            error=UnknownTaskType(submission.task_type, registry.names),
        )
    try:
        value = _value(submission, task, types)
        payload = task.instance(value)
        key = _key(task, payload)
    except Exception as error:
        # Decoders and users' own validators raise what they like; one bad payload must not stop the others.
        rejection = Rejected(submission=submission, attempt=attempt, reason=PAYLOAD_UNDECODABLE, error=error)
        return NotYet(rejection=rejection) if isinstance(error, _UnknownWriterError) else rejection
    return Admitted(
        submission=submission,
        attempt=attempt,
        deaths=deaths,
        task=task,
        value=value,
        payload=payload,
        concurrency_key=key,
    )


class _UnknownWriterError(UndecodablePayload):
    """The payload's schema is not in the type directory."""


def _value(submission: TaskSubmitted, task: Task, types: WriterSchemas) -> Any:  # noqa: ANN401 - a payload
    fingerprint, own = submission.payload_fingerprint, task.type.schema
    if (
        fingerprint is not None
        and own is not None
        and fingerprint != own.fingerprint
        and types.writer_schema(fingerprint) is None
    ):
        raise _UnknownWriterError(f"written under schema {fingerprint.hex()}, which nobody has registered")
    return task.type.decode(submission.payload, fingerprint, types.writer_schema)


def _key(task: Task, payload: Any) -> str | None:  # noqa: ANN401 - a payload
    if task.conduct.concurrency_key is None:
        return None
    key = task.conduct.concurrency_key(payload)
    if key is not None and not isinstance(key, str):
        raise TypeError(f"concurrency_key gave {key!r}, which is neither a string nor None")
    return key


def _number(headers: Headers, name: str, *, least: int, otherwise: int) -> int:
    header = headers.get(name)
    if header is None:
        return otherwise
    if len(header) > _MAX_DIGITS or not header.isdigit() or int(header) < least:
        raise UndecodableRecord(f"header {name} is not a number from {least}")
    return int(header)
