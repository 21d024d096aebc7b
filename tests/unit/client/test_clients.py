"""Both clients on the API in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any
from uuid import uuid4

import pytest
from api_kit import Api
from client_kit import TASK_ID, Caller, on_api
from read_kit import event, started, submitted

from taskline.api.models import MAX_BATCH_TASKS, TaskSubmission
from taskline.client import (
    InvalidFields,
    NotEnded,
    ServiceUnavailable,
    Submit,
    SubmitFailure,
    SubmitFields,
    SubmittedTask,
    Unauthorized,
)
from taskline.client.calls import MAX_BATCH
from taskline.errors import (
    DeliveryUnknown,
    InvalidCursor,
    InvalidOption,
    InvalidPayload,
    LetterNotFound,
    PayloadTooLarge,
    TasklineError,
    TaskNotFound,
    Unavailable,
    UnknownTaskType,
)
from taskline.schemas.events import Priority, Succeeded
from taskline.state.keys_memory import MemoryKeys
from taskline.state.status import TaskStatus


class Colour(Enum):
    RED = "red"


@dataclass
class Place:
    iata: str
    lat: float


def test_a_task_is_submitted_with_its_options(api: Api, client: Caller) -> None:
    done = client(
        "submit",
        "geo.nearest",
        Place(iata="LAX", lat=33.9),
        priority=Priority.HIGH,
        timeout_seconds=2.5,
        max_retries=0,
        affinity_key="a",
        start_by=datetime(2030, 1, 1, tzinfo=UTC),
    )
    assert isinstance(done, SubmittedTask)
    (task,) = api.log.submissions()
    assert (done.task_id, done.queue, done.priority, done.status) == (
        task.task_id, "geo", Priority.HIGH, TaskStatus.PENDING,
    )  # fmt: skip
    assert (task.timeout_ms, task.max_retries, task.affinity_key) == (2_500, 0, "a")
    assert task.start_by == 1_893_456_000_000


def test_the_same_key_gives_the_same_task(api: Api, client: Caller) -> None:
    one, two = (client("submit", "any.json", {"n": 1}, idempotency_key="order-17") for _ in range(2))
    assert (one.task_id, one.replayed, two.replayed) == (two.task_id, False, True)
    assert len(api.log.records) == 1


def test_a_second_task_inside_a_dedup_window_is_told_apart(api: Api, client: Caller) -> None:
    one, two = (
        client("submit", "any.json", {"n": number}, dedup_key="ada", dedup_window_seconds=60)
        for number in range(2)
    )
    assert (one.task_id, one.duplicate, two.duplicate) == (two.task_id, False, True)
    assert two.queue is None


def test_every_option_is_a_field_of_a_submission() -> None:
    assert set(SubmitFields.__annotations__) == set(TaskSubmission.model_fields) - {"task_type", "payload"}
    assert MAX_BATCH == MAX_BATCH_TASKS


@pytest.mark.parametrize(
    ("task_type", "payload", "error"),
    [
        ("geo.nearst", {}, UnknownTaskType),
        ("geo.nearest", {"iata": 7, "lat": 1.0}, InvalidPayload),
        ("any.json", {"n": float("nan")}, InvalidPayload),
        ("any.json", "x" * 3_000, PayloadTooLarge),
        ("any.json", {"set": {1}, "id": uuid4(), "at": datetime.now(UTC), "c": Colour.RED}, None),
    ],
)
def test_what_is_refused_is_told_by_class(
    api: Api, client: Caller, task_type: str, payload: Any, error: type[Exception] | None
) -> None:
    if error is None:
        client("submit", task_type, payload)
        assert len(api.log.records) == 1
        return
    with pytest.raises(error):
        client("submit", task_type, payload)
    assert api.log.records == []


def test_impossible_options_are_refused(client: Caller) -> None:
    with pytest.raises(InvalidFields) as refused:
        client("submit", "any.json", None, max_retries=-1)
    assert refused.value.problem.members["errors"][0]["pointer"] == "/max_retries"
    with pytest.raises(InvalidOption, match="time zone"):
        client("submit", "any.json", None, start_by=datetime(2030, 1, 1))  # noqa: DTZ001
    with pytest.raises(InvalidOption, match="task_id"):
        client("get", "../metrics")


def test_a_delivery_nobody_knows_of_names_its_task(api: Api, kind: str) -> None:
    caller = on_api(kind, api, retry_seconds=0.0, safe_retries=False)
    api.log.failure = DeliveryUnknown("no acknowledgement")
    with pytest.raises(DeliveryUnknown) as unknown:
        caller("submit", "any.json", None)
    assert unknown.value.task_id == str(api.log.submissions()[0].task_id)
    caller.close()


def test_many_are_submitted_in_order(api: Api, client: Caller) -> None:
    items = [
        Submit(task_type="any.json" if number % 100 else "any.jsn", payload=number) for number in range(600)
    ]
    results = client("submit_many", items)
    assert len(results) == 600
    for number, result in enumerate(results):
        if number % 100:
            assert isinstance(result, SubmittedTask)
        else:
            assert isinstance(result, SubmitFailure)
            assert (result.index, result.item) == (number, items[number])
            assert isinstance(result.error, UnknownTaskType)
    assert len(api.log.records) == 594
    assert client("submit_many", []) == []


def test_a_task_and_its_history_are_read(api: Api, client: Caller) -> None:
    task = submitted()
    execution = uuid4()
    done = event(Succeeded, task, execution=execution, result=b'{"km": 6.1}')
    api.store.put(task, started(task, execution), done)
    found = client("get", task.task_id)
    assert (found.status, found.result, found.ended) == (TaskStatus.COMPLETED, {"km": 6.1}, True)
    assert client("get", str(task.task_id)) == found
    assert client("wait", task.task_id, 5.0) == found
    history = client("history", task.task_id)
    assert [each.outcome for each in history.attempts] == ["succeeded"]
    assert [each.event for each in history.events] == ["started", "succeeded"]


def test_what_is_not_there_is_told(client: Caller) -> None:
    for method in ("get", "history", "wait"):
        with pytest.raises(TaskNotFound) as missing:
            client(method, TASK_ID)
        assert missing.value.task_id == TASK_ID


def test_a_wait_ends_with_the_state_of_that_moment(api: Api, client: Caller) -> None:
    task = submitted()
    api.store.put(task)
    with pytest.raises(NotEnded) as late:
        client("wait", task.task_id, 0.05)
    assert isinstance(late.value, TimeoutError)
    assert late.value.task.status is TaskStatus.PENDING
    with pytest.raises(NotEnded):
        client("wait", task.task_id, 0.0)


def test_lists_go_on_by_themselves(api: Api, client: Caller) -> None:
    tasks = [submitted(priority=Priority.HIGH if number % 2 else Priority.LOW) for number in range(9)]
    for task in tasks:
        api.store.put(task)
    newest_first = sorted((task.task_id for task in tasks), reverse=True)
    assert [task.task_id for task in client("list", page_size=2)] == newest_first
    high = client("list", page_size=2, priority="high", status=TaskStatus.PENDING)
    assert {task.task_id for task in high} == {task.task_id for task in tasks[1::2]}
    page = client("list_page", limit=4)
    rest = client("list_page", limit=200, cursor=page.next_cursor)
    assert [task.task_id for task in (*page.tasks, *rest.tasks)] == newest_first
    with pytest.raises(InvalidCursor):
        client("list_page", cursor=page.next_cursor, priority="high")
    with pytest.raises(InvalidFields):
        client("list_page", status="ended")


def test_many_are_looked_up_at_once(api: Api, client: Caller) -> None:
    tasks = [submitted() for _ in range(150)]
    for task in tasks:
        api.store.put(task)
    ids = [task.task_id for task in tasks]
    found = client("get_many", [*ids, TASK_ID, str(ids[0])])
    assert set(found.tasks) == set(ids)
    assert [str(each) for each in found.unknown] == [TASK_ID]
    assert client("get_many", []).tasks == {}


def test_task_types_are_listed(client: Caller) -> None:
    types = {each.name: each for each in client("task_types")}
    assert set(types) == {"any.json", "geo.nearest"}
    assert types["geo.nearest"].timeout_seconds == 1.5
    assert types["any.json"].payload_schema is None


def test_without_a_key_nobody_is_let_in(kind: str) -> None:
    api = Api(keys=MemoryKeys(), auth="keys")
    caller = on_api(kind, api, key="tk_aaaaaaaa_" + "b" * 43)
    with pytest.raises(Unauthorized):
        caller("get", TASK_ID)
    caller.close()
    api.close()


def test_what_is_away_is_told_after_the_time_for_retries(api: Api, kind: str) -> None:
    caller = on_api(kind, api, retry_seconds=0.1)
    api.store.failure = Unavailable("no host")
    with pytest.raises(ServiceUnavailable) as away:
        caller("get", TASK_ID)
    assert isinstance(away.value, Unavailable)
    assert (away.value.type, away.value.retry_after) == ("view-unavailable", 2)
    caller.close()


def test_both_clients_have_the_same_methods(make_caller: Callable[[Api], Caller], api: Api) -> None:
    from taskline.client import AsyncClient, Client

    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)
    for name in public(Client) - {"close"}:
        one, two = getattr(Client, name), getattr(AsyncClient, name)
        assert one.__annotations__.keys() == two.__annotations__.keys()
    assert issubclass(LetterNotFound, TasklineError)
