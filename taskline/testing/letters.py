"""The view's dead letters in memory: the rows of `taskline.state.letter_row`, until their time is over."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from taskline.infra.role import Clock
from taskline.schemas.ids import TaskId
from taskline.state.letter_row import Letter, LetterKey, LetterWrite, ResolutionWrite


@dataclass(slots=True)
class _Row:
    letter: LetterWrite | None = None
    resolution: ResolutionWrite | None = None
    expires_at_ms: int = 0


class MemoryLetters:
    """What `MemoryView` keeps of dead letters; it says when the view is away."""

    def __init__(self, clock: Clock) -> None:
        """Forget by `clock`."""
        self._clock = clock
        # By tenant and day, as the real tables.
        self._rows: dict[tuple[str, int], dict[LetterKey, _Row]] = {}
        self._by_id: dict[TaskId, set[LetterKey]] = {}

    def apply(self, write: LetterWrite | ResolutionWrite) -> None:
        """Store one write."""
        key = write.letter.key if isinstance(write, LetterWrite) else write.key
        row = self._rows.setdefault((key.tenant, key.day), {}).setdefault(key, _Row())
        row.expires_at_ms = self._clock.now_ms() + write.ttl_seconds * 1000
        if isinstance(write, LetterWrite):
            row.letter = write
            self._by_id.setdefault(key.letter_id, set()).add(key)
        elif row.resolution is None or row.resolution.timestamp_us < write.timestamp_us:
            row.resolution = write

    def tenants(self, day: int) -> Sequence[str]:
        """As `LetterStore.letter_tenants`."""
        return sorted(
            tenant
            for (tenant, its_day), rows in self._rows.items()
            if its_day == day and any(map(self._is_kept, rows))
        )

    def rows(  # noqa: D102 - as LetterStore.letter_rows
        self,
        tenant: str,
        day: int,
        *,
        past: tuple[int, TaskId],
        until_ms: int,
        newest_first: bool,
        limit: int,
    ) -> Sequence[Letter | LetterKey]:
        now_ms = self._clock.now_ms()
        inside = (
            (key, row)
            for key, row in self._rows.get((tenant, day), {}).items()
            if row.expires_at_ms > now_ms and _is_inside(key, past, until_ms, newest_first=newest_first)
        )
        ordered = heapq.nlargest if newest_first else heapq.nsmallest
        chosen = ordered(limit, inside, key=lambda item: (item[0].at_ms, item[0].letter_id))
        return [_told(key, row) for key, row in chosen]

    def places(self, letter_ids: Sequence[TaskId]) -> Mapping[TaskId, LetterKey]:
        """As `LetterStore.letter_places`."""
        found = {}
        for letter_id in letter_ids:
            keys = list(filter(self._is_kept, self._by_id.get(letter_id, ())))
            if keys:
                found[letter_id] = min(keys, key=lambda key: key.at_ms)
        return found

    def _is_kept(self, key: LetterKey) -> bool:
        row = self._rows[key.tenant, key.day][key]
        return row.letter is not None and row.expires_at_ms > self._clock.now_ms()


def _is_inside(key: LetterKey, past: tuple[int, TaskId], until_ms: int, *, newest_first: bool) -> bool:
    place = (key.at_ms, key.letter_id)
    return place < past and key.at_ms >= until_ms if newest_first else place > past and key.at_ms < until_ms


def _told(key: LetterKey, row: _Row) -> Letter | LetterKey:
    if row.letter is None:
        return key
    return replace(row.letter.letter, resolution=row.resolution.resolution if row.resolution else None)
