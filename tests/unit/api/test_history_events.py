"""Every kind of lifecycle event has its row in a task's history."""

from __future__ import annotations

import typing
from typing import Any, get_args

import orjson
import pytest

from taskline.api.models import EventView, TaskHistoryView
from taskline.api.render import history_json
from taskline.schemas.events import (
    LIFECYCLE_EVENTS,
    Cancelled,
    CancelRequested,
    Crashed,
    DeadLettered,
    Expired,
    Failed,
    LeaseExtended,
    LifecycleEvent,
    Priority,
    Progress,
    Released,
    RetryScheduled,
    Started,
    Succeeded,
    TaskSubmitted,
    TimedOut,
)
from taskline.schemas.ids import new_task_id
from taskline.state.fold import LaneEvent, history

NOW_MS = 1_764_000_000_000
TASK_ID, EXECUTION = new_task_id(NOW_MS), new_task_id(NOW_MS)
COMMON: dict[str, Any] = {
    "task_id": TASK_ID,
    "tenant": "default",
    "attempt": 1,
    "worker": "w",
    "at": NOW_MS + 5,
    "retain_until": NOW_MS + 86_400_000,
}
FIELDS: dict[type[LifecycleEvent], dict[str, Any]] = {
    Started: {"execution": EXECUTION, "source_topic": "t", "source_partition": 0, "source_offset": 0},
    LeaseExtended: {"execution": EXECUTION, "lease_until": NOW_MS + 1_500},
    TimedOut: {"execution": EXECUTION, "lease_until": NOW_MS + 1_500},
    Released: {"execution": EXECUTION, "reason": "shutdown"},
    Succeeded: {"execution": EXECUTION},
    Failed: {"execution": EXECUTION, "error_class": "E", "message": "m", "retryable": True},
    RetryScheduled: {"due": NOW_MS + 1_500},
    Crashed: {"execution": EXECUTION, "cause": "signal SIGSEGV", "alone": True},
    Expired: {},
    DeadLettered: {"reason": "exhausted"},
    CancelRequested: {"request_id": EXECUTION, "abort": True},
    Cancelled: {"execution": EXECUTION},
    Progress: {"execution": EXECUTION, "fraction": 0.4, "message": "so far"},
}


def row_of(event: LifecycleEvent) -> dict[str, Any]:
    submission = TaskSubmitted(
        task_id=TASK_ID,
        tenant="default",
        task_type="t",
        queue="default",
        priority=Priority.NORMAL,
        payload=b"{}",
        retain_until=NOW_MS + 86_400_000,
        max_retries=3,
        root_id=TASK_ID,
    )
    document = orjson.loads(history_json(history(submission, [LaneEvent(offset=7, index=1, event=event)])))
    TaskHistoryView.model_validate(document)
    (row,) = document["events"]
    return dict(row)


@pytest.mark.parametrize("kind", LIFECYCLE_EVENTS, ids=lambda kind: kind.__name__)
def test_every_kind_of_event_is_shown_by_a_documented_name(kind: type[LifecycleEvent]) -> None:
    documented = get_args(typing.get_type_hints(EventView)["event"])
    row = row_of(kind(**COMMON, **FIELDS[kind]))
    assert row["event"] in documented
    assert (row["offset"], row["index"]) == (7, 1)
    assert len(documented) == len(LIFECYCLE_EVENTS)


def test_a_scheduled_retry_says_when() -> None:
    row = row_of(RetryScheduled(**COMMON, **FIELDS[RetryScheduled]))
    assert row["next_attempt_at"] == "2025-11-24T16:00:01.500Z"


def test_a_crash_says_of_what_and_whose() -> None:
    row = row_of(Crashed(**COMMON, **FIELDS[Crashed]))
    assert (row["reason"], row["alone"], row["execution"]) == ("signal SIGSEGV", True, str(EXECUTION))


@pytest.mark.parametrize("kind", [LeaseExtended, TimedOut])
def test_a_lease_says_when_it_ends(kind: type[LifecycleEvent]) -> None:
    row = row_of(kind(**COMMON, **FIELDS[kind]))
    assert (row["lease_until"], row["execution"]) == ("2025-11-24T16:00:01.500Z", str(EXECUTION))


def test_a_start_without_a_lease_says_nothing_of_one() -> None:
    assert "lease_until" not in row_of(Started(**COMMON, **FIELDS[Started]))


def test_progress_says_how_far_and_what() -> None:
    row = row_of(Progress(**COMMON, **FIELDS[Progress]))
    assert (row["fraction"], row["message"], row["execution"]) == (0.4, "so far", str(EXECUTION))
