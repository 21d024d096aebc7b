"""Random Avro schemas, values of them, and evolutions, for property tests."""

from __future__ import annotations

import base64
import copy
import itertools
import math
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
_FINITE = st.floats(allow_nan=False, allow_infinity=False)


def _floor_ms(moment: datetime) -> datetime:
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


_AWARE = st.datetimes(timezones=st.just(UTC))
# (schema, values of it)
LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    ("null", st.none()),
    ("boolean", st.booleans()),
    ("int", st.integers(-(2**31), 2**31 - 1)),
    ("long", st.integers(-(2**63), 2**63 - 1)),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", _FINITE),
    ("bytes", st.binary(max_size=8)),
    ("string", _TEXT),
    ({"type": "int", "logicalType": "date"}, st.dates()),
    ({"type": "long", "logicalType": "time-micros"}, st.times()),
    ({"type": "long", "logicalType": "timestamp-micros"}, _AWARE),
    ({"type": "long", "logicalType": "timestamp-millis"}, _AWARE.map(_floor_ms)),
    ({"type": "long", "logicalType": "local-timestamp-micros"}, st.datetimes()),
    ({"type": "string", "logicalType": "uuid"}, st.uuids()),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2},
        st.decimals(-9999, 9999, places=2, allow_nan=False, allow_infinity=False),
    ),
]
_NAMES = [f"f{index}" for index in range(6)]


class _Names:
    """Names of types, each once in a schema."""

    def __init__(self) -> None:
        self._counter = itertools.count()

    def next(self, kind: str) -> str:
        return f"{kind}{next(self._counter)}"


@st.composite
def schemas(draw: st.DrawFn, *, unions: bool = True, depth: int = 2) -> Any:
    """A record schema."""
    return _record(draw, _Names(), depth, unions=unions)


def _record(draw: st.DrawFn, names: _Names, depth: int, *, unions: bool) -> dict[str, Any]:
    fields = []
    for field in draw(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=4, unique=True)):
        kind = _type(draw, names, depth, unions=unions)
        member = {"name": field, "type": kind}
        if draw(st.booleans()):
            default = _json_default(draw, kind)
            if default is not ...:
                member["default"] = default
        fields.append(member)
    return {"type": "record", "name": names.next("R"), "fields": fields}


def _type(draw: st.DrawFn, names: _Names, depth: int, *, unions: bool) -> Any:
    kinds = ["leaf", "leaf", "leaf", "enum", "fixed", "optional"]
    if depth:
        kinds += ["array", "map", "record"] + (["union"] if unions else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "leaf":
        return copy.deepcopy(draw(st.sampled_from(LEAVES))[0])
    if kind == "enum":
        symbols = draw(st.lists(st.sampled_from("ABCD"), min_size=1, unique=True))
        return {"type": "enum", "name": names.next("E"), "symbols": symbols}
    if kind == "fixed":
        return {"type": "fixed", "name": names.next("F"), "size": draw(st.integers(1, 4))}
    if kind == "array":
        return {"type": "array", "items": _bytes_taking(draw, names, depth, unions=unions)}
    if kind == "map":
        return {"type": "map", "values": _type(draw, names, depth - 1, unions=unions)}
    if kind == "record":
        return _record(draw, names, depth - 1, unions=unions)
    if kind == "optional":
        inner = _bytes_taking(draw, names, depth, unions=False)
        while isinstance(inner, list):
            inner = "string"
        return draw(st.permutations(["null", inner]))
    return _union(draw, names, depth)


def _bytes_taking(draw: st.DrawFn, names: _Names, depth: int, *, unions: bool) -> Any:
    inner = _type(draw, names, max(depth - 1, 0), unions=unions)
    return "string" if inner == "null" or _size_zero(inner) else inner


def _size_zero(schema: Any) -> bool:
    if isinstance(schema, dict) and schema["type"] == "record":
        return all(field["type"] == "null" or _size_zero(field["type"]) for field in schema["fields"])
    return False


def _union(draw: st.DrawFn, names: _Names, depth: int) -> list[Any]:
    branches: dict[str, Any] = {}
    for _ in range(draw(st.integers(2, 4))):
        branch = _type(draw, names, depth - 1, unions=False)
        if not isinstance(branch, list):
            key = branch if isinstance(branch, str) else branch.get("name", branch["type"])
            # {} and records with defaults fit several of these, so only one may be in.
            key = "object" if key == "map" or (isinstance(branch, dict) and "fields" in branch) else key
            branches.setdefault(key, branch)
    return list(branches.values()) if len(branches) > 1 else ["null", "string"]


def _json_default(draw: st.DrawFn, schema: Any) -> Any:
    """A default as it stands in a schema; `...` when this is not worth the trouble."""
    if isinstance(schema, list):
        return _json_default(draw, schema[0])
    kind = schema["type"] if isinstance(schema, dict) else schema
    simple: dict[str, Any] = {
        "null": None,
        "boolean": True,
        "int": 7,
        "long": 8,
        "float": 1.5,
        "double": 2,
        "bytes": "\u0001",
        "string": "ü",
        "array": [],
        "map": {},
    }
    if isinstance(schema, dict) and schema.get("logicalType") == "uuid":
        return str(uuid.UUID(int=7))
    if kind == "enum":
        return draw(st.sampled_from(schema["symbols"]))
    if kind == "fixed":
        return "\u00ff" * schema["size"]
    return simple.get(kind, ...)


@st.composite
def values_of(draw: st.DrawFn, schema: Any) -> Any:
    """A value, as a caller hands it over and a handler gets it."""
    if isinstance(schema, list):
        return draw(values_of(draw(st.sampled_from(schema))))
    for leaf, values in LEAVES:
        if leaf == schema:
            return draw(values)
    kind = schema["type"]
    if kind == "enum":
        return draw(st.sampled_from(schema["symbols"]))
    if kind == "fixed":
        return draw(st.binary(min_size=schema["size"], max_size=schema["size"]))
    if kind == "array":
        return draw(st.lists(values_of(schema["items"]), max_size=3))
    if kind == "map":
        return draw(st.dictionaries(_TEXT, values_of(schema["values"]), max_size=3))
    return {field["name"]: draw(values_of(field["type"])) for field in schema["fields"]}


def as_json(value: Any) -> Any:
    """The value as it comes over HTTP."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal | uuid.UUID):
        return str(value)
    if isinstance(value, timedelta):
        return f"PT{value.total_seconds()}S"
    return value


def same(left: Any, right: Any) -> bool:
    """Equality with NaN equal to itself, and kinds told apart (1, 1.0 and True are three things)."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return type(left) is type(right) and left == right


Step = Callable[[st.DrawFn, dict[str, Any], _Names], None]


def _add(draw: st.DrawFn, schema: dict[str, Any], names: _Names) -> None:
    taken = {name for field in schema["fields"] for name in (field["name"], *field.get("aliases", ()))}
    free = [name for name in _NAMES if name not in taken]
    if free:
        fields = _record(draw, names, 1, unions=True)["fields"]
        schema["fields"].append({**fields[0], "name": free[0]})


def _remove(draw: st.DrawFn, schema: dict[str, Any], names: _Names) -> None:
    if len(schema["fields"]) > 1:
        schema["fields"].pop(draw(st.integers(0, len(schema["fields"]) - 1)))


def _retype(draw: st.DrawFn, schema: dict[str, Any], names: _Names) -> None:
    field = draw(st.sampled_from(schema["fields"]))
    field.pop("default", None)
    field["type"] = _type(draw, names, 1, unions=True)


def _promote(draw: st.DrawFn, schema: dict[str, Any], names: _Names) -> None:
    wider = {"int": "long", "long": "double", "float": "double", "string": "bytes", "bytes": "string"}
    for field in schema["fields"]:
        if isinstance(field["type"], str) and field["type"] in wider and draw(st.booleans()):
            field.pop("default", None)
            field["type"] = wider[field["type"]]


def _relax(draw: st.DrawFn, schema: dict[str, Any], names: _Names) -> None:
    field = draw(st.sampled_from(schema["fields"]))
    if not isinstance(field["type"], list) and field["type"] != "null":
        field["default"] = None
        field["type"] = ["null", field["type"]]


def _reorder(draw: st.DrawFn, schema: dict[str, Any], names: _Names) -> None:
    schema["fields"] = draw(st.permutations(schema["fields"]))


def _rename(draw: st.DrawFn, schema: dict[str, Any], names: _Names) -> None:
    field = draw(st.sampled_from(schema["fields"]))
    old, new = field["name"], f"{field['name']}x"
    if new not in {other["name"] for other in schema["fields"]}:
        field["name"], field["aliases"] = new, [*field.get("aliases", ()), old]


def _deepen(draw: st.DrawFn, schema: dict[str, Any], names: _Names) -> None:
    """One step inside a nested record."""
    for field in schema["fields"]:
        kind = field["type"]
        inner = kind.get("items", kind.get("values", kind)) if isinstance(kind, dict) else kind
        if isinstance(inner, dict) and inner["type"] == "record":
            field.pop("default", None)
            draw(st.sampled_from([_add, _remove, _promote, _reorder]))(draw, inner, names)


def _remean(draw: st.DrawFn, schema: dict[str, Any], names: _Names) -> None:
    """Another logical type on the same bytes."""
    field = draw(st.sampled_from(schema["fields"]))
    kind = field["type"]
    if isinstance(kind, dict) and "logicalType" in kind:
        field.pop("default", None)
        field["type"] = kind["type"]


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Versions of one record schema, each an evolution of the one before; not all of them compatible."""
    versions = [draw(schemas())]
    names = _Names()
    # Clear of the names that the first version used.
    for _ in range(1_000):
        names.next("")
    steps: list[Step] = [_add, _remove, _retype, _promote, _relax, _reorder, _rename, _deepen, _remean]
    for _ in range(draw(st.integers(1, 3))):
        version = copy.deepcopy(versions[-1])
        for step in draw(st.lists(st.sampled_from(steps), min_size=1, max_size=2)):
            step(draw, version, names)
        versions.append(version)
    return versions
