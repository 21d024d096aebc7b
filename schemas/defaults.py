"""The defaults of a schema's fields: from their JSON form to what Avro stores, and to what a reader gets.

In a schema, bytes stand as a string of the characters U+0000 to U+00FF, a union's default is one of its first branch, and logical types
stand as their underlying values (Avro 1.12, "Complex Types"). fastavro hands that JSON form to readers as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from taskline.schemas.logical import read_native

Names = Mapping[str, Mapping[str, Any]]


def named_types(schema: Any) -> dict[str, dict[str, Any]]:  # noqa: ANN401 - a parsed schema
    """Every record, enum and fixed type that a parsed schema defines, by full name."""
    return {node["name"]: node for node in nodes_of(schema) if isinstance(node, dict) and "name" in node}


def nodes_of(schema: Any) -> Iterator[Any]:  # noqa: ANN401 - a parsed schema
    """Every place of a schema, outside in."""
    yield schema
    if isinstance(schema, list):
        inner = schema
    elif isinstance(schema, dict):
        inner = [field["type"] for field in schema.get("fields", ())]
        inner += [schema[key] for key in ("items", "values") if key in schema]
    else:
        return
    for node in inner:
        yield from nodes_of(node)


def native_default(schema: Any, default: Any, names: Names) -> Any:  # noqa: ANN401 - JSON
    """A field's default as fastavro writes it (unions as (branch name, value))."""
    return _default(schema, default, names, lambda native, _: native, tagged=True)


def python_default(schema: Any, default: Any, names: Names) -> Any:  # noqa: ANN401 - JSON
    """A field's default as a reader gets it: with datetimes, UUIDs, bytes and so on."""
    return _default(schema, default, names, read_native, tagged=False)


def json_default(native: Any) -> Any:  # noqa: ANN401 - JSON
    """What stands in a schema for a native value.

    The inverse of `native_default` only for values whose unions hold their first branch; callers compare.
    """
    if isinstance(native, bytes):
        return native.decode("latin-1")
    if isinstance(native, tuple):
        return json_default(native[1])
    if isinstance(native, list):
        return [json_default(item) for item in native]
    if isinstance(native, dict):
        return {key: json_default(item) for key, item in native.items()}
    return native


def _default(
    schema: Any,  # noqa: ANN401
    default: Any,  # noqa: ANN401
    names: Names,
    leaf: Callable[[Any, Mapping[str, Any]], Any],
    *,
    tagged: bool,
) -> Any:  # noqa: ANN401
    def inner(schema: Any, default: Any) -> Any:  # noqa: ANN401
        return _default(schema, default, names, leaf, tagged=tagged)

    if isinstance(schema, list):
        # A union's default is one of its first type.
        first = schema[0]
        value = inner(first, default)
        if not tagged or first == "null":
            return value
        return (first.get("name", first["type"]) if isinstance(first, dict) else first), value
    return _default_of_type(schema, default, names, leaf, inner)


def _default_of_type(
    schema: Any,  # noqa: ANN401
    default: Any,  # noqa: ANN401
    names: Names,
    leaf: Callable[[Any, Mapping[str, Any]], Any],
    inner: Callable[[Any, Any], Any],
) -> Any:  # noqa: ANN401
    node = schema if isinstance(schema, dict) else names.get(schema, {"type": schema})
    kind = node["type"]
    if kind == "array":
        return [inner(node["items"], item) for item in default]
    if kind == "map":
        return {key: inner(node["values"], item) for key, item in default.items()}
    if kind in ("record", "error"):
        return {
            field["name"]: inner(field["type"], default.get(field["name"], field.get("default")))
            for field in node["fields"]
        }
    if kind in ("bytes", "fixed"):
        return leaf(default.encode("latin-1"), node)
    return leaf(float(default) if kind in ("float", "double") else default, node)
