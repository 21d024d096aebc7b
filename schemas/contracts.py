"""The Avro contracts in `avsc/`, loaded once: for each record its own schema and every earlier one that is still readable."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import fastavro.schema
from fastavro.types import Schema

NAMESPACE = "taskline"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """One version of one record's schema."""

    # The record's short name, as the class in `taskline.schemas.events` and the file in `avsc/`.
    name: str
    # The schema's JSON, as other tools read it (with docs and logical types).
    source: str
    # What fastavro encodes with: logical types are left out, since instants stay integers here.
    parsed: Schema
    # CRC-64-AVRO of the canonical form, little-endian, as single-object encoding frames it.
    fingerprint: bytes


def fingerprint_of(parsed: Schema) -> bytes:
    """CRC-64-AVRO of a schema's canonical form, 8 bytes little-endian (Avro 1.12, "Single-object encoding")."""
    canonical = fastavro.schema.to_parsing_canonical_form(parsed)
    digest: str = fastavro.schema.fingerprint(canonical, "CRC-64-AVRO")
    return bytes.fromhex(digest)


def _without_logical_types(node: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(node, dict):
        return {key: _without_logical_types(value) for key, value in node.items() if key != "logicalType"}
    if isinstance(node, list):
        return [_without_logical_types(item) for item in node]
    return node


def load_contract(source: str) -> Contract:
    """Parse one `.avsc` document."""
    document = json.loads(source)
    parsed = fastavro.schema.parse_schema(_without_logical_types(document), _force=True)
    return Contract(name=document["name"], source=source, parsed=parsed, fingerprint=fingerprint_of(parsed))


@cache
def contracts() -> dict[str, tuple[Contract, ...]]:
    """Every shipped contract by record name, the current version first."""
    found: dict[str, list[Contract]] = {}
    folder = files("taskline.schemas.avsc")
    # "Name.avsc" sorts after "Name.1.avsc": the current one is put first.
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".avsc"):
            contract = load_contract(entry.read_text(encoding="utf-8"))
            current = entry.name == f"{contract.name}.avsc"
            found.setdefault(contract.name, []).insert(
                0 if current else len(found.get(contract.name, [])), contract
            )
    return {name: tuple(versions) for name, versions in found.items()}


def contract(name: str) -> Contract:
    """The current contract of a record."""
    return contracts()[name][0]
