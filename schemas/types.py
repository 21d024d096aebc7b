"""Task types: the name of a kind of work, the schema of its payload, and what its tasks get by default."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from taskline.errors import InvalidPayload, InvalidTaskType, UndecodablePayload
from taskline.schemas import json_values
from taskline.schemas.events import Priority, TaskTypeRegistered
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.refusal import Refused
from taskline.settings import QUEUE_NAME

TASK_TYPE_NAME = r"[a-zA-Z0-9._-]{1,200}"
_NAME = re.compile(TASK_TYPE_NAME, re.ASCII)
_QUEUE = re.compile(QUEUE_NAME, re.ASCII)
# An attempt is an Avro int in events; nobody retries a task that often.
MAX_RETRIES = 100
# A year: longer than any task is kept.
MAX_TIMEOUT_MS = 365 * 86_400_000

WriterSchemas = Callable[[bytes], PayloadSchema | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskType:
    """A kind of work.

    Raises:
        InvalidTaskType: a name, queue or default that can't be.
    """

    # Letters, digits, dot, underscore, hyphen; e.g. geo.nearest.
    name: str
    # The worker capability that runs it.
    queue: str = "default"
    # Of its payload; None: any JSON value.
    schema: PayloadSchema | None = None
    # Of tasks that ask for none.
    priority: Priority = Priority.NORMAL
    # How long one execution may take, in ms; None: the worker's default.
    timeout_ms: int | None = None
    # How many attempts may follow the first.
    max_retries: int = 3

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidTaskType(
                f"{self.name[:210]!r} can't name a task type: 1 to 200 letters, digits, dots, underscores, hyphens"
            )
        if not _QUEUE.fullmatch(self.queue):
            raise InvalidTaskType(f"task type {self.name!r}: {self.queue[:70]!r} can't name a queue")
        if not 0 <= self.max_retries <= MAX_RETRIES:
            raise InvalidTaskType(f"task type {self.name!r}: max_retries must be 0 to {MAX_RETRIES}")
        if self.timeout_ms is not None and not 0 < self.timeout_ms <= MAX_TIMEOUT_MS:
            raise InvalidTaskType(f"task type {self.name!r}: timeout_ms must be 1 to {MAX_TIMEOUT_MS}")

    def encode(self, payload: Any) -> tuple[bytes, bytes | None]:  # noqa: ANN401 - any payload
        """The payload's bytes, and the fingerprint of the schema they are written under (None: they are JSON).

        Raises:
            InvalidPayload: off the schema, or not JSON.
        """
        if self.schema is not None:
            return self.schema.encode(self.name, payload), self.schema.fingerprint
        try:
            return json_values.dumps(payload), None
        except Refused as refused:
            raise InvalidPayload(self.name, refused.pointer, refused.reason) from None

    def decode(self, payload: bytes, fingerprint: bytes | None, writer_schemas: WriterSchemas) -> Any:  # noqa: ANN401
        """The plain value of a queued payload, as this version of the type sees it.

        Args:
            payload: as queued.
            fingerprint: of the schema it was written under; None: it is JSON.
            writer_schemas: finds a schema by its fingerprint (a catalogue's or directory's `writer_schema`).

        Raises:
            UndecodablePayload: no attempt can read it.
        """
        if fingerprint is None or self.schema is None:
            return self._decode_json(payload, fingerprint)
        if fingerprint == self.schema.fingerprint:
            return self.schema.decode(payload, self.schema)
        writer = writer_schemas(fingerprint)
        if writer is None:
            raise UndecodablePayload(f"written under schema {fingerprint.hex()}, which nobody has registered")
        return self.schema.decode(payload, writer)

    def _decode_json(self, payload: bytes, fingerprint: bytes | None) -> Any:  # noqa: ANN401
        if fingerprint is not None or self.schema is not None:
            written = "JSON" if fingerprint is None else f"written under schema {fingerprint.hex()}"
            expected = "takes any JSON" if self.schema is None else "has a schema"
            raise UndecodablePayload(f"the payload is {written}, and task type {self.name!r} {expected}")
        try:
            return json_values.loads(payload)
        except ValueError as error:
            raise UndecodablePayload(f"the payload is not JSON: {error}") from error

    def record(self, now_ms: int) -> TaskTypeRegistered:
        """The record that registers the type."""
        return TaskTypeRegistered(
            task_type=self.name,
            queue=self.queue,
            schema=None if self.schema is None else self.schema.source,
            priority=self.priority,
            timeout_ms=self.timeout_ms,
            max_retries=self.max_retries,
            at=now_ms,
        )

    @classmethod
    def of(cls, record: TaskTypeRegistered) -> TaskType:
        """The type that a record registers.

        Raises:
            InvalidTaskType: it can't be one.
        """
        return cls(
            name=record.task_type,
            queue=record.queue,
            schema=None if record.schema is None else PayloadSchema.parse(record.schema),
            priority=record.priority,
            timeout_ms=record.timeout_ms,
            max_retries=record.max_retries,
        )
