"""Idempotency keys: one request, however often it is sent and wherever a process dies, is one task."""

from __future__ import annotations

import asyncio
import json
from asyncio import Future
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import httpx
import orjson
import pytest
from api_kit import NOW_MS, Api, slug
from hypothesis import given
from hypothesis import strategies as st

from taskline.api.body import parse_submission
from taskline.api.idempotency import request_hash
from taskline.errors import DeliveryUnknown, QueueFull, Unavailable
from taskline.infra.log import OutRecord, Position
from taskline.schemas.ids import TaskId, created_at_ms, new_task_id
from taskline.state.claims import Claim, ClaimKey, ClaimKind
from taskline.state.keys import Scope, mint
from taskline.state.keys_memory import MemoryKeys

GOOD = {"task_type": "any.json", "payload": {"n": 1}}
KEYED = GOOD | {"idempotency_key": "order-17"}
NAME = ClaimKey(tenant="default", kind=ClaimKind.IDEMPOTENCY, name="order-17")
DAY_MS = 86_400_000
# Beyond the longest time that a claim's owner may take, with the kit's time-outs.
LONG_MS = 60_000


def ids(api: Api) -> list[TaskId]:
    return [each.task_id for each in api.log.submissions()]


async def post(api: Api, body: dict[str, Any]) -> httpx.Response:
    return await api.send(
        "POST", "/tasks", content=orjson.dumps(body), headers={"content-type": "application/json"}
    )


def leave_claim(api: Api, *, deadline: int) -> Claim:
    """What a process leaves that dies between the key and the log."""
    claim = Claim(
        key=NAME,
        task_id=new_task_id(NOW_MS - 1_000),
        owner=uuid4(),
        request_hash=request_hash(parse_submission(orjson.dumps(KEYED))),
        deadline=deadline,
        expires_at=NOW_MS + DAY_MS,
    )
    api.claims.rows[NAME] = claim
    return claim


class Held:
    """A log that acknowledges when it is told to."""

    def __init__(self, api: Api) -> None:
        self.futures: list[Future[Position]] = []
        self.asked = asyncio.Event()
        self._append = api.log.append
        api.log.silent = True
        api.log.append = self.append  # type: ignore[method-assign]

    def append(self, record: OutRecord) -> Future[Position]:
        self.futures.append(self._append(record))
        self.asked.set()
        return self.futures[-1]

    def acknowledge(self) -> None:
        for future in self.futures:
            if not future.done():
                future.set_result(Position(topic="t", partition=0, offset=0))


# ---- the usual --------------------------------------------------------------------------------------------


def test_the_same_request_again_is_answered_with_the_same_task(api: Api) -> None:
    first = api.submit(KEYED)
    assert "idempotency-replayed" not in first.headers
    for body in (KEYED, dict(reversed(KEYED.items())), KEYED | {"priority": None}):
        again = api.submit(body)
        assert (again.status_code, again.json()) == (201, first.json())
        assert again.headers["idempotency-replayed"] == "true"
        assert again.headers["location"] == first.headers["location"]
    (submission,) = api.log.submissions()
    assert submission.idempotency_key == "order-17"
    assert str(submission.task_id) == first.json()["task_id"]


def test_the_key_may_come_in_the_header(api: Api) -> None:
    first = api.submit(GOOD, headers={"idempotency-key": "order-17"})
    for body, header in ((KEYED, "order-17"), (GOOD, '"order-17"'), (KEYED, None)):
        headers = {} if header is None else {"idempotency-key": header}
        assert api.submit(body, headers=headers).json() == first.json()
    assert len(api.log.records) == 1


@pytest.mark.parametrize("header", ["other", "", '""', "k" * 201])
def test_a_header_that_is_no_key_or_another_one_is_refused(api: Api, header: str) -> None:
    response = api.submit(KEYED, headers={"idempotency-key": header})
    assert (response.status_code, slug(response)) == (422, "invalid-fields")
    assert response.json()["errors"][0]["pointer"] == "/idempotency_key"
    assert not api.log.records


@pytest.mark.parametrize("key", ["", "k" * 201, 5])
def test_a_field_that_is_no_key_is_refused(api: Api, key: object) -> None:
    response = api.submit(GOOD | {"idempotency_key": key})
    assert (response.status_code, slug(response)) == (422, "invalid-fields")


def test_another_request_with_the_key_is_a_conflict(api: Api) -> None:
    first = api.submit(KEYED).json()
    for change in ({"payload": {"n": 2}}, {"priority": "low"}, {"delay_seconds": 5}):
        response = api.submit(KEYED | change)
        assert (response.status_code, slug(response)) == (409, "idempotency-conflict")
        assert response.json()["task_id"] == first["task_id"]
    assert len(api.log.records) == 1


def test_a_wrong_request_does_not_take_the_key(api: Api) -> None:
    assert api.submit(KEYED | {"task_type": "geo.nearest"}).status_code == 400
    assert api.submit(KEYED | {"payload": "x" * 3_000}).status_code == 413
    assert not api.claims.rows
    assert api.submit(KEYED).status_code == 201


def test_keys_of_tenants_have_nothing_to_do_with_each_other(make_api: Callable[..., Api]) -> None:
    minted = [mint(tenant=tenant, scopes=[Scope.SUBMIT], now_ms=NOW_MS) for tenant in ("one", "two")]
    api = make_api(auth="keys", keys=MemoryKeys([each.key for each in minted]))
    for number, each in enumerate(minted):
        headers = {"authorization": f"Bearer {each.token}"}
        assert api.submit(KEYED | {"payload": number}, headers=headers).status_code == 201
    assert len(set(ids(api))) == 2


def test_a_key_is_forgotten_in_the_end(make_api: Callable[..., Api]) -> None:
    api = make_api(idempotency_hours=24)
    api.submit(KEYED)
    api.clock.ms += DAY_MS - 1
    assert api.submit(KEYED).headers["idempotency-replayed"]
    api.clock.ms += 1
    assert "idempotency-replayed" not in api.submit(KEYED | {"payload": "another"}).headers
    assert len(set(ids(api))) == 2


def test_a_delay_counts_from_the_first_request(api: Api) -> None:
    delayed = KEYED | {"delay_seconds": 90}
    first = api.submit(delayed).json()
    api.clock.ms += 30_000
    assert api.submit(delayed).json() == first


def test_a_request_that_came_in_time_may_be_repeated_after_its_start_by(api: Api) -> None:
    brief = KEYED | {"start_by": "2026-11-29T15:05:00Z"}
    first = api.submit(brief).json()
    api.clock.ms += LONG_MS
    assert api.submit(brief).json() == first
    assert api.submit(brief | {"idempotency_key": "another"}).status_code == 422


def test_parallel_requests_are_one_task(api: Api) -> None:
    async def together() -> list[httpx.Response]:
        return list(await asyncio.gather(*(post(api, KEYED) for _ in range(50))))

    responses = api.run(together())
    assert {each.status_code for each in responses} == {201}
    assert len({each.json()["task_id"] for each in responses}) == len(api.log.records) == 1
    assert sum("idempotency-replayed" not in each.headers for each in responses) == 1


# ---- faults -----------------------------------------------------------------------------------------------


def test_without_cassandra_keyed_submissions_are_refused_and_plain_ones_go_on(api: Api) -> None:
    async def away(*_: object) -> None:
        raise Unavailable("Cassandra is away")

    for name in ("take", "find", "renew"):
        setattr(api.claims, name, away)
    response = api.submit(KEYED)
    assert (response.status_code, slug(response)) == (503, "claims-unavailable")
    assert not api.log.records
    assert api.submit(GOOD).status_code == 201


def test_a_store_that_hangs_is_not_waited_for_longer_than_a_request_may_take(
    make_api: Callable[..., Api],
) -> None:
    api = make_api(request_timeout_seconds=0.05)

    async def hanging(*_: object) -> None:
        await asyncio.Event().wait()

    api.claims.take = hanging  # type: ignore[method-assign, assignment]
    assert slug(api.submit(KEYED)) == "claims-unavailable"
    assert not api.log.records


def test_a_claim_that_came_too_late_is_not_used(api: Api) -> None:
    take = api.claims.take

    async def slow(wanted: Claim, now_ms: int) -> Claim:
        api.clock.ms += 30_000
        return await take(wanted, now_ms)

    api.claims.take = slow  # type: ignore[method-assign]
    assert slug(api.submit(KEYED)) == "claims-unavailable"
    assert not api.log.records
    # It was given up, so that nobody has to wait for it.
    api.claims.take = take  # type: ignore[method-assign]
    assert api.submit(KEYED).status_code == 201


@pytest.mark.parametrize("applied", [True, False])
def test_a_claim_of_which_nobody_knows_whether_it_stands_is_healed_by_the_next_request(
    make_api: Callable[..., Api], applied: bool
) -> None:
    api = make_api(request_timeout_seconds=0.2)
    take = api.claims.take

    async def silent(wanted: Claim, now_ms: int) -> Claim:
        if applied:
            await take(wanted, now_ms)
        raise Unavailable("timed out")

    api.claims.take = silent  # type: ignore[method-assign]
    assert slug(api.submit(KEYED)) == "claims-unavailable"
    api.claims.take = take  # type: ignore[method-assign]
    early = api.submit(KEYED)
    if applied:
        assert slug(early) == "submission-in-progress"
        assert not api.log.records
    api.clock.ms += LONG_MS
    answer = api.submit(KEYED)
    assert answer.status_code == 201
    assert len(api.log.records) == 1
    if applied:
        assert answer.json()["task_id"] == early.json()["task_id"]


def test_a_crash_between_key_and_log_heals_under_the_same_id(make_api: Callable[..., Api]) -> None:
    api = make_api(request_timeout_seconds=0.2)
    left = leave_claim(api, deadline=NOW_MS + 7_500)
    early = api.submit(KEYED)
    assert (early.status_code, slug(early)) == (503, "submission-in-progress")
    assert early.json()["task_id"] == str(left.task_id)
    assert early.headers["retry-after"] == "8"
    assert not api.log.records
    api.clock.ms = left.deadline
    healed = api.submit(KEYED)
    assert healed.status_code == 201
    assert ids(api) == [left.task_id]
    assert healed.json()["created_at"] == "2026-11-29T15:04:04.120Z"
    assert created_at_ms(left.task_id) == NOW_MS - 1_000
    assert api.submit(KEYED).headers["idempotency-replayed"] == "true"


def test_of_many_who_find_the_owner_dead_one_takes_its_place(api: Api) -> None:
    left = leave_claim(api, deadline=NOW_MS)

    async def together() -> list[httpx.Response]:
        return list(await asyncio.gather(*(post(api, KEYED) for _ in range(50))))

    responses = api.run(together())
    assert {each.json()["task_id"] for each in responses} == {str(left.task_id)}
    assert ids(api) == [left.task_id]


def test_a_crash_after_the_log_is_seen_in_the_view(api: Api) -> None:
    async def lost(*_: object) -> None:
        raise Unavailable("timed out")

    api.claims.settle = lost  # type: ignore[method-assign, assignment]
    first = api.submit(KEYED)
    assert first.status_code == 201
    (submission,) = api.log.submissions()
    api.store.put(submission)
    for later in (0, LONG_MS):
        api.clock.ms += later
        again = api.submit(KEYED)
        assert (again.json(), again.headers["idempotency-replayed"]) == (first.json(), "true")
    assert len(api.log.records) == 1


def test_a_projector_that_lags_makes_no_second_task(api: Api) -> None:
    first = api.submit(KEYED).json()
    assert not api.store.tasks
    for later in (0, LONG_MS, DAY_MS // 2):
        api.clock.ms += later
        assert api.submit(KEYED).json() == first
    assert len(api.log.records) == 1


def test_a_second_caller_waits_for_the_first(api: Api) -> None:
    held = Held(api)

    async def both() -> list[httpx.Response]:
        first = asyncio.ensure_future(post(api, KEYED))
        await held.asked.wait()
        second = asyncio.ensure_future(post(api, KEYED))
        await asyncio.sleep(0.1)
        assert not second.done()
        held.acknowledge()
        return [await first, await second]

    first, second = api.run(both())
    assert first.json() == second.json()
    assert len(api.log.records) == 1


def test_an_unknown_delivery_is_settled_by_sending_the_request_again(make_api: Callable[..., Api]) -> None:
    api = make_api(request_timeout_seconds=0.2)
    api.log.failure = DeliveryUnknown("timed out")
    unknown = api.submit(KEYED)
    assert slug(unknown) == "delivery-unknown"
    assert "safe to submit it again" in unknown.json()["detail"]
    api.log.failure = None
    assert slug(api.submit(KEYED)) == "submission-in-progress"
    api.clock.ms += LONG_MS
    assert api.submit(KEYED).json()["task_id"] == unknown.json()["task_id"]
    assert len(set(ids(api))) == 1


def test_what_was_certainly_refused_may_be_tried_at_once(api: Api) -> None:
    api.log.failure = QueueFull("x")
    assert slug(api.submit(KEYED)) == "not-accepted"
    api.log.failure = None
    assert api.submit(KEYED).status_code == 201


# ---- what is the same request -----------------------------------------------------------------------------


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.sampled_from(["high", "low"]),
        "timeout_seconds": st.integers(1, 90),
        "max_retries": st.integers(0, 9),
        "affinity_key": st.text("ab", min_size=1, max_size=2),
        "delay_seconds": st.integers(1, 90),
        "start_by": st.integers(1, 9).map(lambda day: f"2027-01-0{day}T10:00:00+00:00"),
    },
)


def shuffled(value: Any, draw: Callable[[Any], Any]) -> Any:
    """The same value, with the fields of its objects in another order."""
    if isinstance(value, dict):
        items = draw(st.permutations(list(value.items())))
        return {name: shuffled(inner, draw) for name, inner in items}
    return [shuffled(inner, draw) for inner in value] if isinstance(value, list) else value


def respelt(options: dict[str, Any]) -> dict[str, Any]:
    """The same options, written otherwise."""
    other = dict(options)
    for name in ("timeout_seconds", "delay_seconds"):
        if name in other:
            other[name] = float(other[name])
    if "start_by" in other:
        other["start_by"] = other["start_by"].replace("10:00:00+00:00", "11:00:00.000+01:00")
    return {"scheduled_at": None, "dedup_key": None} | other


def hash_of(payload: Any, options: dict[str, Any]) -> bytes:
    body = json.dumps({"task_type": "any.json", "payload": payload} | options)
    return request_hash(parse_submission(body.encode()))


@given(payload=VALUES, options=OPTIONS, data=st.data())
def test_the_same_meaning_has_the_same_hash(
    payload: Any, options: dict[str, Any], data: st.DataObject
) -> None:
    written = hash_of(payload, options)
    assert written == hash_of(shuffled(payload, data.draw), shuffled(respelt(options), data.draw))


@given(one=st.tuples(VALUES, OPTIONS), two=st.tuples(VALUES, OPTIONS))
def test_another_meaning_has_another_hash(one: Any, two: Any) -> None:
    # By their text, since Python has 1 == 1.0 == True.
    same = repr(canonical(one)) == repr(canonical(two))
    assert (hash_of(*one) == hash_of(*two)) == same


def canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return "object", sorted((name, canonical(inner)) for name, inner in value.items())
    return [canonical(inner) for inner in value] if isinstance(value, list | tuple) else value


def test_the_key_itself_does_not_count(api: Api) -> None:
    assert hash_of(1, {}) == hash_of(1, {"idempotency_key": "k"}) != hash_of(1, {"affinity_key": "k"})
