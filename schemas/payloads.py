"""Payload schemas: encoding a task's payload is its validation, and decoding resolves the writer's schema to the reader's.

A `PayloadSchema` takes plain values, dataclass and pydantic instances, and what JSON has for logical types and bytes; it gives plain
values back (dicts, with datetimes, UUIDs, decimals). What was accepted comes back equal, at the schema's precision.
"""

from __future__ import annotations

import copy
import io
import json
from functools import lru_cache
from typing import Any

import avro.schema
import fastavro
import fastavro.schema
from fastavro import _read_py

from taskline.errors import InvalidPayload, InvalidTaskType, UndecodablePayload
from taskline.schemas.conforming import compile_check
from taskline.schemas.contracts import fingerprint_of
from taskline.schemas.defaults import named_types, nodes_of, python_default
from taskline.schemas.refusal import Refused
from taskline.schemas.resolution import layout_of, read_as, read_as_written
from taskline.schemas.soundness import is_recursive, require_sound

# An error message of fastavro may quote what it read.
_REASON_CHARS = 300


class PayloadSchema:
    """One Avro schema of a payload; equal when the documents are."""

    __slots__ = (
        "_check",
        "_layout",
        "_readers",
        "_recursive",
        "canonical",
        "document",
        "fingerprint",
        "peer",
        "source",
    )

    # The schema as JSON, in a form that depends on its content alone.
    source: str
    # The schema with full names, as fastavro understands it.
    document: Any
    # Its layout as the `avro` package understands it, which checks what fastavro lets pass.
    peer: avro.schema.Schema
    # Avro's parsing canonical form: two schemas that share it lay bytes out alike.
    canonical: str
    # CRC-64-AVRO of it, 8 bytes little-endian.
    fingerprint: bytes

    def __init__(self, source: str, document: Any) -> None:  # noqa: ANN401 - JSON
        """Use `parse`."""
        self.source = source
        self.document = document
        layout = layout_of(document)
        self.peer = avro.schema.parse(json.dumps(layout))
        self._layout = fastavro.schema.parse_schema(layout, _force=True)
        self.canonical = fastavro.schema.to_parsing_canonical_form(self._layout)
        self.fingerprint = fingerprint_of(self._layout)
        self._check = compile_check(document)
        self._recursive = is_recursive(document)
        # By the writer's fingerprint: the writer's schema, the reader's (None when they are the same), and whether the reader's
        # has defaults that a handler could change.
        self._readers: dict[bytes, tuple[Any, Any, bool]] = {}

    @classmethod
    def parse(cls, source: str | dict[str, Any] | list[Any]) -> PayloadSchema:
        """Read an Avro schema, as text or as the JSON document.

        Raises:
            InvalidTaskType: not a schema, or one whose payloads can't be bounded.
        """
        try:
            given = json.loads(source) if isinstance(source, str) else source
            normal = json.dumps(
                given, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
            )
            return _parsed(normal)
        except InvalidTaskType:
            raise
        except Exception as error:
            # fastavro meets what is not a schema with its own errors, but also with KeyError, TypeError, RecursionError.
            reason = f"{type(error).__name__}: {error}"[:_REASON_CHARS]
            raise InvalidTaskType(f"not an Avro schema: {reason}") from error

    def encode(self, task_type: str, value: Any) -> bytes:  # noqa: ANN401 - any payload
        """Check a payload and encode it.

        Args:
            task_type: whose payload it is, for the error.
            value: a plain value, a dataclass instance or a pydantic model.

        Raises:
            InvalidPayload: the value is off the schema; `pointer` leads to the field.
        """
        buffer = io.BytesIO()
        try:
            fastavro.schemaless_writer(buffer, self._layout, self._check(value))
        except Refused as refused:
            raise InvalidPayload(task_type, refused.pointer, refused.reason) from None
        except RecursionError:
            raise InvalidPayload(task_type, "", "is nested too deeply") from None
        return buffer.getvalue()

    def decode(self, data: bytes, writer: PayloadSchema) -> Any:  # noqa: ANN401 - any payload
        """Read a payload that was written under `writer`, as this schema sees it.

        Raises:
            UndecodablePayload: the bytes are not of that schema, or this one can't read them.
        """
        try:
            layout, own, shared = self._readers.get(writer.fingerprint) or self._reader(writer)
            # A schema that holds itself can ask for any depth: fastavro's compiled reader would overrun the C stack.
            read = (
                _read_py.schemaless_reader
                if self._recursive or writer._recursive
                else fastavro.schemaless_reader
            )
            buffer = io.BytesIO(data)
            value = read(buffer, layout, own)
            rest = len(data) - buffer.tell()
            # fastavro hands out the schema's own defaults.
            value = copy.deepcopy(value) if shared else value
        except Exception as error:
            # Garbage shows as IndexError, EOFError, OverflowError, UnicodeDecodeError, MemoryError and more.
            reason = f"{type(error).__name__}: {error}"[:_REASON_CHARS]
            raise UndecodablePayload(f"the payload can't be read under its schema: {reason}") from error
        if rest:
            raise UndecodablePayload(f"{rest} bytes after the end of the payload")
        return value

    def _reader(self, writer: PayloadSchema) -> tuple[Any, Any, bool]:
        # Equal fingerprints: one layout, so there is nothing to resolve.
        same = writer.fingerprint == self.fingerprint
        layout = (
            read_as_written(self.document) if same else read_as(layout_of(writer.document), self.document)
        )
        own, shared = (None, False) if same else self._with_python_defaults()
        reader = self._readers[writer.fingerprint] = (
            fastavro.schema.parse_schema(layout, _force=True),
            own,
            shared,
        )
        return reader

    def _with_python_defaults(self) -> tuple[Any, bool]:
        """The schema as fastavro reads with it, and whether some default is a list or a dict."""
        shared = False
        names = named_types(self.document)
        parsed = fastavro.schema.parse_schema(copy.deepcopy(self.document), _force=True)
        for node in list(nodes_of(parsed)):
            for field in node.get("fields", ()) if isinstance(node, dict) else ():
                if "default" in field:
                    default = python_default(field["type"], field["default"], names)
                    field["default"] = default
                    shared = shared or isinstance(default, list | dict)
        return parsed, shared

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PayloadSchema) and other.source == self.source

    def __hash__(self) -> int:
        return hash(self.source)

    def __repr__(self) -> str:
        return f"PayloadSchema({self.source!r})"


@lru_cache(maxsize=256)
def _parsed(normal: str) -> PayloadSchema:
    """Cached, since every start of every role registers its types again."""
    parsed = fastavro.schema.parse_schema(json.loads(normal), _force=True)
    document = _without_marks(parsed)
    require_sound(document)
    return PayloadSchema(normal, document)


def _without_marks(schema: Any) -> Any:  # noqa: ANN401 - JSON
    """A parsed schema without the keys that fastavro keeps for itself."""
    if isinstance(schema, dict):
        return {key: _without_marks(value) for key, value in schema.items() if not key.startswith("__")}
    if isinstance(schema, list):
        return [_without_marks(item) for item in schema]
    return schema
