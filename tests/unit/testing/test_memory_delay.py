"""The delay role of the kit: what waits is waited for, and comes when it is due."""

from __future__ import annotations

import pytest

from taskline.infra.log import HEADER_DUE, HEADER_TARGET
from taskline.schemas.events import Priority
from taskline.testing import InMemoryTaskline, NeverIdle
from taskline.workers import Registry

registry = Registry()


@registry.task("test.nothing")
def nothing(payload: object) -> None: ...


def postpone(tl: InMemoryTaskline, seconds: float) -> int:
    """A copy of a submission's record that is due later; its due time in ms."""
    target = tl.topics.dispatch("default", Priority.NORMAL)
    record = tl.records(target)[0]
    due = tl.clock.now_ms() + round(seconds * 1_000)
    tl.inject(
        tl.topics.scheduled,
        record.value,
        key=record.key,
        headers={**record.headers, HEADER_DUE: b"%d" % due, HEADER_TARGET: target.encode()},
    )
    return due


def arrivals(tl: InMemoryTaskline) -> list[int]:
    records = tl.records(tl.topics.dispatch("default", Priority.NORMAL))
    return [record.timestamp_ms for record in records if HEADER_DUE in record.headers]


def test_idle_is_when_nothing_waits_any_more() -> None:
    with InMemoryTaskline(registry) as tl:
        tl.submit("test.nothing", None)
        due = postpone(tl, 600)
        tl.run_until_idle()
        (arrived,) = arrivals(tl)
        assert due <= arrived <= due + 5
        assert tl.elapsed_seconds == pytest.approx(600, abs=2)


def test_what_waits_for_longer_than_the_limit_is_named_and_can_be_waited_for() -> None:
    with InMemoryTaskline(registry) as tl:
        tl.submit("test.nothing", None)
        due = postpone(tl, 7_500)
        with pytest.raises(NeverIdle, match=r"1 record\(s\) on tasks.delay.2h waiting"):
            tl.run_until_idle()
        assert arrivals(tl) == []
        tl.run_until_idle(limit_seconds=5_000)
        (arrived,) = arrivals(tl)
        assert due <= arrived <= due + 50


def test_without_a_delay_role_nothing_comes_and_nothing_is_waited_for() -> None:
    with InMemoryTaskline(registry) as tl:
        tl.submit("test.nothing", None)
        tl.stop_delay()
        due = postpone(tl, 5)
        tl.run_until_idle()
        tl.advance(10)
        assert arrivals(tl) == []
        tl.start_delay()
        tl.run_until_idle()
        assert len(arrivals(tl)) == 1
        assert arrivals(tl)[0] >= due


def test_a_crash_of_the_delay_role_loses_nothing() -> None:
    with InMemoryTaskline(registry) as tl:
        tl.submit("test.nothing", None)
        for seconds in range(1, 40):
            postpone(tl, seconds)
        tl.advance(10.7)
        before = len(arrivals(tl))
        tl.crash_delay()
        tl.start_delay()
        tl.run_until_idle()
        # The group notices the death when the session is over; what was committed is not forwarded again.
        assert before == 10
        assert len(arrivals(tl)) in {39, 40}
