"""Whether a reader's schema can read everything that was written under another.

The verdict is the `avro` package's, on the schemas' layouts. To it come rules for what it lets pass and Taskline must not: a logical
type (with precision and scale) may not change where the schemas meet, since the same bytes would mean something else; bytes do not
become a string, since not all bytes are one; and an alias may not make two written fields one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import avro.schema
from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType

from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.resolution import meetings


def problems_of(reader: PayloadSchema, writer: PayloadSchema) -> tuple[str, ...]:
    """Why `reader` can't read what `writer` wrote, in words; () when it can."""
    if reader == writer:
        return ()
    if not _compatible(reader.peer, writer.peer):
        return tuple(_explained(reader.peer, writer.peer)) or (
            f"it can't read the schema {writer.fingerprint.hex()}",
        )
    return tuple(dict.fromkeys(_changed_meanings(reader, writer)))


def _result(reader: avro.schema.Schema, writer: avro.schema.Schema) -> Any:  # noqa: ANN401 - untyped library
    return ReaderWriterCompatibilityChecker().get_compatibility(reader, writer)


def _compatible(reader: avro.schema.Schema, writer: avro.schema.Schema) -> bool:
    return bool(_result(reader, writer).compatibility is SchemaCompatibilityType.compatible)


def _explained(reader: avro.schema.Schema, writer: avro.schema.Schema, place: str = "") -> Iterator[str]:
    """One sentence for each field that is at fault."""
    if reader.type != "record" or writer.type != "record":
        reasons = _result(reader, writer).messages
        yield f"{f'field {place!r}: ' if place else ''}{', '.join(sorted(reasons))}"
        return
    if reader.name != writer.name and writer.fullname not in (reader.props.get("aliases") or ()):
        yield f"the record {writer.name!r} is now called {reader.name!r} (give the old name as an alias)"
    written = writer.fields_dict
    for field in reader.fields:
        names = [field.name, *(field.props.get("aliases") or ())]
        old = next((written[name] for name in names if name in written), None)
        path = f"{place}.{field.name}".lstrip(".")
        if old is None:
            if not field.has_default:
                yield f"field {path!r} is new and has no default"
        elif not _compatible(field.type, old.type):
            yield from _explained(field.type, old.type, path)


def _changed_meanings(reader: PayloadSchema, writer: PayloadSchema) -> Iterator[str]:
    for meeting in meetings(writer.document, reader.document):
        place = f"field {meeting.path!r}" if meeting.path else "the payload"
        for name in _contested(meeting.writer, meeting.reader):
            yield f"{place}: more than one written field would be read as {name!r}"
        if _kind(meeting.writer) == "bytes" and _kind(meeting.reader) == "string":
            yield f"{place}: not all bytes are a string"
        before, after = _meaning(meeting.writer), _meaning(meeting.reader)
        if before != after:
            yield f"{place}: meant {before or 'its plain value'}, now means {after or 'its plain value'}"


def _contested(writer: Any, reader: Any) -> Iterator[str]:  # noqa: ANN401
    """Fields of the reader that two of the writer's claim, one of them by an alias."""
    if not isinstance(writer, dict) or not isinstance(reader, dict):
        return
    written = {field["name"] for field in writer.get("fields", ())}
    for field in reader.get("fields", ()):
        if len(written & {field["name"], *field.get("aliases", ())}) > 1:
            yield field["name"]


def _kind(node: Any) -> Any:  # noqa: ANN401
    return node["type"] if isinstance(node, dict) else node


def _meaning(node: Any) -> str:  # noqa: ANN401
    if not isinstance(node, dict) or "logicalType" not in node:
        return ""
    if node["logicalType"] == "decimal":
        return f"decimal({node.get('precision')}, {node.get('scale', 0)})"
    return str(node["logicalType"])
