"""From the API's JSON to results: pure, and strict about what it needs, blind to what it does not know."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

import orjson

from taskline.client.errors import Problem, UnexpectedAnswer
from taskline.client.refusals import problem_of
from taskline.client.results import (
    Attempt,
    AttemptError,
    Cancellation,
    DeadLetter,
    Event,
    History,
    LetterPage,
    Progress,
    Replayed,
    SubmittedTask,
    TaskPage,
    TaskSnapshot,
    TaskTypeInfo,
)
from taskline.client.wire import Answer
from taskline.schemas.events import Priority
from taskline.schemas.ids import TaskId
from taskline.state.status import TaskStatus

T = TypeVar("T")
Document = Mapping[str, Any]

_ACCEPTED = 202
# Of an answer that can't be read, what an error repeats.
_MAX_SHOWN = 200


def read(answer: Answer, parse: Callable[[Document], T]) -> T:
    """The answer's JSON object as a result.

    Raises:
        UnexpectedAnswer: it is no such object.
    """
    try:
        document = orjson.loads(answer.body)
        if not isinstance(document, dict):
            raise TypeError("not a JSON object")  # noqa: TRY301 - one kind of error below
        return parse(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnexpectedAnswer(
            Problem(
                status=answer.status,
                type="",
                title="The answer can't be read",
                detail=f"{type(error).__name__}: {error}; it begins with {answer.body[:_MAX_SHOWN]!r}",
            )
        ) from error


def submitted(document: Document, *, replayed: bool = False) -> SubmittedTask:
    """A `TaskAccepted`, or a `TaskDuplicate`."""
    duplicate = document.get("duplicate") is True
    return SubmittedTask(
        task_id=_id(document["task_id"]),
        task_type=document["task_type"],
        status=_perhaps(TaskStatus, document["status"]),
        created_at=_instant(document["created_at"]),
        scheduled_at=_perhaps(_instant, document.get("scheduled_at")),
        priority=None if duplicate else Priority(document["priority"]),
        queue=None if duplicate else document["queue"],
        duplicate=duplicate,
        replayed=replayed,
        raw=document,
    )


def submitted_one(answer: Answer) -> SubmittedTask:
    """What `POST /tasks` said."""
    replayed = answer.headers.get("idempotency-replayed") == "true"
    return read(answer, lambda document: submitted(document, replayed=replayed))


def batch(answer: Answer, size: int) -> tuple[SubmittedTask | Problem, ...]:
    """A batch's results, in order: a `TaskAccepted`, or the problem of the item."""

    def parse(document: Document) -> tuple[SubmittedTask | Problem, ...]:
        results = tuple(map(_batch_item, document["results"]))
        if len(results) != size:
            raise ValueError(f"{len(results)} results for {size} tasks")
        return results

    return read(answer, parse)


def _batch_item(document: Document) -> SubmittedTask | Problem:
    problem = document.get("problem")
    if problem is None:
        return submitted(document["task"], replayed=document.get("replayed", False))
    return problem_of(problem, status=document["status"], retry_after=document.get("retry_after"))


def snapshot(document: Document) -> TaskSnapshot:
    """A `TaskView`."""
    return TaskSnapshot(
        task_id=_id(document["task_id"]),
        task_type=document["task_type"],
        status=TaskStatus(document["status"]),
        priority=Priority(document["priority"]),
        queue=document["queue"],
        created_at=_instant(document["created_at"]),
        scheduled_at=_perhaps(_instant, document["scheduled_at"]),
        started_at=_perhaps(_instant, document["started_at"]),
        completed_at=_perhaps(_instant, document["completed_at"]),
        attempt=document["attempt"],
        retry_count=document["retry_count"],
        max_retries=document["max_retries"],
        next_attempt_at=_perhaps(_instant, document["next_attempt_at"]),
        last_error=_perhaps(_error, document["last_error"]),
        result=document.get("result"),
        reason=document["reason"],
        worker=document["worker"],
        root_id=_id(document["root_id"]),
        replay_of=_perhaps(_id, document["replay_of"]),
        generation=document["generation"],
        replayed_as=_perhaps(_id, document["replayed_as"]),
        retain_until=_instant(document["retain_until"]),
        raw=document,
        progress=_perhaps(_progress, document.get("progress")),
    )


def history(document: Document) -> History:
    """A `TaskHistoryView`."""
    return History(
        task_id=_id(document["task_id"]),
        task_type=document["task_type"],
        status=TaskStatus(document["status"]),
        created_at=_instant(document["created_at"]),
        attempts=tuple(map(_attempt, document["attempts"])),
        events=tuple(map(_event, document["events"])),
        raw=document,
    )


def page(document: Document) -> TaskPage:
    """A `TaskList`."""
    return TaskPage(
        tasks=tuple(map(snapshot, document["tasks"])),
        next_cursor=document["next_cursor"],
        searched_to=_perhaps(_instant, document["searched_to"]),
        unknown=tuple(map(_id, document["unknown"])),
        unreadable=tuple(map(_id, document["unreadable"])),
    )


def cancellation(task_id: TaskId, answer: Answer) -> Cancellation:
    """What `DELETE /tasks/{task_id}` said."""
    decided = answer.status != _ACCEPTED
    return read(
        answer,
        lambda document: Cancellation(
            task_id=task_id,
            decided=decided,
            status=TaskStatus(document["status"]) if decided else None,
            cancelled_at=_perhaps(_instant, document.get("cancelled_at")),
            raw=document,
        ),
    )


def letters(document: Document) -> LetterPage:
    """A `LetterList`."""
    return LetterPage(dead_letters=tuple(map(_letter, document["dead_letters"])), cursor=document["cursor"])


def replayed(document: Document) -> Replayed:
    """A `LetterReplayed`."""
    return Replayed(
        letter_id=_id(document["letter_id"]),
        outcome=document["outcome"],
        task_id=_id(document["task_id"]),
        generation=document["generation"],
        root_id=_id(document["root_id"]),
    )


def task_types(document: Document) -> tuple[TaskTypeInfo, ...]:
    """A `TaskTypeList`."""
    return tuple(
        TaskTypeInfo(
            name=each["name"],
            queue=each["queue"],
            priority=Priority(each["priority"]),
            timeout_seconds=each["timeout_seconds"],
            max_retries=each["max_retries"],
            payload_schema=each["payload_schema"],
        )
        for each in document["task_types"]
    )


def _attempt(document: Document) -> Attempt:
    return Attempt(
        attempt=document["attempt"],
        execution=_id(document["execution"]),
        outcome=document["outcome"],
        worker=document["worker"],
        started_at=_instant(document["started_at"]),
        ended_at=_perhaps(_instant, document["ended_at"]),
        error=_perhaps(_error, document["error"]),
        reason=document["reason"],
        progress=_perhaps(_progress, document.get("progress")),
    )


def _progress(document: Document) -> Progress:
    return Progress(fraction=document["fraction"], message=document["message"], at=_instant(document["at"]))


def _event(document: Document) -> Event:
    return Event(
        event=document["event"],
        at=_instant(document["at"]),
        attempt=document["attempt"],
        worker=document["worker"],
        offset=document["offset"],
        index=document["index"],
        raw=document,
    )


def _error(document: Document) -> AttemptError:
    return AttemptError(
        error_class=document["class"],
        message=document["message"],
        attempt=document["attempt"],
        at=_instant(document["at"]),
        retryable=document["retryable"],
        category=document["category"],
        traceback=document.get("traceback"),
    )


def _letter(document: Document) -> DeadLetter:
    resolution = document["resolution"]
    return DeadLetter(
        letter_id=_id(document["letter_id"]),
        at=_instant(document["at"]),
        task_type=document["task_type"],
        queue=document["queue"],
        reason=document["reason"],
        category=document["category"],
        error_class=document["error_class"],
        message=document["message"],
        attempt=document["attempt"],
        generation=document["generation"],
        resolution=None if resolution is None else resolution["action"],
        replayed_as=None if resolution is None else _perhaps(_id, resolution["replayed_as"]),
        raw=document,
    )


def _id(text: str) -> TaskId:
    return uuid.UUID(text)


def _instant(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError(f"{text!r} does not say its offset from UTC")
    return at


def _perhaps(parse: Callable[[Any], T], value: Any) -> T | None:  # noqa: ANN401 - JSON
    return None if value is None else parse(value)
