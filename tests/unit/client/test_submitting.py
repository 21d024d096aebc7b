"""Submitting one and many: keys of the client's own, and items that go their own ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from client_kit import TASK_ID, Reply, Script, broken, good, problem
from hypothesis import given, settings
from hypothesis import strategies as st

from taskline.client import IdempotencyConflict, SubmissionUnknown, Submit, SubmitFailure, SubmittedTask
from taskline.client.encoding import to_json
from taskline.client.submitting import batches, submit, submit_batch
from taskline.client.wire import Answer, Request
from taskline.errors import InvalidPayload, UnknownTaskType

ACCEPTED = {
    "task_id": TASK_ID,
    "status": "pending",
    "created_at": "2026-11-29T15:04:05.120Z",
    "scheduled_at": None,
    "task_type": "a.b",
    "priority": "normal",
    "queue": "default",
}
AWAY = problem("claims-unavailable", 503, after=1)
UNKNOWN = problem("delivery-unknown", 503, after=1, task_id=TASK_ID)


def body(request: Request) -> Any:
    return orjson.loads(request.body or b"")


def test_a_submission_gets_a_key_and_keeps_it() -> None:
    script = Script(replies=[broken(), UNKNOWN, good(ACCEPTED, 201)])
    done = script.run(submit("a.b", {"n": 1}, {"priority": "high"}, script.patience(), safe=True))
    assert str(done.task_id) == TASK_ID
    bodies = list(map(body, script.requests))
    assert bodies[0] == bodies[1] == bodies[2]
    assert len(bodies[0].pop("idempotency_key")) == 24
    assert bodies[0] == {"task_type": "a.b", "payload": {"n": 1}, "priority": "high"}


def test_every_submission_has_another_key() -> None:
    keys = set()
    for _ in range(3):
        script = Script(replies=[good(ACCEPTED, 201)])
        script.run(submit("a.b", None, {}, script.patience(), safe=True))
        keys.add(body(script.requests[0])["idempotency_key"])
    assert len(keys) == 3


def test_without_safe_retries_there_is_no_key_but_the_callers() -> None:
    for options, key in (({}, None), ({"idempotency_key": "mine"}, "mine")):
        script = Script(replies=[good(ACCEPTED, 201)])
        script.run(submit("a.b", None, options, script.patience(), safe=False))  # type: ignore[arg-type]
        assert body(script.requests[0]).get("idempotency_key") == key


def test_while_keys_can_t_be_kept_a_submission_goes_without_its_minted_one() -> None:
    script = Script(replies=[AWAY, good(ACCEPTED, 201)])
    script.run(submit("a.b", None, {}, script.patience(), safe=True))
    first, second = map(body, script.requests)
    assert "idempotency_key" in first
    assert "idempotency_key" not in second
    assert script.pauses == []
    # From then on a doubt is final.
    script = Script(replies=[AWAY, UNKNOWN])
    with pytest.raises(SubmissionUnknown) as raised:
        script.run(submit("a.b", None, {}, script.patience(), safe=True))
    assert raised.value.task_id == TASK_ID


def test_a_key_that_the_caller_gave_is_never_dropped() -> None:
    script = Script(replies=[AWAY, good(ACCEPTED, 201)])
    script.run(submit("a.b", None, {"idempotency_key": "mine"}, script.patience(), safe=True))
    assert [body(each)["idempotency_key"] for each in script.requests] == ["mine", "mine"]


def test_a_minted_key_is_kept_once_there_is_a_doubt() -> None:
    script = Script(replies=[broken(), AWAY, good(ACCEPTED, 201)])
    script.run(submit("a.b", None, {}, script.patience(), safe=True))
    assert len({body(each)["idempotency_key"] for each in script.requests}) == 1


# ---- many ----------------------------------------------------------------------------------------------------


def outcomes(*each: Reply | dict[str, Any]) -> Callable[[Request], Reply]:
    """A batch's answer, from problems and accepted tasks."""
    results: list[Any] = []
    for one in each:
        if isinstance(one, dict):
            results.append({"status": 201, "task": one, "replayed": False})
        else:
            assert isinstance(one, Answer)
            item = {"status": one.status, "problem": orjson.loads(one.body)}
            results.append(item | ({"retry_after": 2} if one.status == 503 else {}))
    return lambda _: good({"results": results})


def submit_all(script: Script, items: list[Submit], *, safe: bool = True) -> list[Any]:
    (batch,) = batches(items, safe=safe)
    return script.run(submit_batch(batch, script.patience()))


def tasks_of(request: Request) -> list[Any]:
    listed: list[Any] = body(request)["tasks"]
    return listed


def test_what_is_refused_does_not_stop_the_others() -> None:
    bad = problem("unknown-task-type", 400, task_type="a.c")
    taken = problem("idempotency-conflict", 409)
    script = Script(replies=[outcomes(ACCEPTED, bad, taken)])
    items = [Submit(task_type=name, payload=None) for name in ("a.b", "a.c", "a.d")]
    one, two, three = submit_all(script, items)
    assert isinstance(one, SubmittedTask)
    assert isinstance(two, SubmitFailure)
    assert (two.index, two.item) == (1, items[1])
    assert isinstance(two.error, UnknownTaskType)
    assert isinstance(three.error, IdempotencyConflict)


def test_only_what_may_go_better_is_submitted_again() -> None:
    later = problem("not-accepted", 503)
    script = Script(replies=[outcomes(later, ACCEPTED, UNKNOWN), broken(), outcomes(ACCEPTED, ACCEPTED)])
    found = submit_all(script, [Submit(task_type="a.b", payload=number) for number in range(3)])
    assert [isinstance(each, SubmittedTask) for each in found] == [True] * 3
    first, second, third = map(tasks_of, script.requests)
    assert [each["payload"] for each in first] == [0, 1, 2]
    assert second == third == [first[0], first[2]]


def test_without_a_key_nothing_is_submitted_twice_when_in_doubt() -> None:
    script = Script(replies=[outcomes(UNKNOWN, ACCEPTED)])
    first, _ = submit_all(script, [Submit(task_type="a.b", payload=0)] * 2, safe=False)
    assert isinstance(first.error, SubmissionUnknown)
    assert first.error.task_id == TASK_ID
    script = Script(replies=[broken()])
    found = submit_all(script, [Submit(task_type="a.b", payload=0)] * 2, safe=False)
    assert all(isinstance(each.error, SubmissionUnknown) for each in found)


def test_an_item_that_goes_without_its_minted_key_is_never_in_doubt_twice() -> None:
    script = Script(replies=[outcomes(AWAY), outcomes(UNKNOWN)])
    (failed,) = submit_all(script, [Submit(task_type="a.b", payload=0)])
    assert "idempotency_key" in tasks_of(script.requests[0])[0]
    assert "idempotency_key" not in tasks_of(script.requests[1])[0]
    assert isinstance(failed.error, SubmissionUnknown)


def test_the_time_for_retries_is_bounded_for_items_too() -> None:
    script = Script(replies=[outcomes(UNKNOWN)] * 10)
    (failed,) = script.run(
        submit_batch(next(batches([Submit(task_type="a.b", payload=0)], safe=True)), script.patience(3.5)),
        all_asked=False,
    )
    assert isinstance(failed, SubmitFailure)
    assert isinstance(failed.error, SubmissionUnknown)
    assert failed.error.idempotency_key == tasks_of(script.requests[0])[0]["idempotency_key"]
    assert len(script.requests) == 2


def test_a_payload_that_can_t_be_written_fails_alone() -> None:
    script = Script(replies=[outcomes(ACCEPTED)])
    bad, fine = submit_all(
        script, [Submit(task_type="a.b", payload=float("nan")), Submit(task_type="a.b", payload=1)]
    )
    assert isinstance(bad.error, InvalidPayload)
    assert isinstance(fine, SubmittedTask)


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.sampled_from([1, 300_000, 600_000, 1_200_000]) | st.just(1), max_size=12))
def test_batches_are_bounded_and_lose_nothing(sizes: list[int]) -> None:
    items = [Submit(task_type="a.b", payload="x" * size) for size in sizes] + [
        Submit(task_type="a.b", payload=None)
    ] * 501
    made = list(batches(items, safe=False))
    assert [entry.item for batch in made for entry in batch] == items
    assert [entry.index for batch in made for entry in batch] == list(range(len(items)))
    for batch in made:
        assert len(batch) <= 500
        assert len(batch) == 1 or sum(len(entry.body) for entry in batch) <= 1_000_000


def test_items_are_taken_as_they_are_needed() -> None:
    taken = []

    def endless() -> Any:
        while True:
            taken.append(1)
            yield Submit(task_type="a.b", payload=None)

    next(batches(endless(), safe=True))
    assert len(taken) == 501


@pytest.mark.parametrize("value", [float("inf"), {1, object()}, object(), "\ud800", 1j])
def test_what_json_can_t_say_is_refused(value: object) -> None:
    with pytest.raises(InvalidPayload):
        to_json({"payload": value}, "a.b")


def test_integers_of_any_size_are_exact() -> None:
    assert to_json({"payload": 2**70}, "a.b") == b'{"payload":1180591620717411303424}'
