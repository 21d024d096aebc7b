"""`DELETE /tasks/{task_id}`: 200, 202, 404, 409 and 503, each only when it is true."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Iterator
from typing import Any

import pytest
from api_kit import CODEC, NOW_MS, Api, slug

from taskline.errors import DeliveryUnknown, Unavailable
from taskline.infra.log import OutRecord, Position
from taskline.schemas.events import (
    Cancelled,
    CancelNotice,
    CancelRequested,
    LifecycleBatch,
    LifecycleEvent,
    Priority,
    Released,
    Started,
    Succeeded,
    TaskSubmitted,
)
from taskline.schemas.ids import TaskId, new_task_id

EXECUTION = new_task_id(NOW_MS)


class Projected:
    """An `Api` whose lifecycle topic is in its view at once."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.task_id = new_task_id(NOW_MS - 60_000)
        self.submission = TaskSubmitted(
            task_id=self.task_id,
            tenant="default",
            task_type="any.json",
            queue="geo",
            priority=Priority.NORMAL,
            payload=b"{}",
            retain_until=NOW_MS + 86_400_000,
            max_retries=3,
            root_id=self.task_id,
        )
        self.events: list[LifecycleEvent] = []
        # What follows in the lane after the request.
        self.later: list[LifecycleEvent] = []
        self.lagging = False
        self._append = api.log.append
        api.log.append = self.append  # type: ignore[method-assign]
        self.show()

    def show(self, *events: LifecycleEvent) -> None:
        self.events += events
        self.api.store.put(self.submission, *self.events)

    def append(self, record: OutRecord) -> Future[Position]:
        future = self._append(record)
        if (
            record.topic == "tasks.lifecycle"
            and future.done()
            and not future.exception()
            and not self.lagging
        ):
            batch = CODEC.decode(record.value, LifecycleBatch)
            self.show(*(CODEC.decode(entry.event, LifecycleEvent) for entry in batch.events))
            asyncio.get_running_loop().call_later(0.05, lambda: self.show(*self.later))
        return future

    def common(self) -> dict[str, Any]:
        return {
            "task_id": self.task_id,
            "tenant": "default",
            "attempt": 1,
            "worker": "w",
            "at": NOW_MS - 30_000,
            "retain_until": self.submission.retain_until,
        }

    def started(self) -> Started:
        return Started(
            **self.common(), execution=EXECUTION, source_topic="t", source_partition=0, source_offset=0
        )

    def delete(self, query: str = "", task_id: TaskId | None = None) -> Any:
        return self.api.request("DELETE", f"/tasks/{task_id or self.task_id}{query}")

    def appended(self) -> list[str]:
        return [record.topic for record in self.api.log.records]


@pytest.fixture
def cancelling() -> Iterator[Projected]:
    api = Api(request_timeout_seconds=0.5)
    yield Projected(api)
    api.close()


def test_what_waits_is_cancelled(cancelling: Projected) -> None:
    answer = cancelling.delete()
    assert answer.status_code == 200
    assert answer.json() == {
        "task_id": str(cancelling.task_id),
        "status": "cancelled",
        "cancelled_at": "2026-11-29T15:04:05.120Z",
    }
    # The notice is first, on its queue's topic.
    assert cancelling.appended() == ["tasks.cancels.geo", "tasks.lifecycle"]
    notice = cancelling.api.log.records[0]
    assert notice.key == cancelling.task_id.bytes
    assert CODEC.decode(notice.value, CancelNotice).abort is False
    (request,) = cancelling.events
    assert isinstance(request, CancelRequested)
    assert (request.attempt, request.abort) == (0, False)


def test_a_second_cancel_is_answered_from_the_view(cancelling: Projected) -> None:
    first = cancelling.delete()
    assert cancelling.delete().json() == first.json()
    assert len(cancelling.appended()) == 2


def test_a_released_task_is_cancelled(cancelling: Projected) -> None:
    cancelling.show(
        cancelling.started(), Released(**cancelling.common(), execution=EXECUTION, reason="shutdown")
    )
    assert cancelling.delete().status_code == 200


def test_what_runs_is_left_alone(cancelling: Projected) -> None:
    cancelling.show(cancelling.started())
    answer = cancelling.delete()
    assert (answer.status_code, slug(answer)) == (409, "not-cancelled")
    assert answer.json()["task_status"] == "running"


def test_the_answer_is_about_the_request_s_own_place(cancelling: Projected) -> None:
    # It was started and handed back right after the request: the cancel was refused all the same.
    cancelling.show(cancelling.started())
    cancelling.later = [Released(**cancelling.common(), execution=EXECUTION, reason="shutdown")]
    assert cancelling.delete().status_code == 409


def test_what_is_over_is_not_asked_about(cancelling: Projected) -> None:
    cancelling.show(cancelling.started(), Succeeded(**cancelling.common(), execution=EXECUTION))
    answer = cancelling.delete()
    assert (answer.status_code, answer.json()["task_status"]) == (409, "completed")
    assert cancelling.appended() == []


def test_an_abort_is_answered_when_the_task_has_ended(cancelling: Projected) -> None:
    cancelling.show(cancelling.started())
    cancelling.later = [Cancelled(**cancelling.common(), execution=EXECUTION)]
    answer = cancelling.delete("?running=abort")
    assert answer.status_code == 200
    assert CODEC.decode(cancelling.api.log.records[0].value, CancelNotice).abort is True


def test_an_abort_that_comes_too_late_says_how_it_ended(cancelling: Projected) -> None:
    cancelling.show(cancelling.started())
    cancelling.later = [Succeeded(**cancelling.common(), execution=EXECUTION)]
    answer = cancelling.delete("?running=abort")
    assert (answer.status_code, answer.json()["task_status"]) == (409, "completed")


def test_an_abort_that_takes_its_time_is_pending(cancelling: Projected) -> None:
    cancelling.show(cancelling.started())
    answer = cancelling.delete("?running=abort")
    assert answer.status_code == 202
    assert answer.json() == {"task_id": str(cancelling.task_id), "status": "cancel_requested"}
    assert answer.headers["location"] == f"/tasks/{cancelling.task_id}"


def test_a_view_that_lags_makes_it_pending(cancelling: Projected) -> None:
    cancelling.lagging = True
    assert cancelling.delete().status_code == 202


def test_without_the_view_nothing_is_asked(cancelling: Projected) -> None:
    cancelling.api.store.failure = Unavailable("away")
    answer = cancelling.delete()
    assert (answer.status_code, slug(answer)) == (503, "view-unavailable")
    assert cancelling.appended() == []


def test_a_view_that_goes_away_meanwhile_makes_it_pending(cancelling: Projected) -> None:
    append = cancelling.append

    def then_away(record: OutRecord) -> Future[Position]:
        cancelling.api.store.failure = Unavailable("away")
        return append(record)

    cancelling.api.log.append = then_away  # type: ignore[method-assign]
    assert cancelling.delete().status_code == 202
    cancelling.api.store.failure = None
    assert cancelling.delete().status_code == 200


@pytest.mark.parametrize("silent", [False, True])
def test_without_an_acknowledgement_it_is_unknown(cancelling: Projected, silent: bool) -> None:
    cancelling.api.log.silent = silent
    cancelling.api.log.failure = None if silent else DeliveryUnknown("no answer")
    answer = cancelling.delete()
    assert (answer.status_code, slug(answer)) == (503, "cancel-unknown")
    # Nobody may see a request whose notice may not be there.
    assert cancelling.appended() == ["tasks.cancels.geo"]


def test_unknown_and_other_tenants_tasks_are_the_same(cancelling: Projected) -> None:
    unknown = cancelling.delete(task_id=new_task_id(NOW_MS))
    assert (unknown.status_code, slug(unknown)) == (404, "task-not-found")
    cancelling.submission = type(cancelling.submission)(
        **{name: getattr(cancelling.submission, name) for name in TaskSubmitted.__dataclass_fields__}
        | {"tenant": "mallory"}
    )
    cancelling.show()
    assert cancelling.delete().status_code == 404
    assert cancelling.appended() == []


@pytest.mark.parametrize("query", ["?running=", "?running=yes", "?running=Abort"])
def test_what_to_do_with_a_running_task_is_abort_or_nothing(cancelling: Projected, query: str) -> None:
    answer = cancelling.delete(query)
    assert (answer.status_code, slug(answer)) == (400, "bad-request")


def test_an_id_that_is_none_is_refused(cancelling: Projected) -> None:
    assert cancelling.api.request("DELETE", "/tasks/17").status_code == 400
