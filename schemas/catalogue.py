"""The catalogue: which task types there are, as the fold of their registrations in log order.

Invariant: whatever was accepted can be decoded by every later accepted version of its type. The order of the log decides; every
process folds the same records and comes to the same catalogue.

- The first registration of a name is accepted. A later one must read everything accepted before it under that name
  (backward transitive, `taskline.schemas.compatibility`), else it is refused and changes nothing.
- A schema that was accepted before and is not the newest is an old version of the code starting again: nothing changes, also not
  its defaults, so that a rolling deployment does not swing back and forth. (To return to an older shape, register it as a
  new schema, e.g. with another doc.) It still must be able to read what was accepted since; if it can't, it is refused, so that an old
  worker does not take tasks that it would dead-letter.
- With the newest schema, another queue, priority, timeout or number of retries is accepted, and the latest wins. Tasks that are queued
  already stay on the queue they were submitted to: keep a worker there until it is empty.
- A type does not change between any JSON and a schema: neither can promise to read the other's payloads. Give it a new name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from taskline.errors import IncompatibleSchema, InvalidTaskType, UnknownTaskType
from taskline.schemas.compatibility import problems_of
from taskline.schemas.events import TaskTypeRegistered
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType


class Outcome(StrEnum):
    """What became of a registration."""

    ACCEPTED = "accepted"
    UNCHANGED = "unchanged"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """What became of a registration, and why."""

    task_type: str
    outcome: Outcome
    # Of a refused one, in words.
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A name's state."""

    current: TaskType
    # Every accepted schema, oldest first; the last one is current's. Empty: any JSON.
    schemas: tuple[PayloadSchema, ...]


class TypeCatalogue:
    """The fold. One thread applies; any thread may read, since states are replaced and never changed."""

    def __init__(self, types: Iterable[TaskType] = ()) -> None:
        """Begin with these types, as if they were the log's first records.

        Raises:
            IncompatibleSchema: two of them contradict each other.
        """
        self._entries: Mapping[str, _Entry] = MappingProxyType({})
        self._writers: Mapping[bytes, PayloadSchema] = MappingProxyType({})
        for task_type in types:
            registration = self.register(task_type)
            if registration.outcome is Outcome.REFUSED:
                raise IncompatibleSchema(task_type.name, registration.problems)

    def apply(self, record: TaskTypeRegistered) -> Registration:
        """Fold the log's next record."""
        try:
            task_type = TaskType.of(record)
        except InvalidTaskType as error:
            return _refused(record.task_type, str(error))
        return self.register(task_type)

    def register(self, task_type: TaskType) -> Registration:
        """Fold a type as the log's next record would be."""
        registration = self.judge(task_type)
        if registration.outcome is Outcome.ACCEPTED:
            self._accept(task_type)
        return registration

    def judge(self, task_type: TaskType) -> Registration:
        """What would become of a registration now; nothing changes."""
        entry = self._entries.get(task_type.name)
        problems = self._collision(task_type.schema)
        if entry is None:
            return _refused(task_type.name, *problems) if problems else _accepted(task_type.name)
        if task_type == entry.current:
            return Registration(task_type=task_type.name, outcome=Outcome.UNCHANGED)
        if (task_type.schema is None) != (entry.current.schema is None):
            was, now = ("any JSON", "a schema") if entry.current.schema is None else ("a schema", "any JSON")
            return _refused(
                task_type.name, f"it was registered with {was} and can't change to {now}: use a new name"
            )
        if task_type.schema is not None:
            problems += tuple(
                problem for earlier in entry.schemas for problem in problems_of(task_type.schema, earlier)
            )
        if problems:
            return _refused(task_type.name, *dict.fromkeys(problems))
        if task_type.schema in entry.schemas[:-1]:
            return Registration(task_type=task_type.name, outcome=Outcome.UNCHANGED)
        return _accepted(task_type.name)

    def get(self, name: str) -> TaskType:
        """The latest accepted version of a type.

        Raises:
            UnknownTaskType: no such type; it names the nearest.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise UnknownTaskType(name, self._entries)
        return entry.current

    def names(self) -> tuple[str, ...]:
        """The names of all types, sorted."""
        return tuple(sorted(self._entries))

    def schemas(self, name: str) -> tuple[PayloadSchema, ...]:
        """Every accepted schema of a type, oldest first; () for one that takes any JSON.

        Raises:
            UnknownTaskType: no such type.
        """
        self.get(name)
        return self._entries[name].schemas

    def writer_schema(self, fingerprint: bytes) -> PayloadSchema | None:
        """The schema that lays out payloads with this fingerprint, None when none was accepted."""
        return self._writers.get(fingerprint)

    def copy(self) -> TypeCatalogue:
        """Another catalogue that stands where this one stands now."""
        twin = TypeCatalogue()
        twin._entries, twin._writers = self._entries, self._writers
        return twin

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def _collision(self, schema: PayloadSchema | None) -> tuple[str, ...]:
        """A fingerprint is 64 bits: by chance or malice, two layouts may share one."""
        other = None if schema is None else self._writers.get(schema.fingerprint)
        if schema is None or other is None or other.canonical == schema.canonical:
            return ()
        return (f"the fingerprint {schema.fingerprint.hex()} already belongs to another schema",)

    def _accept(self, task_type: TaskType) -> None:
        entry = self._entries.get(task_type.name)
        schemas = () if entry is None else entry.schemas
        if task_type.schema is not None and task_type.schema not in schemas:
            schemas = (*schemas, task_type.schema)
            self._writers = MappingProxyType(
                {task_type.schema.fingerprint: task_type.schema} | dict(self._writers)
            )
        self._entries = MappingProxyType(
            dict(self._entries) | {task_type.name: _Entry(current=task_type, schemas=schemas)}
        )


def _accepted(name: str) -> Registration:
    return Registration(task_type=name, outcome=Outcome.ACCEPTED)


def _refused(name: str, *problems: str) -> Registration:
    return Registration(task_type=name, outcome=Outcome.REFUSED, problems=problems)
