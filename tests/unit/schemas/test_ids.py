"""Ids carry the time, the lane and the bucket; nothing but an id is taken for one."""

from __future__ import annotations

import copy
import pickle
import uuid
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskline.errors import InvalidTaskId
from taskline.schemas.ids import (
    MAX_CLOCK_AHEAD_MS,
    bucket_of,
    created_at_ms,
    from_ms,
    lane_of,
    new_task_id,
    parse_task_id,
    task_id_of,
    to_ms,
)

NOW = 1_780_000_000_000
INSTANTS = st.integers(0, 2**48 - 1)
# The years that Python has.
DATES = st.datetimes(timezones=st.just(UTC))


@given(INSTANTS)
def test_an_id_carries_its_time(now_ms: int) -> None:
    task_id = new_task_id(now_ms)
    assert created_at_ms(task_id) == now_ms
    assert (task_id.version, task_id.variant) == (7, uuid.RFC_4122)
    assert bucket_of(task_id, 600_000) == now_ms // 600_000


def test_ids_of_one_instant_differ_and_spread_over_lanes() -> None:
    minted = [new_task_id(NOW) for _ in range(6_000)]
    assert len(set(minted)) == len(minted)
    counts = [sum(lane_of(task_id, 6) == lane for task_id in minted) for lane in range(6)]
    # 1,000 expected in each; six standard deviations.
    assert all(820 < count < 1_180 for count in counts)


def test_later_ids_sort_later() -> None:
    assert new_task_id(NOW) < new_task_id(NOW + 1)


@given(st.binary(min_size=16, max_size=16))
def test_ids_from_bytes_are_uuids_like_any_other(data: bytes) -> None:
    fast, usual = task_id_of(data), uuid.UUID(bytes=data)
    assert fast == usual
    assert hash(fast) == hash(usual)
    assert (str(fast), repr(fast), fast.bytes, fast.is_safe) == (str(usual), repr(usual), data, usual.is_safe)
    assert pickle.loads(pickle.dumps(fast)) == copy.deepcopy(fast) == usual


@pytest.mark.parametrize("size", [0, 15, 17])
def test_other_bytes_are_no_id(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes"):
        task_id_of(b"x" * size)


def test_ids_are_parsed_in_their_usual_form_only() -> None:
    task_id = new_task_id(NOW)
    assert parse_task_id(str(task_id), NOW) == task_id
    assert parse_task_id(str(task_id).upper(), NOW) == task_id
    for text in (
        "",
        "x",
        "0" * 1_000_000,
        task_id.hex,
        f"{{{task_id}}}",
        task_id.urn,
        f" {task_id}",
        str(uuid.UUID(int=task_id.int ^ (1 << 76))),
        str(uuid.uuid4()),
        str(uuid.UUID(int=0)),
    ):
        with pytest.raises(InvalidTaskId):
            parse_task_id(text, NOW)


def test_ids_from_the_future_are_refused() -> None:
    assert parse_task_id(str(new_task_id(NOW + MAX_CLOCK_AHEAD_MS)), NOW)
    with pytest.raises(InvalidTaskId, match="future"):
        parse_task_id(str(new_task_id(NOW + MAX_CLOCK_AHEAD_MS + 1)), NOW)


@given(DATES)
def test_instants_are_exact_to_the_millisecond(instant: datetime) -> None:
    whole = instant.replace(microsecond=instant.microsecond // 1000 * 1000)
    assert from_ms(to_ms(whole)) == whole
    assert to_ms(whole.replace(tzinfo=UTC)) == to_ms(whole)


def test_instants_have_a_zone() -> None:
    assert to_ms(datetime(1970, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))) == 0
    with pytest.raises(ValueError, match="timezone"):
        to_ms(datetime(1970, 1, 1))  # noqa: DTZ001
