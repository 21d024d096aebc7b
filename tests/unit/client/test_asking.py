"""When the client tries again, and what it says when it gives up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from client_kit import TASK_ID, Reply, Script, broken, good, problem, unsent
from hypothesis import given, settings
from hypothesis import strategies as st

from taskline.client import (
    RateLimited,
    ServerFault,
    ServiceUnavailable,
    SubmissionUnknown,
    Unauthorized,
    UnexpectedAnswer,
    calls,
)
from taskline.client.asking import ask
from taskline.client.wire import Answer, Call
from taskline.errors import DeliveryUnknown, TasklineError, TaskNotFound, Unavailable

ACCEPTED = {
    "task_id": TASK_ID,
    "status": "pending",
    "created_at": "2026-11-29T15:04:05.120Z",
    "scheduled_at": None,
    "task_type": "a.b",
    "priority": "normal",
    "queue": "default",
}


def read() -> Call[Any]:
    return replace(calls.get(TASK_ID), parse=lambda answer: answer.status)


def submission(key: str | None = None) -> Call[Any]:
    return replace(calls.submit("a.b", {}, {"idempotency_key": key}), parse=lambda answer: answer.status)


@pytest.mark.parametrize(
    "first",
    [unsent(), broken(), problem("view-unavailable", 503, after=1), problem("rate-limited", 429, after=1)],
)
@pytest.mark.parametrize("call", [read(), submission("k")])
def test_what_does_no_harm_is_tried_again(call: Call[Any], first: Reply) -> None:
    script = Script(replies=[first, good({})])
    assert script.run(ask(call, script.patience())) == 200
    assert script.requests == [call.request] * 2
    assert script.pauses == [1.0]


@pytest.mark.parametrize(
    "first",
    [unsent(), problem("not-accepted", 503, after=1), problem("rate-limited", 429, after=1)],
)
def test_a_submission_without_a_key_is_tried_again_when_it_was_certainly_not_accepted(first: Reply) -> None:
    script = Script(replies=[first, good({}, 201)])
    assert script.run(ask(submission(), script.patience())) == 201


@pytest.mark.parametrize(
    ("reply", "task_id"),
    [
        (broken(), None),
        (problem("delivery-unknown", 503, after=1, task_id=TASK_ID), TASK_ID),
        (Answer(status=502, headers={}, body=b"<html>"), None),
        (Answer(status=503, headers={"retry-after": "1"}, body=b"<html>"), None),
        (problem("internal-error", 500), None),
    ],
)
def test_a_submission_without_a_key_is_never_sent_twice_when_in_doubt(
    reply: Reply, task_id: str | None
) -> None:
    script = Script(replies=[reply])
    with pytest.raises(SubmissionUnknown) as raised:
        script.run(ask(submission(), script.patience()))
    assert isinstance(raised.value, DeliveryUnknown)
    assert (raised.value.task_id, raised.value.idempotency_key) == (task_id, None)


def test_a_doubt_stays_until_a_try_succeeds() -> None:
    # What the last try said is true of the last try only.
    script = Script(replies=[broken(), problem("unauthorized", 401)])
    with pytest.raises(SubmissionUnknown) as raised:
        script.run(ask(submission("k"), script.patience()))
    assert raised.value.idempotency_key == "k"
    assert isinstance(raised.value.__cause__, Unauthorized)

    script = Script(replies=[problem("delivery-unknown", 503, after=1), good({}, 201)])
    assert script.run(ask(submission("k"), script.patience())) == 201


def test_the_time_that_the_api_names_is_kept_and_spread() -> None:
    for chance, pause in ((0.0, 4.0), (0.8, 4.8)):
        script = Script(replies=[problem("rate-limited", 429, after=4), good({})])
        script.run(ask(read(), script.patience(chance=chance)))
        assert script.pauses == [pytest.approx(pause)]


def test_a_time_beyond_the_budget_is_not_waited_for() -> None:
    script = Script(replies=[problem("rate-limited", 429, after=11)])
    with pytest.raises(RateLimited) as raised:
        script.run(ask(read(), script.patience(10.0)))
    assert raised.value.retry_after == 11
    assert script.pauses == []


def test_the_budget_bounds_the_tries() -> None:
    script = Script(replies=[unsent()] * 4, request_seconds=2.0)
    with pytest.raises(Unavailable, match="refused"):
        script.run(ask(read(), script.patience(10.0)))
    # 2 + 1 + 2 + 1 + 2 + 1 = 9 s until the fourth try, which ends at 11 s.
    assert script.now == 1_000.0 + 11.0
    script = Script(replies=[unsent()])
    with pytest.raises(Unavailable):
        script.run(ask(read(), script.patience(0.0)))


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (problem("task-not-found", 404), TaskNotFound),
        (problem("unauthorized", 401), Unauthorized),
        (problem("internal-error", 500), ServerFault),
        (Answer(status=404, headers={}, body=b"nginx"), UnexpectedAnswer),
        (Answer(status=302, headers={}, body=b""), UnexpectedAnswer),
        (good([]), UnexpectedAnswer),
        (Answer(status=200, headers={}, body=b"{"), UnexpectedAnswer),
    ],
)
def test_what_will_not_pass_is_told_at_once(reply: Reply, error: type[TasklineError]) -> None:
    script = Script(replies=[reply])
    with pytest.raises(error):
        script.run(ask(calls.get(TASK_ID), script.patience()))


def test_another_way_is_taken_only_while_there_is_no_doubt() -> None:
    away = problem("claims-unavailable", 503, after=1)
    call = replace(submission("k"), unless=frozenset({"claims-unavailable"}))
    script = Script(replies=[away])
    with pytest.raises(ServiceUnavailable):
        script.run(ask(call, script.patience()))
    script = Script(replies=[broken(), away, good({}, 201)])
    assert script.run(ask(call, script.patience())) == 201


REPLIES = st.sampled_from(
    [
        unsent(),
        broken(),
        problem("delivery-unknown", 503, after=1),
        problem("not-accepted", 503, after=1),
        problem("rate-limited", 429, after=2),
        problem("claims-unavailable", 503, after=1),
        problem("invalid-payload", 400, task_type="a.b", pointer="/x"),
        Answer(status=504, headers={}, body=b""),
        good(ACCEPTED, 201),
    ]
)
# The request may have been acted on.
DOUBTFUL = {"broken", "delivery-unknown", "504"}


def name(reply: Reply) -> str:
    if not isinstance(reply, Answer):
        return "broken" if reply.sent else "unsent"
    if reply.status == 504:
        return "504"
    return "accepted" if reply.status == 201 else str(reply.body).split("problem:")[1].split('"')[0]


@settings(deadline=None)
@given(replies=st.lists(REPLIES, min_size=30, max_size=30), keyed=st.booleans())
def test_no_task_is_submitted_twice_and_no_doubt_is_hidden(replies: Sequence[Reply], keyed: bool) -> None:
    call = calls.submit("a.b", {}, {"idempotency_key": "k" if keyed else None})
    script = Script(replies=replies)
    try:
        assert str(script.run(ask(call, script.patience()), all_asked=False).task_id) == TASK_ID
        outcome = "accepted"
    except SubmissionUnknown:
        outcome = "unknown"
    except TasklineError:
        outcome = "refused"
    asked = [name(reply) for reply in replies[: len(script.requests)]]
    assert (asked[-1] == "accepted") == (outcome == "accepted")
    in_doubt = [each in DOUBTFUL for each in asked]
    if not keyed:
        # Nothing was sent after what may have been acted on.
        assert not any(in_doubt[:-1])
    if outcome != "accepted":
        assert (outcome == "unknown") == any(in_doubt)
