"""`/dead-letters`: what was given up, and what is done about it."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from datetime import datetime
from enum import Enum
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.datastructures import QueryParams
from starlette.responses import Response

from taskline.api import problems
from taskline.api.body import parse_body, read_body
from taskline.api.deps import ApiDeps
from taskline.api.errors import problem_of
from taskline.api.letter_desk import Outcome
from taskline.api.letter_models import (
    LetterDetail,
    LetterDiscard,
    LetterDiscarded,
    LetterList,
    LetterReplay,
    LetterReplayed,
    LetterSelection,
    LettersReplay,
    LettersReplayed,
)
from taskline.api.openapi import answers, json_body, query_parameters, task_id_in_path
from taskline.api.paging import limit_of
from taskline.api.problems import BAD_REQUEST, VIEW_UNAVAILABLE, ProblemError
from taskline.api.render import JSONAnswer
from taskline.api.state_reads import within
from taskline.api.tenancy import ACCESS_PROBLEMS, needs, require
from taskline.errors import InvalidOption
from taskline.producers.dlq_show import letter_document
from taskline.producers.replayer import Handled
from taskline.schemas.ids import TaskId, parse_task_id, to_ms
from taskline.state.dead_letters import LetterFilter
from taskline.state.keys import Scope
from taskline.state.letter_row import Letter, LetterKind

T = TypeVar("T")

_TAGS: list[str | Enum] = ["dead letters"]
_DEFAULT_LIMIT = 50
_MAX_LIMIT = 200
# Of a letter in short, what is the operators' own.
_NOT_SHOWN = frozenset({"kind", "tenant", "source", "dlq_partition", "dlq_offset", "attempts", "replayed_as"})
_TEXTS = ("task_type", "reason", "error", "after", "before")
_QUERY: dict[str, tuple[str, dict[str, Any]]] = {
    "task_type": ("Of this task type.", {"type": "string"}),
    "reason": ("Given up for this reason.", {"type": "string"}),
    "error": ("Part of the last error's class or message.", {"type": "string"}),
    "after": ("Died at or after this instant.", {"type": "string", "format": "date-time"}),
    "before": ("Died before this instant.", {"type": "string", "format": "date-time"}),
    "resolved": ("Those too that were replayed or discarded.", {"type": "boolean", "default": False}),
    "cursor": ("Where an earlier list left off.", {"type": "string"}),
    "limit": (
        "Most letters.",
        {"type": "integer", "minimum": 1, "maximum": _MAX_LIMIT, "default": _DEFAULT_LIMIT},
    ),
}
_BODY_PROBLEMS = (
    problems.BODY_TIMEOUT,
    problems.TOO_LARGE,
    problems.UNSUPPORTED_MEDIA_TYPE,
    problems.MALFORMED_BODY,
    problems.INVALID_FIELDS,
)
_ONE_PROBLEMS = (
    problems.INVALID_TASK_ID,
    problems.LETTER_NOT_FOUND,
    VIEW_UNAVAILABLE,
    *ACCESS_PROBLEMS,
)
_ACT_PROBLEMS = (
    *_ONE_PROBLEMS,
    *_BODY_PROBLEMS,
    problems.LETTER_RESOLVED,
    problems.DELIVERY_UNKNOWN,
    problems.NOT_ACCEPTED,
)


def add_letter_routes(router: APIRouter, deps: ApiDeps) -> None:
    """Add the routes, on these dependencies. The router's routes are `DirectRoute`s."""
    timeout_seconds = deps.settings.request_timeout_seconds

    def letter_id_of(request: Request) -> TaskId:
        return parse_task_id(request.path_params["task_id"], deps.clock.now_ms())

    def view(query: Awaitable[T]) -> Awaitable[T]:
        return within(timeout_seconds, query, "no answer")

    async def body_of(request: Request) -> bytes:
        """The body; `{}` when there is none."""
        headers = request.headers
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return b"{}"
        return await read_body(request, limit_bytes=deps.max_body_bytes, timeout_seconds=timeout_seconds)

    @router.get(
        "/dead-letters",
        operation_id="listDeadLetters",
        summary="List dead letters",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=query_parameters(_QUERY) | needs(Scope.READ),
        responses=answers(
            200,
            LetterList,
            "Dead letters, newest first.",
            BAD_REQUEST,
            problems.INVALID_CURSOR,
            problems.INVALID_FIELDS,
            VIEW_UNAVAILABLE,
            *ACCESS_PROBLEMS,
        ),
    )
    async def list_dead_letters(request: Request) -> Response:
        """Each request does bounded work: it may find nothing and still give a cursor to search on with."""
        tenant, given = await require(request, Scope.READ), request.query_params
        selection = _selection(given)
        wanted = _filter(selection, tenant, resolved=_flag(given, "resolved"))
        desk = deps.letters.connected()
        page = await view(
            desk.page(
                wanted,
                limit=limit_of(given, default=_DEFAULT_LIMIT, most=_MAX_LIMIT),
                cursor=given.get("cursor"),
            )
        )
        return _answer({"dead_letters": [_short(letter) for letter in page.letters], "cursor": page.cursor})

    @router.post(
        "/dead-letters/replay",
        operation_id="replayDeadLetters",
        summary="Replay dead letters by filter",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=json_body(LettersReplay) | needs(Scope.ADMIN),
        responses=answers(
            200,
            LettersReplayed,
            "What became of each.",
            problems.INVALID_CURSOR,
            *_BODY_PROBLEMS,
            problems.LOG_UNAVAILABLE,
            VIEW_UNAVAILABLE,
            *ACCESS_PROBLEMS,
        ),
    )
    async def replay_dead_letters(request: Request) -> Response:
        """Oldest first. A request that was broken off can be made again: what is done is not done twice."""
        tenant = await require(request, Scope.ADMIN)
        asked = parse_body(await body_of(request), LettersReplay)
        outcomes, cursor = await view(
            deps.letters.connected().replay_many(
                _filter(asked.filter, tenant), limit=asked.limit, cursor=asked.cursor, dry_run=asked.dry_run
            )
        )
        return _answer({"results": [_outcome(each) for each in outcomes], "cursor": cursor})

    @router.get(
        "/dead-letters/{task_id}",
        operation_id="getDeadLetter",
        summary="Read a dead letter",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=task_id_in_path() | needs(Scope.READ),
        responses=answers(
            200,
            LetterDetail,
            "The whole dead letter.",
            *_ONE_PROBLEMS,
            problems.NOT_REPLAYABLE,
            problems.LETTER_GONE,
            problems.LOG_UNAVAILABLE,
        ),
    )
    async def get_dead_letter(request: Request) -> Response:
        """With its payload and the errors of all attempts; `GET /tasks/{task_id}/history` has the task's history."""
        tenant, letter_id = await require(request, Scope.READ), letter_id_of(request)
        document = await view(deps.letters.connected().show(letter_id, tenant=tenant))
        return _answer(_shown(document))

    @router.post(
        "/dead-letters/{task_id}/replay",
        operation_id="replayDeadLetter",
        summary="Replay a dead letter",
        tags=_TAGS,
        response_class=Response,
        status_code=201,
        openapi_extra=task_id_in_path() | json_body(LetterReplay, required=False) | needs(Scope.ADMIN),
        responses=answers(
            201,
            LetterReplayed,
            "The new task is in the log and will run.",
            *_ACT_PROBLEMS,
            problems.INVALID_PAYLOAD,
            problems.UNKNOWN_TASK_TYPE,
            problems.TYPES_UNAVAILABLE,
            problems.GENERATIONS_EXHAUSTED,
            problems.NOT_REPLAYABLE,
            problems.LETTER_GONE,
            problems.LOG_UNAVAILABLE,
            headers={
                "Location": {
                    "description": "Where the new task's state is read.",
                    "schema": {"type": "string", "format": "uri-reference"},
                }
            },
        ),
    )
    async def replay_dead_letter(request: Request) -> Response:
        """Submits the dead task again as a new one, which says `replay_of`; the dead one says `replayed_as`."""
        tenant, letter_id = await require(request, Scope.ADMIN), letter_id_of(request)
        asked = parse_body(await body_of(request), LetterReplay)
        handled = await deps.letters.connected().replay(
            letter_id, tenant=tenant, payload=asked.payload, edit="payload" in asked.model_fields_set
        )
        return _answer(
            _replayed(handled),
            status_code=201,
            headers={"location": f"{request.scope.get('root_path', '')}/tasks/{handled.replayed_as}"},
        )

    @router.post(
        "/dead-letters/{task_id}/discard",
        operation_id="discardDeadLetter",
        summary="Discard a dead letter",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=task_id_in_path() | json_body(LetterDiscard, required=False) | needs(Scope.ADMIN),
        responses=answers(200, LetterDiscarded, "It is not open any more.", *_ACT_PROBLEMS),
    )
    async def discard_dead_letter(request: Request) -> Response:
        """Notes that nothing will be done about it. It stays readable until its retention is over."""
        tenant, letter_id = await require(request, Scope.ADMIN), letter_id_of(request)
        asked = parse_body(await body_of(request), LetterDiscard)
        await deps.letters.connected().discard(letter_id, tenant=tenant, note=asked.note)
        return _answer({"letter_id": str(letter_id), "outcome": "discarded"})


def _selection(given: QueryParams) -> LetterSelection:
    try:
        return LetterSelection.model_validate({name: given[name] for name in _TEXTS if name in given})
    except ValidationError as error:
        item = error.errors(include_url=False, include_context=False)[0]
        raise ProblemError(BAD_REQUEST, f"{item['loc'][0]}: {item['msg'][:200]}") from error


def _filter(selection: LetterSelection, tenant: str, *, resolved: bool = False) -> LetterFilter:
    return LetterFilter(
        tenant=tenant,
        kind=LetterKind.TASK,
        task_type=selection.task_type,
        reason=selection.reason,
        error=selection.error,
        after_ms=_ms("after", selection.after),
        before_ms=_ms("before", selection.before),
        resolved=resolved,
    )


def _ms(name: str, at: datetime | None) -> int | None:
    if at is None:
        return None
    if at.tzinfo is None:
        raise InvalidOption(name, "has no time zone; write e.g. 2026-11-29T15:00:00Z")
    return max(0, to_ms(at))


def _flag(given: QueryParams, name: str) -> bool:
    text = given.get(name, "false")
    if text not in ("true", "false"):
        raise ProblemError(BAD_REQUEST, f"{name} is true or false")
    return text == "true"


def _short(letter: Letter) -> dict[str, Any]:
    return _shown(letter_document(letter))


def _shown(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in _NOT_SHOWN}


def _replayed(handled: Handled) -> dict[str, Any]:
    task = handled.task
    assert task is not None  # noqa: S101 - raw letters do not come this way
    return {
        "letter_id": str(handled.letter.letter_id),
        "outcome": handled.done.value,
        "task_id": str(task.task_id),
        "generation": task.generation,
        "root_id": str(task.root_id),
    }


def _outcome(each: Outcome) -> dict[str, Any]:
    outcome, task_id, problem = "matched", None, None
    if isinstance(each.result, Handled):
        outcome, task_id = each.result.done.value, str(each.result.replayed_as)
    elif each.result is not None:
        outcome, problem = "refused", problem_of(each.result)
    return {
        "letter_id": str(each.letter.letter_id),
        "outcome": outcome,
        "task_id": task_id,
        "problem": None if problem is None else problem.kind.uri,
        "detail": None if problem is None else problem.detail,
    }


def _answer(
    document: Mapping[str, Any], *, status_code: int = 200, headers: Mapping[str, str] | None = None
) -> JSONAnswer:
    return JSONAnswer(orjson.dumps(document), status_code=status_code, headers=dict(headers or {}))
