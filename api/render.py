"""Answers as bytes: plain dictionaries through orjson, in the shapes of `taskline.api.models`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import orjson
import structlog
from starlette.responses import Response

from taskline.api.dedup import Duplicate
from taskline.schemas.events import (
    Cancelled,
    CancelRequested,
    Crashed,
    DeadLettered,
    Expired,
    Failed,
    LeaseExtended,
    LifecycleEvent,
    Progress,
    Released,
    RetryScheduled,
    Started,
    Succeeded,
    TaskSubmitted,
    TimedOut,
)
from taskline.schemas.ids import created_at_ms, from_ms
from taskline.schemas.types import TaskType
from taskline.state.fold import Attempt, LaneEvent, TaskHistory
from taskline.state.status import TaskError, TaskProgress, TaskState

log = structlog.get_logger(__name__)

_JSON = "application/json"
_EVENT_NAMES: dict[type[LifecycleEvent], str] = {
    Started: "started",
    LeaseExtended: "lease_extended",
    TimedOut: "timed_out",
    Released: "released",
    Succeeded: "succeeded",
    Failed: "failed",
    RetryScheduled: "retry_scheduled",
    Crashed: "crashed",
    Expired: "expired",
    DeadLettered: "dead_lettered",
    CancelRequested: "cancel_requested",
    Cancelled: "cancelled",
    Progress: "progress",
}
_OF_EXECUTIONS = (
    Started | LeaseExtended | TimedOut | Released | Succeeded | Failed | Crashed | Cancelled | Progress
)


class JSONAnswer(Response):
    """An answer whose body is JSON already; never to be cached, since a task moves on."""

    media_type = _JSON

    def init_headers(self, headers: Any = None) -> None:  # noqa: ANN401 - as Starlette declares it
        """Write the few headers directly: the general way costs as much as rendering the body."""
        self.raw_headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self.body)).encode("ascii")),
            (b"cache-control", b"no-store"),
            *((name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()),
        ]


def instant(at: datetime | None) -> str | None:
    """An aware UTC datetime as ISO 8601 with milliseconds and Z."""
    return None if at is None else at.isoformat(timespec="milliseconds")[:-6] + "Z"


def task_json(state: TaskState) -> bytes:
    """A `TaskView`."""
    return orjson.dumps(task_fields(state))


def task_fields(state: TaskState) -> dict[str, Any]:
    """A `TaskView`, for `orjson.dumps`."""
    return {
        "task_id": state.task_id,
        "task_type": state.task_type,
        "status": state.status,
        "priority": state.priority,
        "queue": state.queue,
        "created_at": instant(state.created_at),
        "scheduled_at": instant(state.not_before),
        "started_at": instant(state.started_at),
        "completed_at": instant(state.completed_at),
        "attempt": state.attempt,
        "retry_count": state.retry_count,
        "max_retries": state.max_retries,
        "next_attempt_at": instant(state.next_attempt_at),
        "last_error": None if state.last_error is None else _error(state.last_error),
        "result": None if state.result is None else _result(state),
        "reason": state.reason,
        "worker": state.worker,
        "progress": None if state.progress is None else _progress(state.progress),
        "root_id": state.root_id,
        "replay_of": state.replay_of,
        "generation": state.generation,
        "replayed_as": state.replayed_as,
        "retain_until": instant(state.retain_until),
    }


def history_json(history: TaskHistory) -> bytes:
    """A `TaskHistoryView`."""
    state = history.state
    return orjson.dumps(
        {
            "task_id": state.task_id,
            "task_type": state.task_type,
            "status": state.status,
            "created_at": instant(state.created_at),
            "attempts": [_attempt(attempt) for attempt in history.attempts],
            "events": [_event(placed) for placed in history.events],
        }
    )


def accepted_json(submission: TaskSubmitted) -> bytes:
    """A `TaskAccepted`."""
    return orjson.dumps(accepted_fields(submission))


def accepted_fields(submission: TaskSubmitted) -> dict[str, Any]:
    """A `TaskAccepted`, for `orjson.dumps`."""
    return {
        "task_id": submission.task_id,
        "status": "scheduled" if submission.delayed else "pending",
        "created_at": instant(from_ms(created_at_ms(submission.task_id))),
        "scheduled_at": None if submission.not_before is None else instant(from_ms(submission.not_before)),
        "task_type": submission.task_type,
        "priority": submission.priority,
        "queue": submission.queue,
    }


def duplicate_fields(duplicate: Duplicate) -> dict[str, Any]:
    """A `TaskDuplicate`, for `orjson.dumps`."""
    return {
        "task_id": duplicate.task_id,
        "duplicate": True,
        "task_type": duplicate.task_type,
        "created_at": instant(from_ms(created_at_ms(duplicate.task_id))),
        "status": None if duplicate.state is None else duplicate.state.status,
    }


def task_types_json(types: Iterable[TaskType]) -> bytes:
    """A `TaskTypeList`."""
    return orjson.dumps(
        {
            "task_types": [
                {
                    "name": task_type.name,
                    "queue": task_type.queue,
                    "priority": task_type.priority,
                    "timeout_seconds": None if task_type.timeout_ms is None else task_type.timeout_ms / 1000,
                    "max_retries": task_type.max_retries,
                    "payload_schema": None
                    if task_type.schema is None
                    else orjson.Fragment(task_type.schema.source),
                }
                for task_type in types
            ]
        }
    )


def _result(state: TaskState) -> orjson.Fragment | None:
    # Handed on as it is, so that no digit changes; parsed only so that a broken one can't break the answer.
    try:
        orjson.loads(state.result or b"")
    except orjson.JSONDecodeError as error:
        log.warning("result is not JSON", task_id=str(state.task_id), error=str(error))
        return None
    return orjson.Fragment(state.result or b"null")


def _error(error: TaskError) -> dict[str, Any]:
    return {
        "class": error.error_class,
        "message": error.message,
        "attempt": error.attempt,
        "at": instant(error.at),
        "retryable": error.retryable,
        "category": error.category,
    }


def _progress(progress: TaskProgress) -> dict[str, Any]:
    return {"fraction": progress.fraction, "message": progress.message, "at": instant(progress.at)}


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "attempt": attempt.attempt,
        "execution": attempt.execution,
        "outcome": attempt.outcome,
        "worker": attempt.worker,
        "started_at": instant(attempt.started_at),
        "ended_at": instant(attempt.ended_at),
        "error": None
        if attempt.error is None
        else _error(attempt.error) | {"traceback": attempt.error.traceback},
        "reason": attempt.reason,
        "progress": None if attempt.progress is None else _progress(attempt.progress),
    }


def _event(placed: LaneEvent) -> dict[str, Any]:
    event = placed.event
    row: dict[str, Any] = {
        "event": _EVENT_NAMES[type(event)],
        "at": instant(from_ms(event.at)),
        "attempt": event.attempt,
        "worker": event.worker,
        "offset": placed.offset,
        "index": placed.index,
    }
    if isinstance(event, _OF_EXECUTIONS):
        row["execution"] = event.execution
    if isinstance(event, Released | DeadLettered):
        row["reason"] = event.reason
    if isinstance(event, Failed):
        row["error"] = event.error_class
    if isinstance(event, Crashed):
        row["reason"] = event.cause
        row["alone"] = event.alone
    if isinstance(event, RetryScheduled):
        row["next_attempt_at"] = instant(from_ms(event.due))
    if isinstance(event, Started | LeaseExtended | TimedOut) and event.lease_until is not None:
        row["lease_until"] = instant(from_ms(event.lease_until))
    if isinstance(event, CancelRequested):
        row["abort"] = event.abort
    if isinstance(event, Progress):
        row["fraction"] = event.fraction
        row["message"] = event.message
    return row
