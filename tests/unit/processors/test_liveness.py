"""When a projector is given up for dead."""

from __future__ import annotations

from typing import Any

from taskline.processors.liveness import Liveness

LANE = ("tasks.lifecycle", 0)
OTHER = ("tasks.lifecycle", 1)
WELL = {LANE: (5, 5)}
WAITING = {LANE: (5, 9), OTHER: (3, 3)}


def look(
    liveness: Liveness, offsets: dict[tuple[str, int], tuple[int, int]] | None, now: float, **changes: Any
) -> str | None:
    values: dict[str, Any] = {"taken": {}, "excused": (), "busy": False} | changes
    return liveness.observe(offsets, now=now, **values)


def test_one_that_has_read_everything_lives() -> None:
    liveness = Liveness(60)
    assert [look(liveness, WELL, now) for now in (0, 100, 1_000)] == [None] * 3


def test_records_that_lie_unread_for_too_long_are_a_death() -> None:
    liveness = Liveness(60)
    assert look(liveness, WAITING, 0) is None
    assert look(liveness, WAITING, 60) is None
    cause = look(liveness, WAITING, 61)
    assert cause is not None
    assert "tasks.lifecycle/0" in cause
    assert "tasks.lifecycle/1" not in cause


def test_progress_is_life() -> None:
    liveness = Liveness(60)
    for now, taken in ((0, 5), (50, 6), (100, 7), (150, 8)):
        assert look(liveness, WAITING, now, taken={LANE: taken}) is None
    assert look(liveness, WAITING, 211, taken={LANE: 8}) is not None


def test_progress_by_commit_is_life_too() -> None:
    liveness = Liveness(60)
    look(liveness, WAITING, 0)
    assert look(liveness, {LANE: (7, 9)}, 61) is None


def test_what_is_taken_does_not_lie_unread() -> None:
    liveness = Liveness(60)
    for now in (0, 61, 122):
        assert look(liveness, WAITING, now, taken={LANE: 9}) is None


def test_a_broker_that_is_away_begins_the_wait_anew() -> None:
    liveness = Liveness(60)
    look(liveness, WAITING, 0)
    assert look(liveness, None, 30) is None
    assert look(liveness, WAITING, 61) is None
    assert look(liveness, WAITING, 122) is not None


def test_a_full_buffer_and_a_halted_lane_are_excuses() -> None:
    liveness = Liveness(60)
    for now in (0, 61, 122):
        assert look(liveness, WAITING, now, busy=True) is None
    for now in (200, 261, 322):
        assert look(liveness, WAITING, now, excused={LANE}) is None
