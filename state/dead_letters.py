"""What people ask the view about dead letters: list them by filter, find one, count the open ones.

Invariant: every call does bounded work, whatever there is. A listing that could not look at everything gives a cursor that says
how far it came, also when it has found nothing yet; going on from it shows each letter once, except those that died after
the part where they belong was passed.

Order: by day, within a day by tenant, within those by the instant of death. So it is the order of deaths for one tenant, and
for all tenants it is so from day to day only.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import orjson

from taskline.errors import InvalidCursor, InvalidOption, LetterNotFound
from taskline.infra.role import Clock, SystemClock
from taskline.schemas.ids import MAX_CLOCK_AHEAD_MS, TaskId
from taskline.settings import Settings
from taskline.state.letter_row import DAY_MS, Letter, LetterKey, LetterKind, day_of

# Rows that one listing looks at, matching or not: some ms of a store's time.
MAX_ROWS_READ = 2_000
# Partitions (a tenant's day) that one listing looks at, and as many days: mostly empty ones cost a round trip each.
MAX_PARTITIONS_READ = 200
# Letters that one listing returns.
MAX_PAGE = 500
# Rows that one count looks at: enough to see that something is wrong, and a fraction of a second's work.
MAX_ROWS_COUNTED = 20_000
_PAGE_ROWS = 500
# What a query costs besides its rows, in rows.
_PARTITION_ROWS = 10
# Places that are looked up by one query.
_MAX_PLACES = 100
# Of a cursor: a tenant's longest name, and some figures.
_MAX_CURSOR_CHARS = 2_000
_FIRST_ID = TaskId(int=0)
_LAST_ID = TaskId(int=2**128 - 1)


class LetterStore(Protocol):
    """Where the view keeps dead letters; each call raises Unavailable when the store does not answer."""

    async def letter_tenants(self, day: int) -> Sequence[str]:
        """Whose letters died on that day, sorted."""
        ...

    async def letter_rows(
        self,
        tenant: str,
        day: int,
        *,
        past: tuple[int, TaskId],
        until_ms: int,
        newest_first: bool,
        limit: int,
    ) -> Sequence[Letter | LetterKey]:
        """The first rows of a tenant's day that lie strictly past a place (instant, id) in that order.

        Args:
            tenant: whose.
            day: days since the epoch.
            past: where to begin.
            until_ms: newest first: the oldest instant that is wanted; oldest first: the oldest that is not.
            newest_first: the order.
            limit: most rows.

        Returns:
            In that order; a key alone where only a resolution has come so far.
        """
        ...

    async def letter_places(self, letter_ids: Sequence[TaskId]) -> Mapping[TaskId, LetterKey]:
        """Where letters are, by id; those that are not known are left out."""
        ...


class Order(StrEnum):
    """In which order letters are listed."""

    NEWEST_FIRST = "newest"
    OLDEST_FIRST = "oldest"


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterFilter:
    """Which letters. None: whatever."""

    # Whose; "" is nobody's, which are raw bytes.
    tenant: str | None = None
    kind: LetterKind | None = None
    task_type: str | None = None
    reason: str | None = None
    # Part of the error's class or of its message, whatever the case.
    error: str | None = None
    # At or after, and before, these instants (ms since the epoch).
    after_ms: int | None = None
    before_ms: int | None = None
    # Those too that somebody has done something about.
    resolved: bool = False

    def matches(self, letter: Letter) -> bool:
        """Whether it is one of these."""
        return (
            (self.resolved or letter.resolution is None)
            and self.tenant in (None, letter.key.tenant)
            and self.kind in (None, letter.kind)
            and self.task_type in (None, letter.task_type)
            and self.reason in (None, letter.reason)
            and (self.after_ms is None or letter.key.at_ms >= self.after_ms)
            and (self.before_ms is None or letter.key.at_ms < self.before_ms)
            and (self.error is None or _contains(letter, self.error.casefold()))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterPage:
    """What one listing found."""

    letters: tuple[Letter, ...]
    # Where to go on; None: everything was looked at.
    cursor: str | None
    # The instant that the search has come to, in ms; None: it is over.
    searched_to_ms: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterStats:
    """How many letters wait for somebody."""

    open_letters: int
    # When the oldest open one died, in ms; None: there is none.
    oldest_open_ms: int | None
    # False: there are more than one count looks at; both figures are of those that were.
    complete: bool


@dataclass(frozen=True, slots=True)
class _Place:
    """How far a listing has come: everything before this is done."""

    day: int
    # None: the day has not been begun.
    tenant: str | None = None
    # None: the tenant's day has not been begun.
    row: tuple[int, TaskId] | None = None


class DeadLetters:
    """Answers questions about dead letters from a view's store."""

    def __init__(self, store: LetterStore, settings: Settings, clock: Clock | None = None) -> None:
        """Read `store`; the settings say how long letters are kept."""
        self._store = store
        self._retention_ms = round(settings.topics.dlq_retention_days * DAY_MS)
        self._clock = clock or SystemClock()

    async def list(
        self,
        wanted: LetterFilter,
        *,
        order: Order = Order.NEWEST_FIRST,
        limit: int = 50,
        cursor: str | None = None,
    ) -> LetterPage:
        """The next letters that the filter takes.

        Args:
            wanted: which.
            order: see the module.
            limit: most letters, 1 to MAX_PAGE.
            cursor: as an earlier call with the same filter and order gave it; None: from the beginning.

        Raises:
            InvalidOption: a limit that can't be.
            InvalidCursor: no listing gave that cursor, or one in the other order.
            Unavailable: the store does not answer.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise InvalidOption("limit", f"{limit} is not a number from 1 to {MAX_PAGE}")
        walk = _Walk(self._store, wanted, order, limit, days=self._days(wanted), cursor=cursor)
        await walk.run()
        return walk.page()

    async def get(self, letter_id: TaskId, *, tenant: str | None = None) -> Letter:
        """One letter.

        Args:
            letter_id: its id.
            tenant: whose it must be; None: anybody's.

        Raises:
            LetterNotFound: there is none, or it is another tenant's.
            Unavailable: the store does not answer.
        """
        key = (await self._store.letter_places([letter_id])).get(letter_id)
        if key is None or tenant not in (None, key.tenant):
            raise LetterNotFound(letter_id)
        rows = await self._store.letter_rows(
            key.tenant,
            key.day,
            past=(key.at_ms - 1, _LAST_ID),
            until_ms=key.at_ms + 1,
            newest_first=False,
            limit=_PAGE_ROWS,
        )
        for row in rows:
            if isinstance(row, Letter) and row.letter_id == letter_id:
                return row
        raise LetterNotFound(letter_id)

    async def stats(self, *, tenant: str | None = None) -> LetterStats:
        """The open letters and the oldest of them, by a bounded look from the oldest on.

        Raises:
            Unavailable: the store does not answer.
        """
        wanted = LetterFilter(tenant=tenant)
        first, last = self._days(wanted)
        tally = _Tally(wanted)
        for day in range(first, last + 1):
            for each in await self._tenants(tenant, day):
                past, more = (day * DAY_MS - 1, _LAST_ID), True
                while more:
                    rows = await self._store.letter_rows(
                        each,
                        day,
                        past=past,
                        until_ms=(day + 1) * DAY_MS,
                        newest_first=False,
                        limit=_PAGE_ROWS,
                    )
                    if not tally.take(rows):
                        return tally.stats(complete=False)
                    more = len(rows) == _PAGE_ROWS
                    past = _place_of(rows[-1]) if more else past
        return tally.stats(complete=True)

    async def _tenants(self, tenant: str | None, day: int) -> Sequence[str]:
        return await self._store.letter_tenants(day) if tenant is None else (tenant,)

    def _days(self, wanted: LetterFilter) -> tuple[int, int]:
        """The first and the last day on which such a letter can have died."""
        now_ms = self._clock.now_ms()
        oldest, newest = now_ms - self._retention_ms, now_ms + MAX_CLOCK_AHEAD_MS
        if wanted.after_ms is not None:
            oldest = max(oldest, wanted.after_ms)
        if wanted.before_ms is not None:
            newest = min(newest, wanted.before_ms)
        return day_of(oldest), day_of(newest)


class _Tally:
    """A count in progress. Rows come oldest first for each tenant, so a letter comes before its copies."""

    def __init__(self, wanted: LetterFilter) -> None:
        self._wanted = wanted
        self._seen: set[TaskId] = set()
        self._open = 0
        self._oldest_ms: int | None = None
        self._left = MAX_ROWS_COUNTED

    def take(self, rows: Sequence[Letter | LetterKey]) -> bool:
        """Count these; False: that was enough."""
        for row in rows:
            if not isinstance(row, Letter) or row.letter_id in self._seen:
                continue
            self._seen.add(row.letter_id)
            if self._wanted.matches(row):
                self._open += 1
                at_ms = row.key.at_ms
                self._oldest_ms = at_ms if self._oldest_ms is None else min(at_ms, self._oldest_ms)
        self._left -= len(rows) + _PARTITION_ROWS
        return self._left > 0

    def stats(self, *, complete: bool) -> LetterStats:
        return LetterStats(open_letters=self._open, oldest_open_ms=self._oldest_ms, complete=complete)


class _Walk:
    """One listing."""

    def __init__(
        self,
        store: LetterStore,
        wanted: LetterFilter,
        order: Order,
        limit: int,
        *,
        days: tuple[int, int],
        cursor: str | None,
    ) -> None:
        self._store = store
        first_day, last_day = days
        self._wanted = wanted
        self._order = order
        self._newest_first = order is Order.NEWEST_FIRST
        self._limit = limit
        self._last = first_day if self._newest_first else last_day
        start = _Place(last_day if self._newest_first else first_day)
        at = start if cursor is None else _from_cursor(cursor, order)
        # The first day may have gone by since the cursor was given.
        passed = at.day > start.day if self._newest_first else at.day < start.day
        self._at: _Place | None = start if passed else at
        self._found: list[Letter] = []
        self._rows_left = MAX_ROWS_READ
        self._partitions_left = MAX_PARTITIONS_READ

    async def run(self) -> None:
        while self._at is not None and self._within(self._at.day) and await self._day(self._at):
            step = -1 if self._newest_first else 1
            self._at = _Place(self._at.day + step)
        if self._at is not None and not self._within(self._at.day):
            self._at = None

    def page(self) -> LetterPage:
        letters, at = tuple(self._found), self._at
        if at is None:
            return LetterPage(letters=letters, cursor=None)
        edge = (at.day + 1 if self._newest_first else at.day) * DAY_MS
        searched = edge if at.row is None else at.row[0]
        return LetterPage(letters=letters, cursor=_to_cursor(at, self._order), searched_to_ms=searched)

    def _within(self, day: int) -> bool:
        return day >= self._last if self._newest_first else day <= self._last

    async def _day(self, begun: _Place) -> bool:
        """Go on with this day; False: no more may be read, or enough was found, and `_at` says how far it came."""
        self._partitions_left -= 1
        if self._wanted.tenant is None:
            tenants = await self._store.letter_tenants(begun.day)
        else:
            tenants = (self._wanted.tenant,)
        for tenant in tenants:
            if begun.tenant is not None and tenant < begun.tenant:
                continue
            row = begun.row if tenant == begun.tenant else None
            if not await self._partition(_Place(begun.day, tenant, row)):
                return False
        if self._partitions_left <= 0:
            self._at = _Place(begun.day + (-1 if self._newest_first else 1))
            return False
        return True

    async def _partition(self, place: _Place) -> bool:
        tenant, day = place.tenant or "", place.day
        start, until_ms = self._bounds(day)
        past = place.row or start
        self._at = place
        self._partitions_left -= 1
        if self._partitions_left < 0:
            return False
        while True:
            asked = min(_PAGE_ROWS, self._rows_left)
            rows = await self._store.letter_rows(
                tenant, day, past=past, until_ms=until_ms, newest_first=self._newest_first, limit=asked
            )
            letters = [row for row in rows if isinstance(row, Letter) and self._wanted.matches(row)]
            for letter in await self._taken(letters):
                self._at = _Place(day, tenant, _place_of(letter))
            if len(self._found) >= self._limit:
                return False
            self._rows_left -= len(rows)
            if len(rows) < asked:
                return True
            past = _place_of(rows[-1])
            self._at = _Place(day, tenant, past)
            if self._rows_left <= 0:
                return False

    def _bounds(self, day: int) -> tuple[tuple[int, TaskId], int]:
        """Where the wanted part of a day begins, and where it ends, in the order of the listing."""
        wanted = self._wanted
        after = max(day * DAY_MS, wanted.after_ms or 0)
        before = (day + 1) * DAY_MS
        if wanted.before_ms is not None:
            before = min(before, wanted.before_ms)
        return ((before, _FIRST_ID), after) if self._newest_first else ((after - 1, _LAST_ID), before)

    async def _taken(self, letters: Sequence[Letter]) -> Sequence[Letter]:
        """Take letters until there are enough, but none that is another one's copy; those that were taken."""
        before = len(self._found)
        for begin in range(0, len(letters), _MAX_PLACES):
            chunk = letters[begin : begin + _MAX_PLACES]
            places = await self._store.letter_places([letter.letter_id for letter in chunk])
            for letter in chunk:
                if places.get(letter.letter_id, letter.key) == letter.key:
                    self._found.append(letter)
                    if len(self._found) >= self._limit:
                        return self._found[before:]
        return self._found[before:]


def _contains(letter: Letter, part: str) -> bool:
    return part in letter.error_class.casefold() or part in letter.message.casefold()


def _place_of(row: Letter | LetterKey) -> tuple[int, TaskId]:
    key = row.key if isinstance(row, Letter) else row
    return key.at_ms, key.letter_id


def _to_cursor(place: _Place, order: Order) -> str:
    row = None if place.row is None else [place.row[0], place.row[1].hex]
    document = orjson.dumps([order.value, place.day, place.tenant, row])
    return base64.urlsafe_b64encode(document).rstrip(b"=").decode()


def _from_cursor(text: str, order: Order) -> _Place:
    """Raises InvalidOption for what `_to_cursor` has not made, or has made for the other order."""
    if len(text) > _MAX_CURSOR_CHARS:
        raise InvalidCursor("the cursor is none that a listing gave")
    try:
        place = _parsed(orjson.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))), order)
    except (ValueError, TypeError, LookupError, AttributeError, binascii.Error) as error:
        raise InvalidCursor("the cursor is none that a listing in this order gave") from error
    return place


def _parsed(document: Any, order: Order) -> _Place:  # noqa: ANN401 - JSON
    given, day, tenant, row = document
    if given != order or not isinstance(day, int) or not isinstance(tenant, str | None):
        raise ValueError("it is another listing's")
    if row is None:
        return _Place(day, tenant)
    at_ms = int(row[0])
    if day_of(at_ms) != day or tenant is None:
        raise ValueError("its parts contradict each other")
    return _Place(day, tenant, (at_ms, TaskId(hex=row[1])))
