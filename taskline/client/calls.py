"""One builder per operation of the API: arguments in, a `Call` out. Pure; docs/http-api.md describes the operations."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypedDict

from taskline.client import parsing
from taskline.client.encoding import to_json
from taskline.client.errors import Problem
from taskline.client.parsing import read
from taskline.client.results import (
    Cancellation,
    History,
    LetterPage,
    Replayed,
    SubmittedTask,
    TaskPage,
    TaskSnapshot,
    TaskTypeInfo,
)
from taskline.client.wire import Call, Repeat, Request
from taskline.errors import InvalidOption
from taskline.schemas.events import Priority
from taskline.schemas.ids import TaskId
from taskline.state.status import TaskStatus

# The API can't keep idempotency keys just now; nothing was accepted.
CLAIMS_UNAVAILABLE = "claims-unavailable"
# As the API has them.
MAX_IDS = 100
MAX_PAGE = 200
MAX_BATCH = 500


class SubmitFields(TypedDict, total=False):
    """How one task is to be treated; what is absent or None is as its task type says."""

    priority: Priority | str | None
    # Not started earlier: so long from now, or at an aware instant. One of the two.
    delay_seconds: float | None
    scheduled_at: datetime | None
    # An aware instant after which it is not worth starting.
    start_by: datetime | None
    # How long one execution may take.
    timeout_seconds: float | None
    # Attempts after the first.
    max_retries: int | None
    # Tasks with one key go to the same partition, in order.
    affinity_key: str | None
    # The same submission under the same key makes no second task, for 24 hours.
    idempotency_key: str | None
    # Of the tasks of one type with one dedup key, one in so many seconds; see docs/http-api.md.
    dedup_key: str | None
    dedup_window_seconds: float | None
    # reject (the default): the first task stands for the second; replace: a second one takes the place of one that still waits.
    dedup_mode: str | None


class ListFields(TypedDict, total=False):
    """Which tasks a list takes; all that are given must hold."""

    status: TaskStatus | str | None
    task_type: str | None
    priority: Priority | str | None
    queue: str | None
    # That instant or later; earlier than that. Aware.
    created_after: datetime | None
    created_before: datetime | None


class LetterFields(TypedDict, total=False):
    """Which dead letters a list takes; all that are given must hold."""

    task_type: str | None
    reason: str | None
    # Part of the last error's class or message.
    error: str | None
    after: datetime | None
    before: datetime | None
    # Those too that were replayed or discarded.
    resolved: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Submit:
    """One task to submit, for `submit_many`."""

    task_type: str
    payload: Any
    options: SubmitFields = field(default_factory=SubmitFields)


def submit(
    task_type: str,
    payload: Any,  # noqa: ANN401 - the schema's
    options: SubmitFields,
    *,
    minted: bool = False,
) -> Call[SubmittedTask]:
    """`POST /tasks`; repeatable under an idempotency key only.

    With `minted`, the key is the client's own, and the call ends when the API can't keep keys and nothing was accepted.
    """
    key = options.get("idempotency_key")
    return Call(
        request=Request(
            method="POST", path="/tasks", body=to_json(submission(task_type, payload, options), task_type)
        ),
        parse=parsing.submitted_one,
        repeat=Repeat.IF_REFUSED if key is None else Repeat.ALWAYS,
        submits=True,
        idempotency_key=key,
        unless=frozenset({CLAIMS_UNAVAILABLE}) if minted else frozenset(),
    )


def submit_batch(bodies: Sequence[bytes], *, keyed: bool) -> Call[tuple[SubmittedTask | Problem, ...]]:
    """`POST /tasks/batch`, of encoded submissions; repeatable as a whole if each is `keyed`. The results are in their order."""
    return Call(
        request=Request(method="POST", path="/tasks/batch", body=b'{"tasks":[' + b",".join(bodies) + b"]}"),
        parse=lambda answer: parsing.batch(answer, len(bodies)),
        repeat=Repeat.ALWAYS if keyed else Repeat.IF_REFUSED,
        submits=True,
    )


def submission(task_type: str, payload: Any, options: SubmitFields) -> dict[str, Any]:  # noqa: ANN401
    """The body of a submission, as plain values."""
    chosen = {name: _plain(name, value) for name, value in options.items() if value is not None}
    return {"task_type": task_type, "payload": payload} | chosen


def get(task_id: TaskId | str, *, wait_seconds: float = 0.0) -> Call[TaskSnapshot]:
    """`GET /tasks/{task_id}`; the server holds the answer for up to `wait_seconds` (60 at most) while the task has not ended."""
    checked = id_of(task_id)
    return Call(
        request=Request(
            method="GET",
            path=f"/tasks/{checked}",
            params={"wait": f"{wait_seconds:.3f}"} if wait_seconds > 0 else {},
            held_seconds=wait_seconds,
        ),
        parse=lambda answer: read(answer, parsing.snapshot),
        subject=str(checked),
    )


def history(task_id: TaskId | str) -> Call[History]:
    """`GET /tasks/{task_id}/history`."""
    checked = id_of(task_id)
    return Call(
        request=Request(method="GET", path=f"/tasks/{checked}/history"),
        parse=lambda answer: read(answer, parsing.history),
        subject=str(checked),
    )


def cancel(task_id: TaskId | str, *, running: bool) -> Call[Cancellation]:
    """`DELETE /tasks/{task_id}`; a second one does no harm."""
    checked = id_of(task_id)
    return Call(
        request=Request(
            method="DELETE", path=f"/tasks/{checked}", params={"running": "abort"} if running else {}
        ),
        parse=lambda answer: parsing.cancellation(checked, answer),
        subject=str(checked),
    )


def tasks_page(filters: ListFields, *, limit: int, cursor: str | None = None) -> Call[TaskPage]:
    """`GET /tasks` by filter: one page, newest first."""
    return Call(
        request=Request(
            method="GET", path="/tasks", params=_query(filters) | _query({"limit": limit, "cursor": cursor})
        ),
        parse=lambda answer: read(answer, parsing.page),
    )


def tasks_by_id(task_ids: Sequence[TaskId]) -> Call[TaskPage]:
    """`GET /tasks?ids=`: up to 100 tasks with their results."""
    return Call(
        request=Request(method="GET", path="/tasks", params={"ids": ",".join(map(str, task_ids))}),
        parse=lambda answer: read(answer, parsing.page),
    )


def letters_page(filters: LetterFields, *, limit: int, cursor: str | None = None) -> Call[LetterPage]:
    """`GET /dead-letters`: one page, newest first."""
    return Call(
        request=Request(
            method="GET",
            path="/dead-letters",
            params=_query(filters) | _query({"limit": limit, "cursor": cursor}),
        ),
        parse=lambda answer: read(answer, parsing.letters),
    )


def replay(letter_id: TaskId | str, *, edit: bool, payload: Any) -> Call[Replayed]:  # noqa: ANN401
    """`POST /dead-letters/{id}/replay`; with `edit`, under another payload.

    Asking again after an answer that was lost makes no second task: the new id follows from the dead one. But it would be told as
    refused (replayed before), so only what certainly did nothing is repeated.
    """
    checked = id_of(letter_id)
    return Call(
        request=Request(
            method="POST",
            path=f"/dead-letters/{checked}/replay",
            body=to_json({"payload": payload} if edit else {}, "the dead letter"),
        ),
        parse=lambda answer: read(answer, parsing.replayed),
        repeat=Repeat.IF_REFUSED,
        subject=str(checked),
    )


def task_types() -> Call[tuple[TaskTypeInfo, ...]]:
    """`GET /task-types`."""
    return Call(
        request=Request(method="GET", path="/task-types"),
        parse=lambda answer: read(answer, parsing.task_types),
    )


def id_of(task_id: TaskId | str) -> TaskId:
    """An id as it goes into a path.

    Raises:
        InvalidOption: it is no UUID.
    """
    if isinstance(task_id, uuid.UUID):
        return task_id
    try:
        return uuid.UUID(task_id)
    except (ValueError, AttributeError, TypeError):
        raise InvalidOption("task_id", f"{task_id!r:.80} is no task id") from None


def _query(values: Mapping[str, object]) -> dict[str, str]:
    return {name: str(_text(name, value)) for name, value in values.items() if value is not None}


def _text(name: str, value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _plain(name, value)


def _plain(name: str, value: object) -> object:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidOption(name, "a datetime needs a time zone, e.g. datetime.now(UTC)")
        return value.astimezone(UTC).isoformat()
    return value.value if isinstance(value, StrEnum) else value
