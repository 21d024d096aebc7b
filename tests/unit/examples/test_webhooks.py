"""The example's receiver keeps to its scripts, and its own check can fail."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import pytest

from examples.webhooks.data import reports
from examples.webhooks.demo import DELAYED_ROUND, EVENTS, events
from examples.webhooks.receiver import Ledger, Receiver, Record
from examples.webhooks.scenarios import BY_NAME, SCENARIOS, Scenario
from examples.webhooks.story import Story, story_of, tell
from examples.webhooks.tasks import MAX_RETRIES
from examples.webhooks.verify import differences, expected, replay_differences, seen

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


# ---- documents as the API gives them -----------------------------------------------------------------------


def story(
    scenario: Scenario, *, failures: tuple[str, ...] | None = None, waits: float = 10.0, **changes: Any
) -> Story:
    """A task that went as its scenario says, each attempt `waits` seconds after the one before."""
    kinds = scenario.failures if failures is None else failures
    attempts = [attempt(number, kind, waits) for number, kind in enumerate(kinds, 1)]
    if scenario.status == "completed":
        attempts.append(attempt(len(attempts) + 1, None, waits))
    status = {
        "task_id": "dead",
        "status": scenario.status,
        "reason": scenario.reason,
        "created_at": BEGUN.isoformat(),
        "scheduled_at": None,
        "result": {"status": 200, "duplicate": scenario.duplicate} if scenario.reason is None else None,
        "retry_count": len(attempts) - 1,
        "root_id": "dead",
        "replay_of": None,
        "replayed_as": None,
        **changes,
    }
    return story_of(status, {"attempts": attempts})


def attempt(number: int, kind: str | None, waits: float) -> dict[str, Any]:
    started = BEGUN + timedelta(seconds=waits * (number - 1))
    return {
        "attempt": number,
        "outcome": "succeeded" if kind is None else "failed",
        "worker": "w",
        "started_at": started.isoformat(),
        "ended_at": started.isoformat(),
        "error": None if kind is None else {"class": "E", "message": "m", "category": kind},
    }


def record(scenario: Scenario, **changes: Any) -> Record:
    """What the receiver has noted when all went as the scenario says."""
    came = (0 if scenario.away else len(scenario.failures)) + (scenario.reason is None)
    made = Record(came=[0.0] * came, heard=["?"] * came, taken=int(scenario.reason is None))
    return replace(made, **changes)


# ---- the check ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_what_goes_as_it_must_passes(scenario: Scenario) -> None:
    assert differences(scenario, story(scenario), record(scenario)) == []
    assert seen(scenario, [story(scenario)] * 3) == expected(scenario)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_what_goes_as_in_another_scenario_does_not(scenario: Scenario) -> None:
    for other in SCENARIOS:
        same = (other.failures, other.reason, other.duplicate, other.or_more)
        if same != (scenario.failures, scenario.reason, scenario.duplicate, scenario.or_more):
            assert differences(scenario, story(other), record(other))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_an_attempt_too_many_is_a_difference(scenario: Scenario) -> None:
    once_more = story(scenario, failures=(*scenario.failures, "unknown"))
    assert differences(scenario, once_more, record(scenario))
    assert seen(scenario, [once_more, story(scenario)]) != expected(scenario)


@pytest.mark.parametrize("name", ["away", "slow"])
def test_some_may_be_tried_as_often_as_it_takes(name: str) -> None:
    scenario = BY_NAME[name]
    often = story(scenario, failures=scenario.failures * 4)
    assert differences(scenario, often, record(scenario)) == []
    assert seen(scenario, [often, story(scenario)]) == expected(scenario)
    assert differences(scenario, story(scenario, failures=()), record(scenario))
    assert differences(scenario, often, record(scenario, came=[]))


def test_an_execution_that_was_handed_on_spends_nothing_and_may_have_delivered() -> None:
    flaky = BY_NAME["flaky"]
    whole = story(flaky)
    taken_over = replace(whole, acts=(replace(whole.acts[0], outcome="released", category=None), *whole.acts))
    for came in (3, 4):
        assert differences(flaky, taken_over, record(flaky, came=[0.0] * came)) == []
    assert differences(flaky, taken_over, record(flaky, came=[0.0] * 5))
    assert differences(flaky, whole, record(flaky, came=[0.0] * 4))


@pytest.mark.parametrize(
    ("name", "least"), [("flaky", 0.3), ("limited", 1.0), ("busy", 0.8), ("broken", 1.2)]
)
def test_an_attempt_too_early_is_a_difference(name: str, least: float) -> None:
    scenario = BY_NAME[name]
    assert differences(scenario, story(scenario, waits=least), record(scenario)) == []
    assert differences(scenario, story(scenario, waits=least - 0.01), record(scenario))


def test_a_start_before_the_delay_is_over_is_a_difference() -> None:
    steady = BY_NAME["steady"]
    soon = (BEGUN + timedelta(milliseconds=1)).isoformat()
    (line,) = differences(
        steady, story(steady, scheduled_at=soon), record(steady, came=[BEGUN.timestamp() + 1])
    )
    assert "before" in line


@pytest.mark.parametrize(
    "wrong",
    [
        {"taken": 0},
        {"taken": 2},
        {"too_early": 1},
        {"came": [0.0], "heard": ["500"]},
        {"came": [0.0] * 4, "heard": ["500"] * 4},
    ],
    ids=str,
)
def test_what_the_receiver_saw_otherwise_is_a_difference(wrong: dict[str, Any]) -> None:
    flaky = BY_NAME["flaky"]
    assert len(differences(flaky, story(flaky), record(flaky, **wrong))) == 1
    assert differences(flaky, story(flaky), None)


@pytest.mark.parametrize(
    "wrong", [{"status": "dead"}, {"retry_count": 7}, {"result": {"status": 200, "duplicate": True}}]
)
def test_what_the_view_says_otherwise_is_a_difference(wrong: dict[str, Any]) -> None:
    steady = BY_NAME["steady"]
    assert len(differences(steady, story(steady, **wrong), record(steady))) == 1


def test_a_replay_is_checked_too() -> None:
    strict, steady = BY_NAME["strict"], BY_NAME["steady"]
    dead = story(strict, replayed_as="new")
    replayed = story(steady, task_id="new", replay_of="dead")
    both = Record(came=[0.0, 0.0], heard=["400", "200"], taken=1)
    assert replay_differences(dead, replayed, both) == []
    assert replay_differences(dead, None, both)
    assert replay_differences(dead, replayed, None)
    assert replay_differences(dead, replayed, replace(both, taken=0))
    assert replay_differences(replace(dead, status="completed"), replayed, both)
    assert replay_differences(replace(dead, replayed_as=None), replayed, both)
    assert replay_differences(dead, replace(replayed, replay_of=None), both)
    assert replay_differences(dead, replace(replayed, root_id="new"), both)
    assert replay_differences(dead, replace(replayed, status="failed"), both)


def test_a_story_tells_every_attempt() -> None:
    told = tell(story(BY_NAME["flaky"], waits=2), {"w": "w1"})
    assert told == "server [w1] +2.00 s → server [w1] +2.00 s → succeeded [w1] = completed"


# ---- the scripts -------------------------------------------------------------------------------------------


def test_every_scenario_is_told_apart_and_every_event_gets_one() -> None:
    assert len({each.name for each in SCENARIOS}) == len(SCENARIOS)
    made = events(EVENTS)
    assert len({event.name for event in made}) == EVENTS
    for scenario in SCENARIOS:
        assert sum(event.scenario is scenario for event in made) == EVENTS // len(SCENARIOS)
    delayed = {event.scenario.name for event in made if event.delay is not None}
    assert delayed == {each.name for each in SCENARIOS if not each.away}
    assert sum(event.delay is not None for event in made) < EVENTS / (DELAYED_ROUND - 1)


def test_the_input_is_whole() -> None:
    assert len({report.date for report in reports()}) == len(reports()) == 1_461
    assert {report.weather for report in reports()} == {"drizzle", "rain", "sun", "snow", "fog"}


def test_the_one_that_is_always_broken_outlasts_the_retries() -> None:
    assert len(BY_NAME["broken"].failures) == 1 + MAX_RETRIES


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_an_event_is_taken_in_once_by_its_key(scenario: Scenario) -> None:
    ledger = Ledger()
    for number in range(1, 8):
        ledger.receive(scenario, "key", float(number * 100))
    ledger.mend()
    answer, known, _ = ledger.receive(scenario, "key", 1_000.0)
    found = ledger.record("key")
    assert found is not None
    assert (answer.status, found.taken, len(found.came)) == (200, 1, 8)
    assert known == (scenario.reason is None)


def test_who_comes_before_it_was_asked_to_is_noted() -> None:
    ledger, limited = Ledger(), BY_NAME["limited"]
    ledger.receive(limited, "early", 10.0)
    ledger.receive(limited, "early", 10.9)
    ledger.receive(limited, "late", 10.0)
    ledger.receive(limited, "late", 11.0)
    early, late = ledger.record("early"), ledger.record("late")
    assert early is not None
    assert late is not None
    assert (early.too_early, late.too_early) == (1, 0)


# ---- the receiver ------------------------------------------------------------------------------------------


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


def post(receiver: Receiver, name: str, key: str = "k", timeout: float = 30.0) -> httpx.Response:
    return httpx.post(
        receiver.url(BY_NAME[name]),
        json={"date": "2012/01/01"},
        headers={"Idempotency-Key": key},
        timeout=timeout,
        trust_env=False,
    )


@pytest.mark.parametrize(
    ("name", "statuses"),
    [
        ("steady", [200, 200]),
        ("flaky", [500, 500, 200]),
        ("limited", [429, 200]),
        ("dated", [429, 200]),
        ("busy", [409, 200]),
        ("strict", [400, 400]),
        ("gone", [410, 410]),
        ("broken", [500] * 6),
    ],
)
def test_a_script_is_followed_for_each_event(receiver: Receiver, name: str, statuses: list[int]) -> None:
    for key in ("one", "another"):
        assert [post(receiver, name, key).status_code for _ in statuses] == statuses


def test_retry_after_is_told_in_seconds_and_as_a_date(receiver: Receiver) -> None:
    assert post(receiver, "limited").headers["retry-after"] == "1"
    before = time.time()
    date = parsedate_to_datetime(post(receiver, "dated", "d").headers["retry-after"])
    assert date.timestamp() >= before + 1
    assert post(receiver, "busy", "b").json() == {"busy_for_seconds": 0.8}


def test_a_dropped_connection_is_no_answer(receiver: Receiver) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        post(receiver, "dropping")
    assert post(receiver, "dropping").json() == {"duplicate": False}


def test_one_that_hangs_has_taken_the_event_in(receiver: Receiver) -> None:
    with pytest.raises(httpx.ReadTimeout):
        post(receiver, "slow", timeout=0.2)
    assert post(receiver, "slow").json() == {"duplicate": True}


def test_one_that_is_away_refuses_connections_until_it_is_back(receiver: Receiver) -> None:
    with pytest.raises(httpx.ConnectError):
        post(receiver, "away")
    receiver.come_back()
    assert post(receiver, "away").status_code == 200


def test_mended_ones_answer_200(receiver: Receiver) -> None:
    assert post(receiver, "broken").status_code == 500
    receiver.mend()
    assert post(receiver, "broken").json() == {"duplicate": False}
    assert post(receiver, "strict").json() == {"duplicate": True}


def test_a_delivery_without_a_key_is_refused(receiver: Receiver) -> None:
    url = receiver.url(BY_NAME["steady"])
    assert httpx.post(url, json={"date": "x"}, trust_env=False).status_code == 422
