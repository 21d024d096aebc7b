"""Listing, finding and counting dead letters, on the view in memory; the integration tests ask Cassandra the same."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from letter_kit import NOW, letter, resolution, store, task_letter_id

from taskline.errors import InvalidCursor, InvalidOption, LetterNotFound
from taskline.settings import Settings
from taskline.state.dead_letters import (
    MAX_PARTITIONS_READ,
    MAX_ROWS_COUNTED,
    MAX_ROWS_READ,
    DeadLetters,
    LetterFilter,
    Order,
)
from taskline.state.letter_row import DAY_MS, Letter, LetterKey, LetterKind, is_raw_letter, raw_letter_id
from taskline.testing import MemoryView

T = TypeVar("T")


class Clock:
    def __init__(self, now_ms: int = NOW) -> None:
        self.ms = now_ms

    def now_ms(self) -> int:
        return self.ms


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def view_of(*letters: Letter) -> tuple[MemoryView, DeadLetters]:
    clock = Clock()
    view = MemoryView(clock)
    run(store(view, letters))
    return view, DeadLetters(view, Settings(), clock)


async def everything(letters: DeadLetters, wanted: LetterFilter, order: Order, limit: int) -> list[Letter]:
    found: list[Letter] = []
    cursor = None
    for _ in range(1_000):
        page = await letters.list(wanted, order=order, limit=limit, cursor=cursor)
        assert len(page.letters) <= limit
        found += page.letters
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError("the listing does not end")


def expected(letters: Sequence[Letter], wanted: LetterFilter, order: Order) -> list[Letter]:
    sign = -1 if order is Order.NEWEST_FIRST else 1
    return sorted(
        filter(wanted.matches, letters),
        key=lambda each: (
            sign * each.key.day,
            each.key.tenant,
            sign * each.key.at_ms,
            sign * each.letter_id.int,
        ),
    )


@st.composite
def populations(draw: st.DrawFn) -> list[Letter]:
    return [
        letter(
            number,
            tenant=draw(st.sampled_from(["", "acme", "zeta"])),
            # Many in one instant, and at the edges of days.
            at_ms=NOW
            - draw(st.integers(0, 3)) * DAY_MS
            - draw(st.sampled_from([0, 1, NOW % DAY_MS, NOW % DAY_MS + 1, 7_200_000])),
            task_type=draw(st.sampled_from(["a.b", "c.d"])),
            reason=draw(st.sampled_from(["exhausted", "poison"])),
            message=draw(st.sampled_from(["Boom at 7", "time-out", ""])),
            resolved=draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 25)))
    ]


FILTERS = st.builds(
    LetterFilter,
    tenant=st.sampled_from([None, "", "acme", "nobody-here"]),
    kind=st.sampled_from([None, LetterKind.TASK, LetterKind.RAW]),
    task_type=st.sampled_from([None, "a.b"]),
    reason=st.sampled_from([None, "poison"]),
    error=st.sampled_from([None, "boom", "E", "nothing"]),
    after_ms=st.sampled_from([None, NOW - DAY_MS, NOW - NOW % DAY_MS]),
    before_ms=st.sampled_from([None, NOW, NOW - DAY_MS]),
    resolved=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(populations(), FILTERS, st.sampled_from(Order), st.integers(1, 7))
def test_pages_put_together_are_the_letters_that_match_in_order(
    population: list[Letter], wanted: LetterFilter, order: Order, limit: int
) -> None:
    _, letters = view_of(*population)
    assert run(everything(letters, wanted, order, limit)) == expected(population, wanted, order)


def test_a_letter_that_dies_behind_the_cursor_is_not_shown_twice_nor_in_the_way() -> None:
    first, second = letter(1, at_ms=NOW - 2_000), letter(2, at_ms=NOW - 1_000)
    view, letters = view_of(first, second)
    page = run(letters.list(LetterFilter(), limit=1))
    run(store(view, [letter(3, at_ms=NOW)]))
    rest = run(letters.list(LetterFilter(), limit=5, cursor=page.cursor))
    assert (page.letters, rest.letters) == ((second,), (first,))


@pytest.mark.parametrize("order", list(Order))
def test_the_older_of_two_letters_of_one_task_is_the_letter(order: Order) -> None:
    older = letter(1, at_ms=NOW - DAY_MS)
    copy = replace(older, key=replace(older.key, at_ms=NOW), dlq_offset=99)
    view, letters = view_of(copy, older)
    for _ in range(2):
        assert run(everything(letters, LetterFilter(), order, 5)) == [older]
        assert run(letters.get(older.letter_id)) == older
        assert run(letters.stats()).open_letters == 1
        run(store(view, [older, copy]))
    # What is done about it leaves nothing open.
    run(view.apply([resolution(older, NOW)]))
    assert run(everything(letters, LetterFilter(), order, 5)) == []
    assert run(letters.stats()).open_letters == 0


def test_copies_do_not_use_up_a_page() -> None:
    older = [letter(number, at_ms=NOW - DAY_MS) for number in range(250)]
    copies = [replace(each, key=replace(each.key, at_ms=NOW)) for each in older]
    _, letters = view_of(*copies, *older)
    assert len(run(everything(letters, LetterFilter(), Order.NEWEST_FIRST, 3))) == 250


def test_a_resolution_may_come_before_its_letter() -> None:
    given_ = letter(1)
    view, letters = view_of()
    run(view.apply([resolution(given_, NOW)]))
    assert run(letters.list(LetterFilter(resolved=True))).letters == ()
    with pytest.raises(LetterNotFound):
        run(letters.get(given_.letter_id))
    run(store(view, [given_]))
    (found,) = run(letters.list(LetterFilter(resolved=True))).letters
    assert found.resolution == resolution(given_, NOW).resolution
    assert run(letters.list(LetterFilter())).letters == ()


def test_of_two_resolutions_the_older_one_stays_in_any_order() -> None:
    given_ = letter(1)
    one, two = resolution(given_, NOW), resolution(given_, NOW + 5, note="too late")
    for writes in itertools.permutations([one, two, one]):
        view, letters = view_of(given_)
        run(view.apply(list(writes)))
        assert run(letters.get(given_.letter_id)).resolution == one.resolution


def test_a_search_that_finds_nothing_is_bounded_and_says_how_far_it_came() -> None:
    count = MAX_ROWS_READ + 700
    population = [letter(number, at_ms=NOW - number, task_type="a.b") for number in range(count)]
    population.append(letter(count, at_ms=NOW - count, task_type="rare"))
    view, letters = view_of(*population)
    read = count_rows(view)
    wanted = LetterFilter(tenant="acme", task_type="rare")
    page = run(letters.list(wanted, limit=10))
    assert (page.letters, read[0]) == ((), MAX_ROWS_READ)
    assert page.cursor is not None
    assert page.searched_to_ms == NOW - MAX_ROWS_READ + 1
    assert run(letters.list(wanted, limit=10, cursor=page.cursor)).letters == (population[-1],)


def test_empty_tenants_bound_a_search_too() -> None:
    tenants = MAX_PARTITIONS_READ + 50
    _, letters = view_of(
        *(letter(number, tenant=f"t{number:04}", task_type="a.b") for number in range(tenants)),
        letter(tenants, tenant="zz", task_type="rare"),
    )
    page = run(letters.list(LetterFilter(task_type="rare")))
    assert page.letters == ()
    assert page.cursor is not None
    assert len(run(everything(letters, LetterFilter(task_type="rare"), Order.NEWEST_FIRST, 5))) == 1


def test_counts_are_bounded_and_say_so() -> None:
    view, letters = view_of(letter(1, at_ms=NOW - 5_000), letter(2, resolved=True), letter(3, tenant=""))
    stats = run(letters.stats())
    assert (stats.open_letters, stats.oldest_open_ms, stats.complete) == (2, NOW - 5_000, True)
    assert run(letters.stats(tenant="")).open_letters == 1
    assert run(letters.stats(tenant="other")).oldest_open_ms is None
    run(store(view, [letter(number, at_ms=NOW - number) for number in range(10, MAX_ROWS_COUNTED + 600)]))
    stats = run(letters.stats())
    assert not stats.complete
    assert MAX_ROWS_COUNTED - 500 <= stats.open_letters <= MAX_ROWS_COUNTED + 500


def test_letters_are_found_by_id_for_their_tenant_only() -> None:
    given_ = letter(1)
    _, letters = view_of(given_)
    assert run(letters.get(given_.letter_id, tenant="acme")) == given_
    for letter_id, tenant in ((given_.letter_id, "other"), (task_letter_id(9), None)):
        with pytest.raises(LetterNotFound) as missing:
            run(letters.get(letter_id, tenant=tenant))
        assert missing.value.letter_id == letter_id


def test_what_is_kept_no_longer_is_not_found() -> None:
    clock = Clock()
    view = MemoryView(clock)
    run(store(view, [letter(1)], ttl_seconds=10))
    letters = DeadLetters(view, Settings(), clock)
    clock.ms += 9_999
    assert len(run(letters.list(LetterFilter())).letters) == 1
    clock.ms += 1
    assert run(letters.list(LetterFilter())).letters == ()


@pytest.mark.parametrize("cursor", ["", "x", "!!!", "e30", "W10", "A" * 5_000, "bnVsbA"])
def test_a_cursor_that_no_listing_gave_is_refused(cursor: str) -> None:
    _, letters = view_of()
    with pytest.raises(InvalidCursor):
        run(letters.list(LetterFilter(), cursor=cursor))


def test_a_cursor_of_the_other_order_is_refused() -> None:
    _, letters = view_of(letter(1), letter(2))
    page = run(letters.list(LetterFilter(), limit=1))
    with pytest.raises(InvalidCursor):
        run(letters.list(LetterFilter(), order=Order.OLDEST_FIRST, cursor=page.cursor))


@pytest.mark.parametrize("limit", [0, -1, 501])
def test_a_page_has_a_size(limit: int) -> None:
    _, letters = view_of()
    with pytest.raises(InvalidOption):
        run(letters.list(LetterFilter(), limit=limit))


@given(
    st.text(max_size=30),
    st.none() | st.binary(max_size=20),
    st.none() | st.binary(max_size=20),
    st.text(max_size=30),
    st.none() | st.binary(max_size=20),
    st.none() | st.binary(max_size=20),
)
def test_raw_ids_differ_when_anything_does(
    source: str,
    key: bytes | None,
    value: bytes | None,
    source2: str,
    key2: bytes | None,
    value2: bytes | None,
) -> None:
    one, two = raw_letter_id(source, key, value), raw_letter_id(source2, key2, value2)
    assert is_raw_letter(one)
    assert (one == two) == ((source, key, value) == (source2, key2, value2))
    assert one.variant == uuid.RFC_4122


def test_a_key_knows_its_day() -> None:
    key = LetterKey(letter_id=task_letter_id(1), tenant="acme", at_ms=3 * DAY_MS - 1)
    assert (key.day, replace(key, at_ms=3 * DAY_MS).day) == (2, 3)


def count_rows(view: MemoryView) -> list[int]:
    """Counts the rows that the view gives from now on."""
    read, plain = [0], view.letter_rows

    async def counted(*args: Any, **options: Any) -> Any:
        rows = await plain(*args, **options)
        read[0] += len(rows)
        return rows

    view.letter_rows = counted  # type: ignore[method-assign]
    return read
