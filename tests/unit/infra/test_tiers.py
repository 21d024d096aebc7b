"""Which tier a record waits in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskline.infra.log import HEADER_DUE, HEADER_TARGET, OutRecord
from taskline.infra.tiers import SLACK_MS, Tiers, delayed, tier_of
from taskline.infra.topics import Topics
from taskline.settings import DelaySettings, duration_ms

NOW = 1_800_000_000_000
DEFAULT = Tiers.of(DelaySettings().tiers)
names = st.lists(
    st.builds("{}{}".format, st.integers(1, 999), st.sampled_from(["ms", "s", "m", "h", "d"])),
    min_size=1,
    max_size=20,
    unique_by=duration_ms,
)


@given(names=names, remaining=st.integers(1, 400 * 86_400_000))
def test_the_next_stop_is_the_longest_tier_that_is_not_too_long(names: list[str], remaining: int) -> None:
    tiers = Tiers.of(names)
    stop = tiers.next_stop(remaining)
    assert stop.duration_ms <= remaining + SLACK_MS or stop == tiers.shortest
    longer = [tier for tier in tiers.tiers if tier.duration_ms > stop.duration_ms]
    assert all(tier.duration_ms > remaining for tier in longer)


@pytest.mark.parametrize(
    ("remaining", "name"),
    [
        (1, "500ms"),
        (989, "500ms"),
        (990, "1s"),
        (59_979, "20s"),
        (59_980, "1m"),
        (60_000, "1m"),
        (3_599_990, "1h"),
        (365 * 86_400_000, "7d"),
    ],
)
def test_a_delay_of_a_tier_s_length_goes_there_although_some_ms_have_passed(
    remaining: int, name: str
) -> None:
    assert DEFAULT.next_stop(remaining).name == name


def test_tiers_are_sorted_by_length_and_there_is_one_at_least() -> None:
    assert [tier.name for tier in Tiers.of(["1h", "200ms", "90s", "1m"]).tiers] == [
        "200ms",
        "1m",
        "90s",
        "1h",
    ]
    assert DEFAULT.shortest == tier_of("500ms")
    with pytest.raises(ValueError, match="no delay tier"):
        Tiers.of([])


@pytest.mark.parametrize("name", ["", "1", "0s", "1.5s", "1 s", "-1s", "1w", "s", "01s"])
def test_what_is_no_duration_is_no_tier(name: str) -> None:
    with pytest.raises(ValueError, match="no duration"):
        tier_of(name)


def test_a_record_is_delayed_by_its_headers_alone() -> None:
    topics = Topics(namespace="n.")
    record = OutRecord(topic="n.tasks.high", key=b"k", value=b"v", headers={"a": b"b"}, partition=None)
    sent = delayed(record, due_ms=NOW + 7_000, now_ms=NOW, topics=topics, tiers=DEFAULT)
    assert sent.topic == "n.tasks.delay.5s"
    assert (sent.key, sent.value) == (b"k", b"v")
    assert dict(sent.headers) == {
        "a": b"b",
        HEADER_DUE: b"%d" % (NOW + 7_000),
        HEADER_TARGET: b"n.tasks.high",
    }
    assert delayed(record, due_ms=NOW, now_ms=NOW, topics=topics, tiers=DEFAULT) is record
