"""Reading under another schema than the writer's: the bytes are the writer's, their meaning is the reader's.

A fingerprint covers names and types, not logical types (Avro 1.12, "Parsing Canonical Form"), so what is found by it says how
the bytes are laid out and no more. The reader's logical types are put onto the writer's layout where the two schemas meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from taskline.schemas.defaults import Names, named_types
from taskline.schemas.logical import PLAIN, PROMOTIONS, logical_type_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """A place of the writer's schema and the place of the reader's that reads it."""

    # Field names, [] and {} from the outside in.
    path: str
    writer: Any
    reader: Any
    # Whether the reader's place is a branch of a union.
    branch: bool
    # Where the writer's place hangs, so that it can be replaced.
    holder: Any
    key: Any


def meetings(writer: Any, reader: Any) -> Iterator[Meeting]:  # noqa: ANN401 - parsed schemas
    """Every place where a writer's schema meets a reader's, by the rules of schema resolution."""
    root = {"": writer}
    walk = _Walk(named_types(writer), named_types(reader))
    yield from walk.meet("", root, "", reader)


def layout_of(schema: Any) -> Any:  # noqa: ANN401 - a schema, parsed or not
    """A schema without its logical types (and fastavro's marks): what decides the bytes."""
    if isinstance(schema, dict):
        return {
            key: value if key == "default" else layout_of(value)
            for key, value in schema.items()
            if key != "logicalType" and not key.startswith("__")
        }
    if isinstance(schema, list):
        return [layout_of(item) for item in schema]
    return schema


def read_as(writer_layout: Any, reader: Any) -> Any:  # noqa: ANN401 - parsed schemas
    """The writer's layout with the reader's logical types, as fastavro reads them."""
    root = {"": _without_defaults(writer_layout)}
    walk = _Walk(named_types(root[""]), named_types(reader))
    for meeting in list(walk.meet("", root, "", reader)):
        if _kind(meeting.writer) != _kind(meeting.reader):
            continue
        meaning = _meaning(meeting.reader, branch=meeting.branch)
        if isinstance(meeting.writer, dict):
            meeting.writer.update(meaning)
        else:
            meeting.holder[meeting.key] = {"type": meeting.writer, **meaning}
    return root[""]


def read_as_written(schema: Any) -> Any:  # noqa: ANN401 - a parsed schema
    """A schema with the names that fastavro reads its logical types by."""
    if isinstance(schema, dict):
        inner = {
            key: read_as_written(value)
            for key, value in schema.items()
            if key not in ("default", "logicalType")
        }
        logical = logical_type_of(schema)
        return inner if logical is None else inner | {"logicalType": logical.reader}
    if isinstance(schema, list):
        return [read_as_written(item) for item in schema]
    return schema


def _without_defaults(schema: Any) -> Any:  # noqa: ANN401
    """A copy of a writer's schema: its defaults decide nothing."""
    if isinstance(schema, dict):
        return {key: _without_defaults(value) for key, value in schema.items() if key != "default"}
    if isinstance(schema, list):
        return [_without_defaults(item) for item in schema]
    return schema


def _meaning(reader: Any, *, branch: bool) -> dict[str, Any]:  # noqa: ANN401
    """What a writer's place takes over from the reader's place of the same type."""
    logical = logical_type_of(reader)
    if logical is not None:
        return {key: reader[key] for key in ("precision", "scale") if key in reader} | {
            "logicalType": logical.reader
        }
    # fastavro takes a union's first branch that can read a value, and would promote 5 to 5.0 for [double, long].
    return {"logicalType": PLAIN} if branch and _kind(reader) in PROMOTIONS else {}


class _Walk:
    def __init__(self, writer_names: Names, reader_names: Names) -> None:
        self._writer_names = writer_names
        self._reader_names = reader_names
        self._met: set[tuple[str, str]] = set()

    def meet(self, path: str, holder: Any, key: Any, reader: Any) -> Iterator[Meeting]:  # noqa: ANN401
        writer = holder[key]
        if isinstance(writer, list):
            for index in range(len(writer)):
                yield from self.meet(path, writer, index, reader)
            return
        writer = self._writer_names.get(writer, writer) if isinstance(writer, str) else writer
        branch = isinstance(reader, list)
        reader = self._reading(writer, reader)
        if reader is None:
            return
        yield Meeting(path=path, writer=writer, reader=reader, branch=branch, holder=holder, key=key)
        if not isinstance(writer, dict) or not isinstance(reader, dict) or writer["type"] != reader["type"]:
            return
        kind = writer["type"]
        if kind == "array":
            yield from self.meet(f"{path}[]", writer, "items", reader["items"])
        elif kind == "map":
            yield from self.meet(f"{path}{{}}", writer, "values", reader["values"])
        elif "fields" in writer and (writer["name"], reader["name"]) not in self._met:
            self._met.add((writer["name"], reader["name"]))
            for field in writer["fields"]:
                found = _reader_field(field["name"], reader)
                if found is not None:
                    yield from self.meet(f"{path}.{field['name']}".lstrip("."), field, "type", found["type"])

    def _reading(self, writer: Any, reader: Any) -> Any:  # noqa: ANN401
        """What of the reader's place reads this writer's place: in a union the branch of its type, else the first that can."""
        nodes = [
            self._reader_names.get(branch, branch) if isinstance(branch, str) else branch
            for branch in (reader if isinstance(reader, list) else [reader])
        ]
        if not isinstance(reader, list):
            return nodes[0]
        exact = (node for node in nodes if _same_type(writer, node))
        promoting = (node for node in nodes if _kind(node) in PROMOTIONS.get(_kind(writer), ()))
        return next(exact, None) or next(promoting, None)


def _kind(node: Any) -> Any:  # noqa: ANN401
    return node["type"] if isinstance(node, dict) else node


def _same_type(writer: Any, reader: Any) -> bool:  # noqa: ANN401
    if _kind(writer) != _kind(reader):
        return False
    if not isinstance(writer, dict) or "name" not in writer:
        return True
    short = writer["name"].rpartition(".")[2]
    return bool(
        reader["name"].rpartition(".")[2] == short or {short, writer["name"]} & set(reader.get("aliases", ()))
    )


def _reader_field(name: str, reader: Any) -> Any:  # noqa: ANN401
    for field in reader["fields"]:
        if field["name"] == name or name in field.get("aliases", ()):
            return field
    return None
