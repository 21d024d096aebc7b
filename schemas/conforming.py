"""Strict checking of values against an Avro schema, and their translation into what fastavro writes.

A schema is compiled once into a tree of plain functions, each of which returns the value to write or raises `Refused`. fastavro
alone would take True for 1, "12" for bytes and {} for a record of defaults, and would choose union branches by guess;
what leaves here it can only write one way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from taskline.errors import InvalidTaskType
from taskline.schemas import scalars
from taskline.schemas.containers import ABSENT, array, mapping, record
from taskline.schemas.defaults import Names, named_types, native_default, python_default
from taskline.schemas.logical import LogicalType, logical_type_of
from taskline.schemas.scalars import Check
from taskline.schemas.unions import Node, Tried, choice, optional


def compile_check(parsed: Any, names: Names | None = None) -> Check:  # noqa: ANN401
    """The function that checks and translates the values of a schema.

    The function raises `Refused` with the path to the wrong place, or RecursionError.

    Args:
        parsed: a schema, or a part of one, with full names.
        names: the named types that the part refers to; None: all are in it.
    """
    compiler = _Compiler(named_types(parsed) if names is None else names)
    check = compiler.node(parsed).check
    if not compiler.chooses:
        return check
    tried = compiler.tried

    def check_afresh(value: Any) -> Any:  # noqa: ANN401
        try:
            return check(value)
        finally:
            tried.clear()

    return check_afresh


class _Compiler:
    """Compiles the places of one schema; each named type once."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._compiled: dict[str, Node] = {}
        self.tried = Tried()
        # Whether a union has a choice to make.
        self.chooses = False

    def node(self, schema: Any) -> Node:  # noqa: ANN401 - a place of a schema
        if isinstance(schema, list):
            return self._union([self.node(branch) for branch in schema])
        kind = schema["type"] if isinstance(schema, dict) else schema
        if kind in self._compiled:
            return self._compiled[kind]
        if isinstance(schema, str) and kind not in _PRIMITIVES:
            return self.node(self._names[kind])
        logical = logical_type_of(schema)
        if logical is not None:
            node = _logical(logical, schema)
        elif kind in _PRIMITIVES:
            return _PRIMITIVES[kind]
        elif kind == "array":
            node = _node(kind, "an array", array(self.node(schema["items"]).check), list, tuple)
        elif kind == "map":
            node = _node(kind, "an object", mapping(self.node(schema["values"]).check), dict)
        elif kind == "fixed":
            node = _node(schema["name"], f"{schema['size']} bytes", scalars.fixed(schema["size"]), bytes)
        elif kind == "enum":
            node = _node(schema["name"], "a symbol", scalars.enumeration(schema["symbols"]), str)
        else:
            node = self._record(schema)
        if isinstance(schema, dict) and "name" in schema:
            self._compiled[schema["name"]] = node
        return node

    def _record(self, schema: Mapping[str, Any]) -> Node:
        # Known before its fields are compiled, since they may refer to it; until then its check looks itself up.
        node = _node(schema["name"], "an object", lambda value: node.check(value), dict)  # noqa: PLW0108 - late
        self._compiled[schema["name"]] = node
        members = [(field, self.node(field["type"]).check) for field in schema["fields"]]
        node.check = record(
            (field["name"], check, self._default(schema["name"], field, check)) for field, check in members
        )
        return node

    def _default(self, where: str, field: Mapping[str, Any], check: Check) -> Any:  # noqa: ANN401
        if "default" not in field:
            return ABSENT
        try:
            native = native_default(field["type"], field["default"], self._names)
            # As a caller would hand it over.
            fits = check(python_default(field["type"], field["default"], self._names)) == native
        except Exception as error:
            raise InvalidTaskType(f"the default of {where}.{field['name']} does not fit its type") from error
        if not fits:
            raise InvalidTaskType(
                f"the default of {where}.{field['name']} does not fit its type (of a union: its first type)"
            )
        return native

    def _union(self, branches: list[Node]) -> Node:
        others = [branch for branch in branches if branch.branch != "null"]
        nullable = len(others) < len(branches)
        wanted = " or ".join([*(branch.wanted for branch in others), *(["null"] if nullable else [])])
        if nullable and len(others) == 1:
            return _node("", wanted, optional(others[0]))
        self.chooses = True
        return _node("", wanted, choice(others, nullable=nullable, wanted=wanted, tried=self.tried))


def _logical(logical: LogicalType, schema: Mapping[str, Any]) -> Node:
    to_avro = logical.to_avro
    return Node(
        wanted=f"a {schema['logicalType']}",
        branch=schema.get("name", schema["type"]),
        takes=(dict, list) if logical.takes is None else logical.takes,
        check=lambda value: to_avro(value, schema),
    )


def _node(branch: str, wanted: str, check: Check, *takes: type) -> Node:
    return Node(wanted=wanted, branch=branch, takes=takes, check=check)


_PRIMITIVES = {
    "null": _node("null", "null", scalars.check_null, type(None)),
    "boolean": _node("boolean", "a boolean", scalars.check_boolean, bool),
    "int": _node("int", "an integer", scalars.integer(32), int),
    "long": _node("long", "an integer", scalars.integer(64), int),
    # A Python float is a double: beside one, a 32-bit branch is the second choice.
    "float": _node("float", "a number", scalars.check_float),
    "double": _node("double", "a number", scalars.check_double, float),
    "bytes": _node("bytes", "bytes", scalars.check_bytes, bytes, bytearray, memoryview),
    "string": _node("string", "a string", scalars.check_string, str),
}
