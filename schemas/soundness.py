"""What a payload schema must be beyond Avro's own rules, and what must be known of it before garbage is read under it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from taskline.errors import InvalidTaskType
from taskline.schemas.defaults import Names, named_types, nodes_of


def require_sound(document: Any) -> None:  # noqa: ANN401 - JSON
    """Refuse what the libraries let pass and would trip over later.

    Raises:
        InvalidTaskType: with what is wrong.
    """
    names = named_types(document)
    for node in nodes_of(document):
        if not isinstance(node, dict):
            continue
        if node["type"] in ("record", "error"):
            _require_distinct_fields(node)
        if "items" in node and not _takes_bytes(node["items"], names, frozenset()):
            raise InvalidTaskType("an array of items that take no bytes could be of any length")
        if node.get("logicalType") == "decimal" and not isinstance(node.get("precision"), int):
            raise InvalidTaskType("a decimal has a precision")


def _require_distinct_fields(record: Mapping[str, Any]) -> None:
    names = [name for field in record["fields"] for name in (field["name"], *field.get("aliases", ()))]
    if len(names) > len(set(names)):
        raise InvalidTaskType(f"a field's alias in {record['name']} is another field's name or alias")


def _takes_bytes(node: Any, names: Names, inside: frozenset[str]) -> bool:  # noqa: ANN401
    node = names.get(node, node) if isinstance(node, str) else node
    if not isinstance(node, dict):
        return bool(node != "null")
    if "fields" in node:
        inner = inside | {node["name"]}
        return node["name"] in inside or any(
            _takes_bytes(field["type"], names, inner) for field in node["fields"]
        )
    return bool(node["type"] != "null" and node.get("size") != 0)


def is_recursive(document: Any) -> bool:  # noqa: ANN401 - JSON
    """Whether some record of the schema holds itself, at any remove."""
    names = named_types(document)

    def holds(node: Any, inside: frozenset[str]) -> bool:  # noqa: ANN401
        node = names.get(node, node) if isinstance(node, str) else node
        if isinstance(node, list):
            return any(holds(branch, inside) for branch in node)
        if not isinstance(node, dict):
            return False
        if "fields" in node:
            if node["name"] in inside:
                return True
            return any(holds(field["type"], inside | {node["name"]}) for field in node["fields"])
        return any(holds(node[key], inside) for key in ("items", "values") if key in node)

    return holds(document, frozenset())
