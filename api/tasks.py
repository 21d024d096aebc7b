"""`/tasks` and `/task-types`: submit a task, read its state and its history, list what can be submitted."""

from __future__ import annotations

from enum import Enum

from fastapi import APIRouter, Request
from starlette.responses import Response

from taskline.api import idempotency, problems
from taskline.api.body import parse_submission, read_body
from taskline.api.deps import ApiDeps
from taskline.api.etag import StateAnswer
from taskline.api.models import (
    TaskHistoryView,
    TaskSubmission,
    TaskTypeList,
)
from taskline.api.openapi import answers, json_body, task_id_in_path
from taskline.api.outcomes import SubmissionCounts, Via
from taskline.api.problems import BAD_REQUEST
from taskline.api.render import JSONAnswer, history_json, task_types_json
from taskline.api.state_docs import state_answers, state_parameters
from taskline.api.state_reads import StateReads, wait_of, within
from taskline.api.submission_answers import submission_answer, submission_answers
from taskline.api.tenancy import ACCESS_PROBLEMS, needs, require
from taskline.schemas.ids import TaskId, parse_task_id
from taskline.state.keys import Scope

_TAGS: list[str | Enum] = ["tasks"]
_READ_PROBLEMS = (
    problems.INVALID_TASK_ID,
    problems.TASK_NOT_FOUND,
    problems.VIEW_UNAVAILABLE,
    *ACCESS_PROBLEMS,
)


def add_task_routes(router: APIRouter, deps: ApiDeps) -> None:
    """Add the routes, on these dependencies. The router's routes are `DirectRoute`s."""
    timeout_seconds = deps.settings.request_timeout_seconds
    states = StateReads(deps)
    counts = SubmissionCounts(deps.metrics, Via.SINGLE)

    def task_id_of(request: Request) -> TaskId:
        return parse_task_id(request.path_params["task_id"], deps.clock.now_ms())

    @router.get(
        "/tasks/{task_id}",
        operation_id="getTask",
        summary="Read a task's state",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=state_parameters() | needs(Scope.READ),
        responses=state_answers(BAD_REQUEST, *_READ_PROBLEMS),
    )
    async def get_task(request: Request) -> Response:
        """A state never goes back: what one read has shown, every later one builds on.

        The id of a task accepted a moment ago is waited for, rather than called unknown. With `wait`, the answer comes when the task
        has ended, or when so many seconds are over. `If-None-Match` with the ETag of an earlier answer gives 304 while nothing has changed.
        """
        tenant, task_id = await require(request, Scope.READ), task_id_of(request)
        rendered = await states.read(task_id, tenant=tenant, request=request, wait_seconds=wait_of(request))
        return StateAnswer(rendered, request.headers.get("if-none-match"))

    @router.post(
        "/tasks",
        operation_id="submitTask",
        summary="Submit a task",
        tags=_TAGS,
        response_class=Response,
        status_code=201,
        openapi_extra=json_body(TaskSubmission)
        | needs(Scope.SUBMIT)
        | {"parameters": [idempotency.HEADER_PARAMETER]},
        responses=submission_answers(),
    )
    async def submit_task(request: Request) -> Response:
        """Answers 201 only after Kafka has acknowledged the task with all in-sync copies.

        Submitting the same body again makes another task, unless it has an idempotency key, or a dedup key.
        """
        tenant = await require(request, Scope.SUBMIT)
        body = await read_body(request, limit_bytes=deps.max_body_bytes, timeout_seconds=timeout_seconds)
        try:
            outcome = await deps.submissions.submit(
                idempotency.with_header(parse_submission(body), request),
                tenant=tenant,
                traceparent=request.headers.get("traceparent"),
            )
        except Exception as error:
            counts.count(error)
            raise
        counts.count(outcome)
        return submission_answer(outcome, root_path=request.scope.get("root_path", ""))

    @router.get(
        "/tasks/{task_id}/history",
        operation_id="getTaskHistory",
        summary="Read a task's history",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=task_id_in_path() | needs(Scope.READ),
        responses=answers(200, TaskHistoryView, "The task's executions and its events.", *_READ_PROBLEMS),
    )
    async def get_task_history(request: Request) -> Response:
        """Every execution with its outcome, and the events as they stand in the log."""
        tenant, task_id = await require(request, Scope.READ), task_id_of(request)
        found = await within(timeout_seconds, deps.status.history(task_id, tenant=tenant))
        return JSONAnswer(history_json(found))

    @router.get(
        "/task-types",
        operation_id="listTaskTypes",
        summary="List the registered task types",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=needs(Scope.READ),
        responses=answers(
            200,
            TaskTypeList,
            "All task types, by name.",
            problems.TYPES_UNAVAILABLE,
            *ACCESS_PROBLEMS,
        ),
    )
    async def list_task_types(request: Request) -> Response:
        """What can be submitted, with each payload's Avro schema."""
        await require(request, Scope.READ)
        return JSONAnswer(task_types_json(deps.types.get(name) for name in deps.types.names()))
