"""`GET /tasks`: tasks by filter, newest first, and tasks by their ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from enum import Enum
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request
from starlette.datastructures import QueryParams
from starlette.responses import Response

from taskline.api import problems
from taskline.api.deps import ApiDeps
from taskline.api.instants import instant_of
from taskline.api.listing_models import TaskList
from taskline.api.openapi import answers, query_parameters
from taskline.api.paging import limit_of
from taskline.api.problems import BAD_REQUEST, ProblemError
from taskline.api.render import JSONAnswer, instant, task_fields
from taskline.api.state_reads import within
from taskline.api.tenancy import ACCESS_PROBLEMS, needs, require
from taskline.errors import did_you_mean, nearest
from taskline.schemas.events import Priority
from taskline.schemas.ids import TaskId, from_ms, parse_task_id, to_ms
from taskline.state.keys import Scope
from taskline.state.listing import Filter
from taskline.state.lists import Listing, TasksById
from taskline.state.status import TaskStatus

T = TypeVar("T")

_TAGS: list[str | Enum] = ["tasks"]
DEFAULT_LIMIT = 50
MAX_LIMIT = 200
MAX_IDS = 100
_MAX_TEXT_CHARS = 255
_MAX_CURSOR_CHARS = 64
_INSTANT: dict[str, Any] = {"type": "string", "format": "date-time"}
_QUERY: dict[str, tuple[str, dict[str, Any]]] = {
    "status": ("In this state.", {"type": "string", "enum": [each.value for each in TaskStatus]}),
    "task_type": ("Of this task type.", {"type": "string", "minLength": 1, "maxLength": _MAX_TEXT_CHARS}),
    "priority": ("Of this priority.", {"type": "string", "enum": [each.value for each in Priority]}),
    "queue": ("Of this queue.", {"type": "string", "minLength": 1, "maxLength": _MAX_TEXT_CHARS}),
    "created_after": ("Created at this instant or later.", _INSTANT),
    "created_before": ("Created before this instant.", _INSTANT),
    "cursor": (
        "`next_cursor` of the page before, with the same filters.",
        {"type": "string", "minLength": 1, "maxLength": _MAX_CURSOR_CHARS},
    ),
    "limit": (
        "Most tasks of the page.",
        {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
    ),
    "ids": (
        f"These tasks, up to {MAX_IDS} ids with commas between; goes with none of the others.",
        {"type": "string", "minLength": 1},
    ),
}


def add_listing_route(router: APIRouter, deps: ApiDeps) -> None:
    """Add the route, on these dependencies. The router's routes are `DirectRoute`s."""
    timeout_seconds = deps.settings.request_timeout_seconds

    @router.get(
        "/tasks",
        operation_id="listTasks",
        summary="List tasks",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=query_parameters(_QUERY) | needs(Scope.READ),
        responses=answers(
            200,
            TaskList,
            "Tasks, newest first; or those asked for by their ids, in that order.",
            BAD_REQUEST,
            problems.INVALID_TASK_ID,
            problems.INVALID_CURSOR,
            problems.VIEW_UNAVAILABLE,
            *ACCESS_PROBLEMS,
        ),
    )
    async def list_tasks(request: Request) -> Response:
        """Each request does a bounded amount of work: it may give few tasks or none and yet a cursor to go on with.

        `searched_to` then says how far back it has searched. `next_cursor` is null on the last page.
        """
        tenant, given = await require(request, Scope.READ), _given(request.query_params)
        if "ids" in given:
            ids = _ids(given, deps.clock.now_ms())
            found = await within(timeout_seconds, deps.lists.many(ids, tenant=tenant))
            return JSONAnswer(by_id_json(ids, found))
        wanted = _filter(given, tenant)
        page = deps.lists.page(
            wanted, cursor=given.get("cursor"), limit=limit_of(given, default=DEFAULT_LIMIT, most=MAX_LIMIT)
        )
        return JSONAnswer(listing_json(await within(timeout_seconds, page)))


def listing_json(page: Listing) -> bytes:
    """A `TaskList` of a page; results are left out, since a page of them could be large."""
    tasks = [task_fields(state) for state in page.tasks]
    for task in tasks:
        del task["result"]
    return _list_json(
        tasks=tasks,
        next_cursor=page.next_cursor,
        searched_to=None if page.searched_to_ms is None else instant(from_ms(page.searched_to_ms)),
        unreadable=list(page.unreadable),
    )


def by_id_json(ids: list[TaskId], found: TasksById) -> bytes:
    """A `TaskList` of these ids, in their order."""
    return _list_json(
        tasks=[task_fields(found.tasks[each]) for each in ids if each in found.tasks],
        unreadable=[each for each in ids if each in found.unreadable],
        unknown=[each for each in ids if each not in found.tasks and each not in found.unreadable],
    )


def _list_json(**members: Any) -> bytes:  # noqa: ANN401
    absent: dict[str, Any] = {"next_cursor": None, "searched_to": None, "unknown": [], "unreadable": []}
    return orjson.dumps(absent | members)


def _given(query: QueryParams) -> dict[str, str]:
    """The parameters, each known and given once."""
    given: dict[str, str] = {}
    for name, value in query.multi_items():
        if name not in _QUERY:
            close = nearest(name[:_MAX_TEXT_CHARS], _QUERY)
            raise ProblemError(
                BAD_REQUEST, f"unknown parameter {name[:_MAX_TEXT_CHARS]!r}{did_you_mean(close)}"
            )
        if name in given:
            raise ProblemError(BAD_REQUEST, f"{name} is given twice")
        given[name] = value
    return given


def _ids(given: Mapping[str, str], now_ms: int) -> list[TaskId]:
    if len(given) > 1:
        raise ProblemError(BAD_REQUEST, "ids goes with no other parameter")
    texts = given["ids"].split(",")
    if len(texts) > MAX_IDS:
        raise ProblemError(BAD_REQUEST, f"{len(texts)} ids; at most {MAX_IDS} are looked up at once")
    return list(dict.fromkeys(parse_task_id(text, now_ms) for text in texts))


def _filter(given: Mapping[str, str], tenant: str) -> Filter:
    def read(name: str, parse: Callable[[str], T]) -> T | None:
        if name not in given:
            return None
        try:
            return parse(given[name])
        except ValueError as error:
            raise ProblemError(BAD_REQUEST, f"{name}: {error}") from None

    return Filter(
        tenant=tenant,
        status=read("status", lambda text: _one_of(TaskStatus, text)),
        task_type=read("task_type", _text),
        priority=read("priority", lambda text: _one_of(Priority, text)),
        queue=read("queue", _text),
        created_after_ms=read("created_after", _ms),
        created_before_ms=read("created_before", _ms),
    )


E_ = TypeVar("E_", bound=Enum)


def _one_of(kind: type[E_], text: str) -> E_:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"must be one of {', '.join(str(each.value) for each in kind)}") from None


def _text(text: str) -> str:
    if not 1 <= len(text) <= _MAX_TEXT_CHARS:
        raise ValueError(f"must have 1 to {_MAX_TEXT_CHARS} characters")
    return text


def _ms(text: str) -> int:
    at: datetime = instant_of(text)
    return max(0, to_ms(at))
