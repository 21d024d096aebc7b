"""A schema registry in memory, with the three calls that Taskline makes."""

from __future__ import annotations

from typing import Any

from confluent_kafka.schema_registry import Schema
from confluent_kafka.schema_registry.error import SchemaRegistryError


class FakeRegistry:
    def __init__(self) -> None:
        self.schemas: dict[int, Any] = {}
        self.subjects: dict[str, list[int]] = {}
        self.calls: list[str] = []
        # Raised by every call while it is set.
        self.failure: Exception | None = None

    def put(self, subject: str, source: str, kind: str = "AVRO") -> int:
        for schema_id, known in self.schemas.items():
            if known.schema_str == source:
                return schema_id
        schema_id = len(self.schemas) + 1
        self.schemas[schema_id] = Schema(source, kind)
        self.subjects.setdefault(subject, []).append(schema_id)
        return schema_id

    def register_schema(self, subject_name: str, schema: Any) -> int:
        self._called(f"register {subject_name}")
        return self.put(subject_name, schema.schema_str)

    def get_schema(self, schema_id: int) -> Any:
        self._called(f"get {schema_id}")
        if schema_id not in self.schemas:
            raise SchemaRegistryError(404, 40403, "Schema not found")
        return self.schemas[schema_id]

    def get_subjects(self) -> list[str]:
        self._called("subjects")
        return list(self.subjects)

    def _called(self, call: str) -> None:
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure
