"""Dead letters in Cassandra: three small tables, written and read by prepared statements (cql/0003_dead_letters.cql).

Invariant: as of `taskline.state.cassandra`. Nothing is deleted, null or conditional. A resolution writes all its cells at
once, absent ones as "" and as the nil id, so that of two resolutions one stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cassandra.query import UNSET_VALUE, PreparedStatement

from taskline.infra.log import Position
from taskline.schemas.events import LetterAction
from taskline.schemas.ids import TaskId
from taskline.state.letter_row import (
    Letter,
    LetterKey,
    LetterKind,
    LetterWrite,
    Resolution,
    ResolutionWrite,
)

_NO_ID = TaskId(int=0)
# Bytes of a statement besides its texts. For sizing batches only.
_OVERHEAD_BYTES = 300

_INSERT = """
INSERT INTO {keyspace}.dead_letters (
    tenant, day, at, letter_id, kind, task_type, queue, reason, category, error_class, message, attempt, generation, root_id,
    replay_of, source_topic, source_partition, source_offset, dlq_partition, dlq_offset, size_bytes
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP ? AND TTL ?
"""
_INSERT_DAY = (
    "INSERT INTO {keyspace}.dead_letter_days (day, tenant) VALUES (?, ?) USING TIMESTAMP ? AND TTL ?"
)
_INSERT_ID = "INSERT INTO {keyspace}.dead_letter_ids (letter_id, tenant, at) VALUES (?, ?, ?) USING TIMESTAMP ? AND TTL ?"
_RESOLVE = """
UPDATE {keyspace}.dead_letters USING TIMESTAMP ? AND TTL ?
SET action = ?, resolved_at = ?, resolved_by = ?, replayed_as = ?, note = ?
WHERE tenant = ? AND day = ? AND at = ? AND letter_id = ?
"""
# A page of a partition from a place on, both ways. The id decides between letters of one instant.
_SELECT = """
SELECT at, letter_id, kind, task_type, queue, reason, category, error_class, message, attempt, generation, root_id,
    replay_of, source_topic, source_partition, source_offset, dlq_partition, dlq_offset, size_bytes,
    action, resolved_at, resolved_by, replayed_as, note
FROM {keyspace}.dead_letters
"""
_NEWER_FIRST = f"""{_SELECT}
WHERE tenant = ? AND day = ? AND (at, letter_id) < (?, ?) AND (at) >= (?) LIMIT ?
"""
_OLDER_FIRST = f"""{_SELECT}
WHERE tenant = ? AND day = ? AND (at, letter_id) > (?, ?) AND (at) < (?) ORDER BY at ASC, letter_id ASC LIMIT ?
"""
_TENANTS = "SELECT tenant FROM {keyspace}.dead_letter_days WHERE day = ?"
_PLACES = "SELECT letter_id, tenant, at FROM {keyspace}.dead_letter_ids WHERE letter_id IN ?"

Bound = tuple[Any, Any, int]


class LetterTables:
    """The prepared statements and what they mean; sending them is the store's."""

    def __init__(self, prepare: Callable[[str], PreparedStatement]) -> None:
        """Prepare every statement; `prepare` fills in the keyspace."""
        self._insert = prepare(_INSERT)
        self._insert_day = prepare(_INSERT_DAY)
        self._insert_id = prepare(_INSERT_ID)
        self._resolve = prepare(_RESOLVE)
        self._newer_first = prepare(_NEWER_FIRST)
        self._older_first = prepare(_OLDER_FIRST)
        self._tenants = prepare(_TENANTS)
        # All in one page: a row is a name.
        self._tenants.fetch_size = None
        self._places = prepare(_PLACES)

    def bind(self, write: LetterWrite | ResolutionWrite) -> Iterator[Bound]:
        """The statements of one write: partition, bound statement, about how many bytes it sends."""
        if isinstance(write, ResolutionWrite):
            yield self._bound_resolution(write)
            return
        key, stamp, ttl = write.letter.key, write.timestamp_us, write.ttl_seconds
        # The place by id first: a row that can be listed can be found by its id.
        by_id = (key.letter_id, key.tenant, key.at_ms, write.first_timestamp_us, ttl)
        yield ("id", key.letter_id), self._insert_id.bind(by_id), _OVERHEAD_BYTES
        yield self._bound_letter(write)
        yield ("day", key.day), self._insert_day.bind((key.day, key.tenant, stamp, ttl)), _OVERHEAD_BYTES

    def _bound_letter(self, write: LetterWrite) -> Bound:
        letter, key = write.letter, write.letter.key
        source = letter.source
        values = (
            key.tenant,
            key.day,
            key.at_ms,
            key.letter_id,
            letter.kind.value,
            letter.task_type,
            _or_unset(letter.queue),
            letter.reason,
            letter.category,
            letter.error_class,
            letter.message,
            letter.attempt,
            letter.generation,
            _or_unset(letter.root_id),
            _or_unset(letter.replay_of),
            UNSET_VALUE if source is None else source.topic,
            UNSET_VALUE if source is None else source.partition,
            UNSET_VALUE if source is None else source.offset,
            letter.dlq_partition,
            letter.dlq_offset,
            letter.size_bytes,
            write.timestamp_us,
            write.ttl_seconds,
        )
        size = _OVERHEAD_BYTES + len(letter.message) + len(letter.error_class) + len(letter.task_type)
        return (key.tenant, key.day), self._insert.bind(values), size

    def _bound_resolution(self, write: ResolutionWrite) -> Bound:
        key, resolution = write.key, write.resolution
        values = (
            write.timestamp_us,
            write.ttl_seconds,
            resolution.action.value,
            resolution.at_ms,
            resolution.by,
            resolution.replayed_as or _NO_ID,
            resolution.note or "",
            key.tenant,
            key.day,
            key.at_ms,
            key.letter_id,
        )
        size = _OVERHEAD_BYTES + len(resolution.note or "")
        return (key.tenant, key.day), self._resolve.bind(values), size

    def select_tenants(self, day: int) -> Any:  # noqa: ANN401 - the driver is untyped
        """Who has letters on that day: one column."""
        return self._tenants.bind((day,))

    def select_places(self, letter_ids: Sequence[TaskId]) -> Any:  # noqa: ANN401
        """Where letters are; see `places_of`."""
        return self._places.bind((list(letter_ids),))

    def select_rows(  # noqa: D102 - as LetterStore.letter_rows, whose answer `letters_of` reads
        self,
        tenant: str,
        day: int,
        *,
        past: tuple[int, TaskId],
        until_ms: int,
        newest_first: bool,
        limit: int,
    ) -> Any:  # noqa: ANN401
        statement = self._newer_first if newest_first else self._older_first
        return statement.bind((tenant, day, *past, until_ms, limit))


def places_of(rows: Sequence[tuple[Any, ...]]) -> Mapping[TaskId, LetterKey]:
    """What `select_places` has found."""
    return {
        letter_id: LetterKey(letter_id=letter_id, tenant=tenant, at_ms=at)
        for letter_id, tenant, at in rows
        if tenant is not None and at is not None
    }


def letters_of(tenant: str, rows: Sequence[tuple[Any, ...]]) -> list[Letter | LetterKey]:
    """What `select_rows` has found, in order; a key alone is of a resolution that came before its letter."""
    return [_letter(tenant, row) for row in rows]


def _letter(tenant: str, row: tuple[Any, ...]) -> Letter | LetterKey:
    (
        at, letter_id, kind, task_type, queue, reason, category, error_class, message, attempt, generation, root_id,
        replay_of, source_topic, source_partition, source_offset, dlq_partition, dlq_offset, size_bytes,
        action, resolved_at, resolved_by, replayed_as, note,
    ) = row  # fmt: skip
    key = LetterKey(letter_id=letter_id, tenant=tenant, at_ms=at)
    if kind is None:
        return key
    resolution = None
    if action is not None:
        resolution = Resolution(
            action=LetterAction(action),
            at_ms=resolved_at,
            by=resolved_by,
            replayed_as=None if replayed_as == _NO_ID else replayed_as,
            note=note or None,
        )
    source = None
    if source_topic is not None:
        source = Position(topic=source_topic, partition=source_partition, offset=source_offset)
    return Letter(
        key=key,
        kind=LetterKind(kind),
        task_type=task_type,
        queue=queue,
        reason=reason,
        category=category,
        error_class=error_class,
        message=message,
        attempt=attempt,
        generation=generation,
        root_id=root_id,
        replay_of=replay_of,
        source=source,
        dlq_partition=dlq_partition,
        dlq_offset=dlq_offset,
        size_bytes=size_bytes,
        resolution=resolution,
    )


def _or_unset(value: Any) -> Any:  # noqa: ANN401
    return UNSET_VALUE if value is None else value
