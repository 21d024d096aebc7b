"""dedup_mode "replace": a second task takes the place of one that waits, whatever dies in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import httpx
import orjson
import pytest
from api_kit import NOW_MS, Api, FixedClock, slug
from api_projection import LIFECYCLE, Projection
from read_kit import event, started, submitted

from taskline.api.problems import REPLACE_UNKNOWN, ProblemError
from taskline.api.replacing import Replacing
from taskline.errors import DeliveryUnknown, QueueFull, Unavailable
from taskline.producers import cancelling
from taskline.producers.cancelling import Cancellation, Fate
from taskline.schemas.events import DeadLettered, Expired, Failed, Released, RetryScheduled, Succeeded
from taskline.schemas.ids import new_task_id
from taskline.state.claims import Claim, ClaimKey, ClaimKind
from taskline.state.fold import fold

WINDOW_MS = 600_000
EXECUTION = new_task_id(NOW_MS)
NAME = ClaimKey(tenant="default", kind=ClaimKind.DEDUP, name="any.json ada")
# Beyond the longest time that a claim's owner may take, with the kit's time-outs.
LONG_MS = 60_000


def replacing(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "task_type": "any.json",
        "payload": {"n": number},
        "dedup_key": "ada",
        "dedup_window_seconds": WINDOW_MS // 1000,
        "dedup_mode": "replace",
    } | changes


async def post(api: Api, body: dict[str, Any]) -> httpx.Response:
    """Without the kit's checks, whose document costs a second to make."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=api.app), base_url="http://t") as client:
        return await client.post("/tasks", json=body)


@pytest.fixture(autouse=True)
def no_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker runs here that would have to learn of a notice first."""
    monkeypatch.setattr(cancelling, "NOTICE_SPREAD_SECONDS", 0.0)


@pytest.fixture
def projection() -> Projection:
    return Projection()


@pytest.fixture
def api(make_api: Callable[..., Api], projection: Projection) -> Iterator[Api]:
    made = make_api(request_timeout_seconds=0.5)
    projection.attach(made)
    return made


# ---- who makes way ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"delay_seconds": 900}], ids=["pending", "scheduled"])
def test_a_task_that_waits_makes_way(api: Api, projection: Projection, options: dict[str, Any]) -> None:
    first = api.submit(replacing(1, **options)).json()
    second = api.submit(replacing(2))
    assert second.status_code == 201
    assert second.json()["task_id"] != first["task_id"]
    assert projection.standing() == [UUID(second.json()["task_id"])]
    assert projection.statuses()[UUID(first["task_id"])] == "cancelled"
    assert api.claims.rows[NAME].outcome == UUID(second.json()["task_id"])
    third = api.submit(replacing(3))
    assert projection.standing() == [UUID(third.json()["task_id"])]


def events_of(name: str, task: Any) -> list[Any]:
    run = {"execution": EXECUTION}
    failed = {
        "error_class": "OSError", "message": "x", "retryable": True, "traceback": None,
    } | run  # fmt: skip
    begun = started(task, EXECUTION)
    return {
        "released": lambda: [begun, event(Released, task, reason="shutdown", **run)],
        "failed": lambda: [
            begun,
            event(Failed, task, **failed),
            event(RetryScheduled, task, due=NOW_MS + 90_000),
        ],
        "running": lambda: [begun],
        "completed": lambda: [begun, event(Succeeded, task, **run)],
        "expired": lambda: [event(Expired, task)],
        "dead": lambda: [begun, event(Failed, task, **failed), event(DeadLettered, task, reason="exhausted")],
    }[name]()


@pytest.mark.parametrize("how", ["released", "failed"])
def test_a_task_that_waits_to_start_again_makes_way(api: Api, projection: Projection, how: str) -> None:
    api.submit(replacing(1))
    (task,) = projection.submissions.values()
    for each in events_of(how, task):
        projection.add(each)
    second = api.submit(replacing(2))
    assert second.status_code == 201
    assert projection.standing() == [UUID(second.json()["task_id"])]


@pytest.mark.parametrize("how", ["running", "completed", "expired", "dead"])
def test_what_runs_or_is_over_stands_and_says_so(api: Api, projection: Projection, how: str) -> None:
    first = api.submit(replacing(1)).json()
    (task,) = projection.submissions.values()
    for each in events_of(how, task):
        projection.add(each)
    second = api.submit(replacing(2))
    assert second.status_code == 200
    assert second.json() == {
        "task_id": first["task_id"],
        "duplicate": True,
        "task_type": "any.json",
        "created_at": first["created_at"],
        "status": how,
    }
    assert len(projection.submissions) == 1


def test_a_cancelled_one_stands_for_nobody_but_in_the_mode_reject(api: Api, projection: Projection) -> None:
    first = api.submit(replacing(1)).json()
    assert api.request("DELETE", f"/tasks/{first['task_id']}").status_code == 200
    duplicate = api.submit(replacing(2, dedup_mode="reject"))
    assert (duplicate.status_code, duplicate.json()["status"]) == (200, "cancelled")
    second = api.submit(replacing(3))
    assert second.status_code == 201
    assert projection.standing() == [UUID(second.json()["task_id"])]


def test_the_window_begins_anew_with_the_one_that_replaces(api: Api, projection: Projection) -> None:
    api.submit(replacing(1))
    api.clock.ms += WINDOW_MS - 1
    second = api.submit(replacing(2)).json()
    api.clock.ms += WINDOW_MS - 1
    assert api.submit(replacing(3, dedup_mode="reject")).json()["task_id"] == second["task_id"]
    api.clock.ms += 1
    # Outside the window nobody has to make way.
    assert api.submit(replacing(4)).status_code == 201
    assert len(projection.standing()) == 2


def test_a_first_task_that_is_forgotten_stands_for_the_rest_of_its_window(api: Api) -> None:
    month_ms = 30 * 86_400_000
    first = api.submit(replacing(1, dedup_window_seconds=month_ms // 1000)).json()
    api.store.tasks.clear()
    api.clock.ms += month_ms - 1
    early = api.submit(replacing(2))
    assert slug(early) == "replacement-undecided"
    api.clock.ms += 2
    # The window is over, too; the same with one that is not.
    held = api.claims.rows[NAME]
    api.claims.rows[NAME] = Claim(
        key=NAME, task_id=held.task_id, owner=held.owner, request_hash=b"", deadline=held.deadline,
        expires_at=api.clock.ms + 1_000, outcome=held.task_id,
    )  # fmt: skip
    late = api.submit(replacing(2))
    assert (late.status_code, late.json()["task_id"], late.json()["status"]) == (200, first["task_id"], None)


# ---- what nobody can tell ---------------------------------------------------------------------------------


def undecided(answer: httpx.Response, first: str) -> None:
    assert (answer.status_code, slug(answer)) == (503, "replacement-undecided")
    assert answer.json()["task_id"] == first
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("keyed", [{}, {"idempotency_key": "k"}], ids=["plain", "keyed"])
@pytest.mark.parametrize("fault", ["lagging", "notice", "request", "refused", "view"])
def test_what_is_not_known_in_time_is_503_and_heals(
    api: Api, projection: Projection, fault: str, keyed: dict[str, str]
) -> None:
    first = api.submit(replacing(1)).json()["task_id"]
    projection.lagging = fault == "lagging"
    projection.deaf = {"notice": "tasks.cancels.", "request": LIFECYCLE}.get(fault)
    api.log.failure = DeliveryUnknown("no answer") if fault == "refused" else None
    api.store.failure = Unavailable("away") if fault == "view" else None
    undecided(api.submit(replacing(2, **keyed)), first)
    projection.lagging, projection.deaf, api.log.failure, api.store.failure = False, None, None, None
    projection.catch_up()
    second = api.submit(replacing(2, **keyed))
    assert second.status_code == 201
    assert projection.standing() == [UUID(second.json()["task_id"])]
    assert len(projection.submissions) == 2


def test_a_first_task_that_the_view_does_not_have_yet_is_not_called_over(
    api: Api, projection: Projection
) -> None:
    projection.lagging = True
    first = api.submit(replacing(1)).json()["task_id"]
    undecided(api.submit(replacing(2)), first)
    projection.catch_up()
    projection.lagging = False
    assert api.submit(replacing(2)).status_code == 201


def test_a_task_that_is_not_taken_after_all_leaves_the_window_free(api: Api, projection: Projection) -> None:
    api.submit(replacing(1))
    renew = api.claims.renew

    async def then_full(*given: Any) -> bool:
        done = await renew(*given)
        api.log.failure = QueueFull("x")
        return done

    api.claims.renew = then_full  # type: ignore[method-assign]
    assert slug(api.submit(replacing(2))) == "not-accepted"
    api.claims.renew, api.log.failure = renew, None  # type: ignore[method-assign]
    third = api.submit(replacing(3))
    assert third.status_code == 201
    assert projection.standing() == [UUID(third.json()["task_id"])]


# ---- together ---------------------------------------------------------------------------------------------


def test_of_parallel_ones_the_last_stays(make_api: Callable[..., Api], projection: Projection) -> None:
    api = make_api(request_timeout_seconds=5)
    projection.attach(api)

    async def together() -> list[httpx.Response]:
        return list(await asyncio.gather(*(post(api, replacing(number)) for number in range(20))))

    responses = api.run(together())
    assert {each.status_code for each in responses} == {201}
    assert projection.standing() == [UUID(responses[-1].json()["task_id"])]
    # Each is cancelled once, by the one after it.
    assert sum(record.topic == LIFECYCLE for record in api.log.records) == 19


def test_of_two_processes_that_replace_the_same_task_one_wins_and_the_other_replaces_the_winner(
    make_api: Callable[..., Api], projection: Projection
) -> None:
    one, two = make_api(request_timeout_seconds=5), make_api(request_timeout_seconds=5)
    for each in (one, two):
        projection.attach(each)
    two.claims.rows, two.log.records = one.claims.rows, one.log.records
    first = one.submit(replacing(0)).json()["task_id"]
    met = asyncio.Barrier(2)

    def meeting(renew: Any) -> Any:
        async def renewing(held: Claim, wanted: Claim, now_ms: int) -> bool:
            if str(held.task_id) == first:
                await met.wait()
            done: bool = await renew(held, wanted, now_ms)
            return done

        return renewing

    for each in (one, two):
        each.claims.renew = meeting(each.claims.renew)  # type: ignore[method-assign]

    async def together() -> list[httpx.Response]:
        return list(await asyncio.gather(post(one, replacing(1)), post(two, replacing(2))))

    responses = one.run(together())
    assert {each.status_code for each in responses} == {201}
    assert len(projection.submissions) == 3
    assert projection.standing() == [one.claims.rows[NAME].task_id]


def test_in_a_batch_the_last_stays(api: Api, projection: Projection) -> None:
    tasks = [replacing(number) for number in range(5)]
    tasks.insert(2, replacing(9, dedup_key=None, dedup_window_seconds=None))
    tasks += [replacing(8, dedup_key="bob"), replacing(7, idempotency_key="k")]
    answer = api.request(
        "POST",
        "/tasks/batch",
        content=orjson.dumps({"tasks": tasks}),
        headers={"content-type": "application/json"},
    )
    results = answer.json()["results"]
    assert [each["status"] for each in results] == [201, 201, 422, 201, 201, 201, 201, 201]
    ids = [UUID(each["task"]["task_id"]) for each in results[-2:]]
    assert set(projection.standing()) == set(ids)


def test_too_many_at_once_are_told_to_come_again(
    make_api: Callable[..., Api], projection: Projection
) -> None:
    api = make_api(request_timeout_seconds=0.2)
    projection.attach(api)
    api.submit(replacing(0))
    projection.deaf = "tasks.cancels."

    async def together() -> list[httpx.Response]:
        return list(await asyncio.gather(*(post(api, replacing(number)) for number in range(5))))

    responses = api.run(together())
    assert {slug(each) for each in responses} == {"replacement-undecided"}


# ---- whatever dies ----------------------------------------------------------------------------------------


@dataclass
class Mortal:
    """An app whose process dies at its n-th step outside itself: before the step is done, or after."""

    api: Api
    dies_at: int
    after: bool
    steps: list[str] = field(default_factory=list)
    dead: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.api.log.append = self._append(self.api.log.append)  # type: ignore[method-assign]
        for name in ("take", "find", "renew", "settle"):
            setattr(self.api.claims, name, self._step(name, getattr(self.api.claims, name)))
        self.api.store.read = self._step("read", self.api.store.read)  # type: ignore[method-assign]

    def submit(self, body: dict[str, Any]) -> httpx.Response | None:
        """None: it died."""
        return self.api.run(self._submit(body))

    async def _submit(self, body: dict[str, Any]) -> httpx.Response | None:
        request = asyncio.ensure_future(post(self.api, body))
        dying = asyncio.ensure_future(self.dead.wait())
        await asyncio.wait([request, dying], return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if request.done():
            return request.result()
        request.cancel()
        with suppress(asyncio.CancelledError):
            await request
        return None

    def _due(self, name: str) -> bool:
        self.steps.append(name)
        return len(self.steps) - 1 == self.dies_at

    def _append(self, append: Any) -> Any:
        def step(record: Any) -> asyncio.Future[Any]:
            due = not self.dead.is_set() and self._due(record.topic)
            if not self.dead.is_set() and not (due and not self.after):
                future: asyncio.Future[Any] = append(record)
                if not due:
                    return future
            self.dead.set()
            return asyncio.get_running_loop().create_future()

        return step

    def _step(self, name: str, inner: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
        async def step(*given: Any) -> Any:
            due = not self.dead.is_set() and self._due(name)
            if not self.dead.is_set() and not (due and not self.after):
                done = await inner(*given)
                if not due:
                    return done
            self.dead.set()
            return await asyncio.Event().wait()

        return step


STEPS = {
    "plain": ["take", "read", "tasks.cancels.default", LIFECYCLE, "read", "renew", "tasks.normal", "settle"],
    "keyed": [
        "take", "take", "read", "tasks.cancels.default", LIFECYCLE, "read", "renew", "tasks.normal",
        "settle", "settle",
    ],
}  # fmt: skip


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("kind", "step"),
    [(kind, step) for kind, steps in STEPS.items() for step in range(len(steps) + 1)],
)
def test_a_process_that_dies_anywhere_is_healed_by_the_same_request(
    make_api: Callable[..., Api], kind: str, step: int, after: bool
) -> None:
    projection = Projection()
    first, second = make_api(request_timeout_seconds=0.3), make_api(request_timeout_seconds=0.3)
    second.claims.rows = first.claims.rows
    for each in (first, second):
        projection.attach(each)
    assert first.run(post(first, replacing(1))).status_code == 201
    body = replacing(2) | ({"idempotency_key": "k"} if kind == "keyed" else {})
    mortal = Mortal(first, dies_at=step, after=after)
    answer = mortal.submit(body)
    if step < len(STEPS[kind]):
        assert answer is None
        assert mortal.steps == STEPS[kind][: step + 1]
    else:
        assert answer is not None
        assert answer.status_code == 201
        assert mortal.steps == STEPS[kind]
    # Another process gets the same request, until it is answered.
    for _ in range(3):
        answer = second.run(post(second, body))
        if answer.status_code != 503:
            break
        second.clock.ms += LONG_MS
    assert answer.status_code == 201
    task_id = UUID(answer.json()["task_id"])
    assert projection.standing() == [task_id]
    assert second.claims.rows[NAME].task_id == task_id
    # Of a keyed request there was never a second task.
    assert len(projection.submissions) <= (2 if kind == "keyed" else 3)
    # And nobody has to wait any more.
    assert second.run(post(second, replacing(3))).status_code == 201
    assert len(projection.standing()) == 1


def test_a_repetition_does_not_take_its_own_task_s_place(
    make_api: Callable[..., Api], projection: Projection
) -> None:
    """It died when the window knew of the task in the log, and neither the key nor the view did."""
    first, second = make_api(request_timeout_seconds=0.3), make_api(request_timeout_seconds=0.3)
    second.claims.rows = first.claims.rows
    for each in (first, second):
        projection.attach(each)
    assert first.run(post(first, replacing(1))).status_code == 201
    append = first.log.append

    def lagging(record: Any) -> asyncio.Future[Any]:
        projection.lagging = record.topic == "tasks.normal"
        return append(record)

    first.log.append = lagging  # type: ignore[method-assign]
    body = replacing(2, idempotency_key="k")
    mortal = Mortal(first, dies_at=STEPS["keyed"].index("settle"), after=True)
    assert mortal.submit(body) is None
    second.clock.ms += LONG_MS
    answer = second.run(post(second, body))
    assert (answer.status_code, answer.headers["idempotency-replayed"]) == (201, "true")
    projection.catch_up()
    assert projection.standing() == [UUID(answer.json()["task_id"])]
    assert len(second.log.records) == 0


def test_a_cancel_that_is_only_asked_for_makes_no_place() -> None:
    first = submitted()

    class Asked:
        async def cancel(self, task_id: UUID, *, tenant: str) -> Cancellation:
            assert (task_id, tenant) == (first.task_id, "default")
            return Cancellation(fate=Fate.REQUESTED, state=fold(first, ()))

    with pytest.raises(ProblemError) as raised:
        asyncio.run(
            Replacing(Asked(), retention_days=1, clock=FixedClock()).withdraw(
                first.task_id, task_type="any.json", tenant="default", seconds=1
            )
        )
    assert raised.value.kind is REPLACE_UNKNOWN
