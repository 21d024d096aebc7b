"""Bytes on a topic ↔ records.

Two frames, told apart by the first byte: Avro single-object encoding (C3 01, the default, needs no service) and the
Confluent wire format (00, when a registry URL is set). A codec *writes* one of them and *reads* both, so a
system can move from one to the other with records in flight. Readers resolve the writer's schema to their own.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol, TypeVar

import fastavro
from fastavro.types import Schema

from taskline.errors import UndecodableRecord, UnknownSchema
from taskline.schemas import events
from taskline.schemas.contracts import Contract, contract, contracts
from taskline.schemas.encoding import compile_encoder
from taskline.schemas.events import RECORDS, ErrorCategory, LetterAction, Priority, Record
from taskline.schemas.ids import task_id_of

SINGLE_OBJECT_MAGIC = b"\xc3\x01"
CONFLUENT_MAGIC = 0
_SINGLE_OBJECT_FRAME_BYTES = 10
_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1

R = TypeVar("R", bound=Record)


class Frame(Protocol):
    """How a writer's schema is named in front of the Avro body."""

    def header(self, contract: Contract) -> bytes:
        """The bytes that precede a body written under `contract`."""
        ...

    def writer(self, data: bytes) -> tuple[str, Schema, int]:
        """The record name, the writer's schema, and where the body starts.

        Raises:
            UndecodableRecord: the frame is not whole.
            UnknownSchema: the frame names a schema that is not known here.
        """
        ...


class SingleObjectFrame:
    """Avro single-object encoding: C3 01, the schema's 8-byte fingerprint, the body."""

    def __init__(self) -> None:
        """Index every shipped contract by its fingerprint."""
        self._known = {
            version.fingerprint: (name, version.parsed)
            for name, versions in contracts().items()
            for version in versions
        }

    def header(self, contract: Contract) -> bytes:
        """The 10 bytes in front of a body."""
        return SINGLE_OBJECT_MAGIC + contract.fingerprint

    def writer(self, data: bytes) -> tuple[str, Schema, int]:
        """Look the fingerprint up among the shipped contracts."""
        known = self._known.get(data[2:_SINGLE_OBJECT_FRAME_BYTES])
        if known is None:
            if len(data) < _SINGLE_OBJECT_FRAME_BYTES:
                raise UndecodableRecord(f"{len(data)} bytes are too few for a record")
            raise UnknownSchema(data[2:_SINGLE_OBJECT_FRAME_BYTES].hex())
        return known[0], known[1], _SINGLE_OBJECT_FRAME_BYTES


class Codec:
    """Encodes records in one frame and decodes both."""

    def __init__(self, *, confluent: Frame | None = None) -> None:
        """Write the Confluent frame when one is given, else single objects."""
        self._single_object = SingleObjectFrame()
        self._confluent = confluent
        self._frame: Frame = confluent or self._single_object
        self._shapes = {shape.name: shape for shape in map(_Shape, RECORDS)}
        self._by_class = {shape.record: shape for shape in self._shapes.values()}
        self._headers: dict[str, bytes] = {}

    def prepare(self) -> None:
        """Find the frame of every record now, so that no later `encode` waits for a schema registry.

        Raises:
            Unavailable: the registry does not answer.
        """
        for shape in self._shapes.values():
            self._header(shape)

    def encode(self, record: Record) -> bytes:
        """The record's frame and body."""
        shape = self._by_class[type(record)]
        return self._header(shape) + shape.encode(record)

    def decode(self, data: bytes | None, expected: type[R]) -> R:
        """Read a record of the class `expected` (`LifecycleEvent` stands for any of its kinds).

        Raises:
            UndecodableRecord: not a record of that class; the message says why.
            UnknownSchema: a record under a schema that this version does not know.
        """
        name, schema, start = self._writer(data)
        shape = self._shapes[name]
        if not issubclass(shape.record, expected):
            raise UndecodableRecord(f"a {name} where a {expected.__name__} belongs")
        assert data is not None  # noqa: S101 - _writer refuses None
        buffer = io.BytesIO(data)
        buffer.seek(start)
        own = shape.contract.parsed
        try:
            values = fastavro.schemaless_reader(buffer, schema, None if schema is own else own)
            record = shape.from_avro(values)
        except Exception as error:
            # fastavro meets garbage with IndexError, EOFError, UnicodeDecodeError, MemoryError and more.
            raise UndecodableRecord(f"not a {name}: {type(error).__name__}: {error}"[:500]) from error
        if buffer.tell() != len(data):
            raise UndecodableRecord(f"{len(data) - buffer.tell()} bytes after the end of a {name}")
        return record  # type: ignore[return-value]  # issubclass above

    def kind_of(self, data: bytes) -> type[Record]:
        """The class of an encoded record, from its frame alone.

        Raises:
            UndecodableRecord, UnknownSchema: as `decode`.
        """
        return self._shapes[self._writer(data)[0]].record

    def _header(self, shape: _Shape) -> bytes:
        header = self._headers.get(shape.name)
        if header is None:
            header = self._headers[shape.name] = self._frame.header(shape.contract)
        return header

    def _writer(self, data: bytes | None) -> tuple[str, Schema, int]:
        if not data:
            raise UndecodableRecord("no bytes" if data is None else "zero bytes")
        if data[:2] == SINGLE_OBJECT_MAGIC:
            return self._single_object.writer(data)
        if data[0] == CONFLUENT_MAGIC:
            if self._confluent is None:
                raise UndecodableRecord(
                    "starts as the Confluent wire format does, and no schema registry URL is set"
                )
            return self._confluent.writer(data)
        raise UndecodableRecord(f"starts with {data[:2].hex()}, as no frame does")


class _Shape:
    """How one record class maps to the values that fastavro reads and writes."""

    def __init__(self, record: type[Record]) -> None:
        self.record = record
        self.name = record.__name__
        self.contract = contract(self.name)
        self.encode = compile_encoder(self.contract.parsed)
        names = {field.name for field in fields(record)}
        self._in = tuple((name, convert) for name, convert in _IN.items() if name in names)

    def from_avro(self, values: Any) -> Record:  # noqa: ANN401 - what fastavro returns
        for name, convert in self._in:
            values[name] = convert(values[name])
        return self.record(**values)


def _int_in(value: int) -> int:
    # fastavro reads any varint, and what it read could not be written again.
    if not _INT_MIN <= value <= _INT_MAX:
        raise ValueError(f"{value} is no 32-bit integer")
    return value


def _optional_int_in(value: int | None) -> int | None:
    return None if value is None else _int_in(value)


def _fraction_in(value: float | None) -> float | None:
    # Not a number is refused with the rest: it is equal to nothing, and states are compared.
    if value is not None and not 0 <= value <= 1:
        raise ValueError(f"{value} is no fraction from 0 to 1")
    return value


def _id_in(value: bytes | None) -> uuid.UUID | None:
    return None if value is None else task_id_of(value)


def _entries_in(entries: list[dict[str, Any]]) -> tuple[events.LifecycleEntry, ...]:
    return tuple(
        events.LifecycleEntry(
            task_id=task_id_of(entry["task_id"]),
            retain_until=entry["retain_until"],
            event=entry["event"],
        )
        for entry in entries
    )


def _errors_in(entries: list[dict[str, Any]]) -> tuple[events.AttemptError, ...]:
    return tuple(
        events.AttemptError(
            **entry
            | {"category": ErrorCategory.read(entry["category"]), "attempt": _int_in(entry["attempt"])}
        )
        for entry in entries
    )


def _leases_in(entries: list[dict[str, Any]]) -> tuple[events.LeaseRef, ...]:
    return tuple(
        events.LeaseRef(task_id=task_id_of(entry["task_id"]), execution=task_id_of(entry["execution"]))
        for entry in entries
    )


# Fields whose Python type is not Avro's, or is wider; a field's name means the same in every record.
_IN: dict[str, Callable[[Any], Any]] = {
    "attempt": _int_in,
    "max_retries": _int_in,
    "generation": _int_in,
    "source_partition": _optional_int_in,
    "fraction": _fraction_in,
    "task_id": _id_in,
    "root_id": _id_in,
    "replay_of": _id_in,
    "execution": _id_in,
    "request_id": _id_in,
    "letter_id": _id_in,
    "replayed_as": _id_in,
    "category": ErrorCategory.read,
    "action": LetterAction,
    "errors": _errors_in,
    "priority": {priority.value: priority for priority in Priority}.__getitem__,
    "events": _entries_in,
    "leases": _leases_in,
}
