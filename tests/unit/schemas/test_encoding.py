from __future__ import annotations

import io
import types
import uuid
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskline.schemas.contracts import Contract, contracts
from taskline.schemas.encoding import compile_encoder

CURRENT = [versions[0] for versions in contracts().values()]
ENCODERS = {contract.name: compile_encoder(contract.parsed) for contract in CURRENT}


def values(schema: Any, named: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What fastavro takes under a schema."""
    if isinstance(schema, list):
        return st.one_of(*(values(branch, named) for branch in schema))
    kind = schema["type"] if isinstance(schema, dict) else schema
    if kind in named:
        return values(named[kind], named)
    if isinstance(schema, dict) and "name" in schema:
        named[schema["name"]] = schema
    match kind:
        case "record":
            return st.fixed_dictionaries(
                {field["name"]: values(field["type"], named) for field in schema["fields"]}
            )
        case "array":
            return st.lists(values(schema["items"], named), max_size=5)
        case "fixed":
            return st.binary(min_size=schema["size"], max_size=schema["size"])
        case "enum":
            return st.sampled_from(schema["symbols"])
    return {
        "null": st.none(),
        "boolean": st.booleans(),
        "int": st.integers(-(2**31), 2**31 - 1),
        "long": st.integers(-(2**63), 2**63 - 1),
        "bytes": st.binary(max_size=200),
        "double": st.floats(),
        "string": st.text(max_size=100),
    }[kind]


def as_object(value: Any) -> Any:
    """The same value with attributes, and UUIDs where they may be."""
    if isinstance(value, dict):
        return types.SimpleNamespace(**{name: as_object(item) for name, item in value.items()})
    if isinstance(value, list):
        return [as_object(item) for item in value]
    return value


@pytest.mark.parametrize("contract", CURRENT, ids=lambda contract: contract.name)
def test_the_bytes_are_fastavros(contract: Contract) -> None:
    @given(value=values(contract.parsed, {}))
    def same(value: Any) -> None:
        expected = io.BytesIO()
        fastavro.schemaless_writer(expected, contract.parsed, value)
        assert ENCODERS[contract.name](as_object(value)) == expected.getvalue()

    same()


def test_a_uuid_is_sixteen_bytes() -> None:
    encode = compile_encoder({"type": "fixed", "name": "Id", "size": 16})
    value = uuid.uuid4()
    assert encode(value) == encode(value.bytes) == value.bytes


def test_a_missing_value_is_refused_where_none_may_be() -> None:
    fields = [{"name": "a", "type": "string"}, {"name": "b", "type": ["null", "string"]}]
    encode = compile_encoder({"type": "record", "name": "R", "fields": fields})
    assert encode(types.SimpleNamespace(a="x", b=None)) == b"\x02x\x00"
    with pytest.raises(TypeError):
        encode(types.SimpleNamespace(a=None, b=None))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ("int", 2**31),
        ("int", -(2**31) - 1),
        ("long", 2**63),
        ({"type": "fixed", "name": "F", "size": 2}, b"abc"),
        ({"type": "enum", "name": "E", "symbols": ["a"]}, "b"),
    ],
)
def test_what_does_not_fit_is_refused(schema: Any, value: Any) -> None:
    with pytest.raises((ValueError, KeyError)):
        compile_encoder(schema)(value)


@pytest.mark.parametrize("schema", ["float", ["string", "null"], ["null", "int", "string"], {"type": "map"}])
def test_what_no_contract_uses_is_not_supported(schema: Any) -> None:
    with pytest.raises(ValueError, match="no encoder"):
        compile_encoder(schema)
