"""Records that wait: never early, always on their way, never larger, and in few hops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from taskline.infra.log import HEADER_DUE, HEADER_TARGET, InRecord, OutRecord, Position
from taskline.infra.tiers import MAX_DELAY_SECONDS, Tiers, delayed, tier_of
from taskline.infra.topics import Topics
from taskline.processors.delay_core import SAME_TIER_PAUSE_MS, Router, Stage
from taskline.settings import DelaySettings

NOW = 1_800_000_000_000
TOPICS = Topics(namespace="n.")
DEFAULT = Tiers.of(DelaySettings().tiers)
NAMES = ("100ms", "200ms", "500ms", "1s", "2s", "5s", "20s", "1m", "5m", "20m", "1h", "5h", "1d", "7d")
# A record goes round in its tier until less than the next longer one is left: steps that a sane operator may choose.
WIDEST_STEP = 60
delays_ms = st.floats(math.log(100), math.log(MAX_DELAY_SECONDS * 1_000)).map(lambda x: round(math.exp(x)))


def steps(tiers: Tiers) -> list[float]:
    pairs = zip(tiers.tiers, tiers.tiers[1:], strict=False)
    return [longer.duration_ms / tier.duration_ms for tier, longer in pairs]


tier_sets = (
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True)
    .map(Tiers.of)
    .filter(lambda tiers: max(steps(tiers), default=0) <= WIDEST_STEP)
)


def router(tiers: Tiers = DEFAULT) -> Router:
    return Router(TOPICS, tiers, ["default", "mail"])


def landed(record: OutRecord, at_ms: int) -> InRecord:
    return InRecord(
        position=Position(topic=record.topic, partition=0, offset=0),
        value=record.value,
        key=record.key,
        headers=dict(record.headers),
        timestamp_ms=at_ms,
    )


def submission(due_ms: int) -> OutRecord:
    return OutRecord(
        topic=TOPICS.scheduled,
        key=b"key",
        value=b"value",
        headers={
            "taskline-task-id": bytes(16),
            "other": b"x",
            HEADER_DUE: b"%d" % due_ms,
            HEADER_TARGET: b"n.tasks.mail.high",
        },
    )


def stage_of(rules: Router, topic: str) -> Stage:
    if topic == TOPICS.scheduled:
        return rules.scheduled()
    return rules.stage(tier_of(topic.removeprefix(TOPICS.delay_prefix)))


def travel(
    rules: Router, record: OutRecord, late: list[int], *, skew_ms: int = 0
) -> tuple[list[OutRecord], int]:
    """The hops of a record, each read at once and released `late` ms after its time, and when it was delivered."""
    hops, now, lateness = [], NOW, iter(late)
    while record.topic.startswith((TOPICS.delay_prefix, TOPICS.scheduled)):
        held = rules.admit(landed(record, now + skew_ms), stage_of(rules, record.topic), now)
        assert held.cause is None
        now = max(now, held.until_ms) + next(lateness, 0)
        record = rules.release(held, now)
        hops.append(record)
        assert len(hops) < 100_000
    return hops, now


@given(
    tiers=tier_sets,
    delay=delays_ms,
    late=st.lists(st.integers(0, 100_000), max_size=30),
)
@settings(max_examples=300, deadline=None)
def test_whatever_the_tiers_and_the_lateness_it_arrives_and_never_early(
    tiers: Tiers, delay: int, late: list[int]
) -> None:
    longest = tiers.tiers[-1].duration_ms
    delay = min(delay, WIDEST_STEP * longest)
    due = NOW + delay
    start = submission(due)
    hops, delivered = travel(router(tiers), start, late)
    assert delivered >= due
    *between, last = hops
    assert last.topic == "n.tasks.mail.high"
    assert (last.key, last.value) == (start.key, start.value)
    assert dict(last.headers) == {
        name: value for name, value in start.headers.items() if name != HEADER_TARGET
    }
    assert all(
        (hop.key, hop.value, dict(hop.headers)) == (start.key, start.value, dict(start.headers))
        for hop in between
    )
    assert len(hops) <= 3 + delay / longest + sum(map(math.ceil, steps(tiers)))


@given(delay=delays_ms)
def test_the_default_tiers_take_about_two_hops_a_factor_of_ten(delay: int) -> None:
    hops, delivered = travel(router(), submission(NOW + delay), [])
    assert delivered == NOW + delay
    assert len(hops) <= 4 + 3 * math.log10(max(10, min(delay, 14 * 86_400_000) / 100)) + delay / (
        7 * 86_400_000
    )


@settings(deadline=None)
@given(delay=st.integers(100, 100_000), skew=st.integers(-20_000, 20_000))
@example(delay=57_734, skew=-19_923)
def test_a_broker_whose_clock_is_wrong_makes_nothing_early_or_go_round_at_full_speed(
    delay: int, skew: int
) -> None:
    due = NOW + delay
    hops, delivered = travel(router(), submission(due), [], skew_ms=skew)
    assert delivered == due
    # A clock that is behind makes the tiers shorter than itself look over at once. Such a tier is used while less is left than the next longer one
    # takes, which is up to three times as long (20 s, 1 min). What the delay takes anyway comes on top: a year goes through the longest tier 52 times.
    anyway, _ = travel(router(), submission(due), [])
    assert len(hops) <= len(anyway) + 20 + 3 * abs(min(skew, 0)) / SAME_TIER_PAUSE_MS


@settings(deadline=None)
@given(delay=delays_ms, tiers=tier_sets)
def test_a_retry_goes_straight_into_the_tier_that_it_would_hop_to(delay: int, tiers: Tiers) -> None:
    delay = min(delay, WIDEST_STEP * tiers.tiers[-1].duration_ms)
    retry = OutRecord(topic=TOPICS.dlq.replace("dlq", "high"), value=b"v", headers={"a": b"b"})
    record = delayed(retry, due_ms=NOW + delay, now_ms=NOW, topics=TOPICS, tiers=tiers)
    hops, delivered = travel(router(tiers), record, [])
    assert delivered >= NOW + delay
    assert hops[-1].topic == retry.topic
    assert dict(hops[-1].headers) == {"a": b"b", HEADER_DUE: b"%d" % (NOW + delay)}


def test_a_record_that_is_due_already_goes_to_its_target_at_once() -> None:
    held = router().admit(landed(submission(NOW - 5), NOW), router().scheduled(), NOW)
    assert held.until_ms <= NOW
    assert router().release(held, NOW).topic == "n.tasks.mail.high"


def test_a_guard_of_leases_goes_to_its_queue_s_topic() -> None:
    guard = submission(NOW - 5)
    guard = replace(guard, headers={**guard.headers, HEADER_TARGET: b"n.tasks.leases.mail"})
    held = router().admit(landed(guard, NOW), router().scheduled(), NOW)
    assert router().release(held, NOW).topic == "n.tasks.leases.mail"
    unknown = replace(guard, headers={**guard.headers, HEADER_TARGET: b"n.tasks.leases.other"})
    assert router().admit(landed(unknown, NOW), router().scheduled(), NOW).cause is not None


def test_a_record_waits_in_a_tier_for_its_length_since_its_append_and_no_longer_than_it_has_left() -> None:
    rules = router()
    stage = rules.stage(tier_of("10s"))
    record = landed(submission(NOW + 15_000), NOW)
    assert rules.admit(record, stage, NOW).until_ms == NOW + 10_000
    # Read late, as after a restart: the append counts.
    assert rules.admit(record, stage, NOW + 8_000).until_ms == NOW + 10_000
    assert rules.admit(landed(submission(NOW + 3_000), NOW), stage, NOW).until_ms == NOW + 3_000
    # A broker whose clock is fast.
    assert rules.admit(landed(submission(NOW + 15_000), NOW + 60_000), stage, NOW).until_ms == NOW + 10_000


def test_the_shortest_tier_and_a_retired_one_as_short_go_by_due_times_and_the_others_do_not() -> None:
    rules = router(Tiers.of(["500ms", "5s"]))
    assert [rules.stage(tier_of(name)).near for name in ("200ms", "500ms", "1s", "5s")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({HEADER_DUE: None}, "taskline-due"),
        ({HEADER_DUE: b""}, "taskline-due"),
        ({HEADER_DUE: b"soon"}, "no time in ms"),
        ({HEADER_DUE: b"-5"}, "no time in ms"),
        ({HEADER_DUE: b"1e9"}, "no time in ms"),
        ({HEADER_DUE: b"9" * 5_000}, "no time in ms"),
        ({HEADER_TARGET: None}, "taskline-target"),
        ({HEADER_TARGET: b"n.tasks.dlq"}, "no dispatch topic"),
        ({HEADER_TARGET: b"other.tasks.high"}, "no dispatch topic"),
        ({HEADER_TARGET: b"n.tasks.unknown.high"}, "no dispatch topic"),
        ({HEADER_TARGET: b"\xff\xfe"}, "no dispatch topic"),
    ],
)
def test_a_record_that_can_not_be_routed_goes_to_the_dead_letters_verbatim(
    changes: dict[str, bytes | None], word: str
) -> None:
    start = submission(NOW + 1_000)
    # The client gives None for a header without a value.
    headers = {name: value for name, value in {**start.headers, **changes}.items() if value is not None}
    record = InRecord(
        position=Position(topic=TOPICS.scheduled, partition=3, offset=7),
        value=b"\x00bytes",
        key=b"k",
        headers=headers,
        timestamp_ms=NOW,
    )
    held = router().admit(record, router().scheduled(), NOW)
    assert held.cause is not None
    assert word in held.cause
    assert held.until_ms <= NOW
    letter = router().release(held, NOW)
    assert (letter.topic, letter.key, letter.value) == ("n.tasks.dlq", b"k", b"\x00bytes")
    assert letter.headers["taskline-source"] == b"n.tasks.scheduled/3/7"
    assert word.encode() in letter.headers["taskline-cause"]
    assert {name: letter.headers[name] for name in headers} == headers
    assert all(len(value) <= 5_000 for value in letter.headers.values())
