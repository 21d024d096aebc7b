"""Dedup windows: of the tasks of one type with one key, one in a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import httpx
import orjson
import pytest
from api_kit import NOW_MS, Api, slug
from read_kit import event, started

from taskline.errors import QueueFull, Unavailable
from taskline.schemas.events import Succeeded
from taskline.schemas.ids import new_task_id
from taskline.state.claims import Claim, ClaimKey, ClaimKind

WINDOW_MS = 600_000
DEDUPED = {
    "task_type": "any.json",
    "payload": {"n": 1},
    "dedup_key": "ada",
    "dedup_window_seconds": WINDOW_MS // 1000,
}
NAME = ClaimKey(tenant="default", kind=ClaimKind.DEDUP, name="any.json ada")
LONG_MS = 60_000


def deduped(number: int, **changes: Any) -> dict[str, Any]:
    return DEDUPED | {"payload": {"n": number}} | changes


def leave_claim(api: Api) -> Claim:
    """What a process leaves that dies between the window and the log."""
    claim = Claim(
        key=NAME,
        task_id=new_task_id(NOW_MS - 1_000),
        owner=uuid4(),
        request_hash=b"",
        deadline=NOW_MS + 8_000,
        expires_at=NOW_MS + WINDOW_MS,
    )
    api.claims.rows[NAME] = claim
    return claim


def test_a_second_task_inside_the_window_is_answered_with_the_first(api: Api) -> None:
    first = api.submit(deduped(1)).json()
    for later in (0, WINDOW_MS - 1):
        api.clock.ms = NOW_MS + later
        second = api.submit(deduped(2, dedup_window_seconds=1))
        assert second.status_code == 200
        assert second.json() == {
            "task_id": first["task_id"],
            "duplicate": True,
            "task_type": "any.json",
            "created_at": first["created_at"],
            "status": None,
        }
        assert second.headers["location"] == f"/tasks/{first['task_id']}"
    assert len(api.log.records) == 1


def test_the_window_ends_to_the_millisecond(api: Api) -> None:
    api.submit(deduped(1))
    api.clock.ms += WINDOW_MS
    assert api.submit(deduped(2)).status_code == 201
    assert api.submit(deduped(3)).status_code == 200
    assert len(api.log.records) == 2


def test_a_duplicate_tells_how_far_the_first_is(api: Api) -> None:
    api.submit(deduped(1))
    (task,) = api.log.submissions()
    api.store.put(task)
    assert api.submit(deduped(2)).json()["status"] == "pending"
    execution = new_task_id(NOW_MS)
    api.store.put(task, started(task, execution), event(Succeeded, task, execution=execution))
    assert api.submit(deduped(3)).json()["status"] == "completed"


def test_windows_of_other_keys_and_types_have_nothing_to_do_with_each_other(api: Api) -> None:
    place = {"iata": "LAX", "lat": 1.0}
    for change in ({}, {"dedup_key": "bob"}, {"task_type": "geo.nearest", "payload": place}):
        assert api.submit(DEDUPED | change).status_code == 201
    assert api.submit({"task_type": "any.json", "payload": {"n": 1}}).status_code == 201


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"dedup_window_seconds": None}, "/dedup_window_seconds"),
        ({"dedup_key": None}, "/dedup_window_seconds"),
        ({"dedup_key": None, "dedup_window_seconds": None, "dedup_mode": "reject"}, "/dedup_mode"),
        ({"dedup_window_seconds": 0.5}, "/dedup_window_seconds"),
        ({"dedup_window_seconds": 30 * 86_400 + 1}, "/dedup_window_seconds"),
        ({"dedup_key": ""}, "/dedup_key"),
        ({"dedup_key": "k" * 201}, "/dedup_key"),
        ({"dedup_mode": "merge"}, "/dedup_mode"),
    ],
)
def test_the_fields_of_a_window_go_together(api: Api, change: dict[str, object], pointer: str) -> None:
    response = api.submit(DEDUPED | change)
    assert (response.status_code, slug(response)) == (422, "invalid-fields")
    assert response.json()["errors"][0]["pointer"] == pointer
    assert not api.log.records


def test_of_parallel_submissions_one_is_accepted(api: Api) -> None:
    async def post(number: int) -> httpx.Response:
        return await api.send(
            "POST",
            "/tasks",
            content=orjson.dumps(deduped(number)),
            headers={"content-type": "application/json"},
        )

    async def together() -> list[httpx.Response]:
        return list(await asyncio.gather(*map(post, range(50))))

    responses = api.run(together())
    assert sorted(each.status_code for each in responses) == [200] * 49 + [201]
    assert len({each.json()["task_id"] for each in responses}) == len(api.log.records) == 1


def test_a_crash_between_window_and_log_lets_the_next_one_in_after_a_while(
    make_api: Callable[..., Api],
) -> None:
    api = make_api(request_timeout_seconds=0.2)
    left = leave_claim(api)
    early = api.submit(deduped(2))
    assert (early.status_code, slug(early)) == (503, "submission-in-progress")
    assert early.json()["task_id"] == str(left.task_id)
    api.clock.ms = left.deadline
    accepted = api.submit(deduped(2))
    assert accepted.status_code == 201
    assert accepted.json()["task_id"] != str(left.task_id)
    assert api.submit(deduped(3)).json()["task_id"] == accepted.json()["task_id"]
    assert len(api.log.records) == 1


def test_what_was_certainly_refused_holds_no_window(api: Api) -> None:
    api.log.failure = QueueFull("x")
    assert slug(api.submit(deduped(1))) == "not-accepted"
    api.log.failure = None
    assert api.submit(deduped(2)).status_code == 201


def test_without_cassandra_windows_are_refused(api: Api) -> None:
    async def away(*_: object) -> None:
        raise Unavailable("away")

    api.claims.take = away  # type: ignore[method-assign, assignment]
    assert slug(api.submit(deduped(1))) == "claims-unavailable"
    assert not api.log.records


# ---- with an idempotency key besides ----------------------------------------------------------------------


def test_a_repeated_request_gets_the_first_one_s_answer_whichever_it_was(api: Api) -> None:
    accepted = api.submit(deduped(1, idempotency_key="a"))
    duplicate = api.submit(deduped(2, idempotency_key="b"))
    assert (accepted.status_code, duplicate.status_code) == (201, 200)
    # Also when the window is over: the request was answered already.
    for later in (0, WINDOW_MS + 1):
        api.clock.ms = NOW_MS + later
        assert api.submit(deduped(1, idempotency_key="a")).json() == accepted.json()
        assert api.submit(deduped(2, idempotency_key="b")).json() == duplicate.json()
    assert len(api.log.records) == 1
    assert slug(api.submit(deduped(3, idempotency_key="b"))) == "idempotency-conflict"


def test_a_crash_behind_both_keys_heals_under_the_same_id(make_api: Callable[..., Api]) -> None:
    api = make_api(request_timeout_seconds=0.2)
    body = deduped(1, idempotency_key="a")

    class Died(BaseException):
        pass

    append = api.log.append

    def die(_: object) -> None:
        raise Died

    api.log.append = die  # type: ignore[method-assign, assignment]
    with pytest.raises(Died):
        api.submit(body)
    api.log.append = append  # type: ignore[method-assign]
    held = {claim.task_id for claim in api.claims.rows.values()}
    assert (len(api.claims.rows), len(held)) == (2, 1)
    assert slug(api.submit(body)) == "submission-in-progress"
    api.clock.ms += LONG_MS
    assert api.submit(body).status_code == 201
    assert {each.task_id for each in api.log.submissions()} == held
    assert api.submit(body).headers["idempotency-replayed"] == "true"


def test_a_window_that_is_being_decided_gives_the_key_back(make_api: Callable[..., Api]) -> None:
    api = make_api(request_timeout_seconds=0.2)
    left = leave_claim(api)
    body = deduped(1, idempotency_key="a")
    assert slug(api.submit(body)) == "submission-in-progress"
    api.clock.ms = left.deadline
    assert api.submit(body).status_code == 201
