"""`/tasks` and `/task-types`: submit a task, read its state and its history, list what can be submitted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from enum import Enum
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from taskline.api import problems
from taskline.api.body import parse_submission, read_body
from taskline.api.deps import ApiDeps
from taskline.api.models import (
    TaskAccepted,
    TaskHistoryView,
    TaskSubmission,
    TaskTypeList,
    TaskView,
)
from taskline.api.openapi import answers, json_body, task_id_in_path
from taskline.api.problems import VIEW_UNAVAILABLE, ProblemError
from taskline.api.render import JSONAnswer, accepted_json, history_json, task_json, task_types_json
from taskline.api.tenancy import tenant_of
from taskline.schemas.ids import TaskId, parse_task_id

T = TypeVar("T")

_TAGS: list[str | Enum] = ["tasks"]
_RETRY_AFTER_VIEW_SECONDS = "2"
_READ_PROBLEMS = (problems.INVALID_TASK_ID, problems.TASK_NOT_FOUND, problems.VIEW_UNAVAILABLE)


def add_task_routes(router: APIRouter, deps: ApiDeps) -> None:
    """Add the routes, on these dependencies. The router's routes are `DirectRoute`s."""
    timeout_seconds = deps.settings.request_timeout_seconds

    def task_id_of(request: Request) -> TaskId:
        return parse_task_id(request.path_params["task_id"], deps.clock.now_ms())

    async def read(query: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(timeout_seconds):
                return await query
        except TimeoutError:
            raise ProblemError(
                VIEW_UNAVAILABLE,
                f"the view did not answer within {timeout_seconds:g} seconds",
                headers={"retry-after": _RETRY_AFTER_VIEW_SECONDS},
            ) from None

    @router.get(
        "/tasks/{task_id}",
        operation_id="getTask",
        summary="Read a task's state",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=task_id_in_path(),
        responses=answers(200, TaskView, "The task as the view knows it.", *_READ_PROBLEMS),
    )
    async def get_task(request: Request) -> Response:
        """A state never goes back: what one read has shown, every later one builds on.

        The id of a task accepted a moment ago is waited for, rather than called unknown.
        """
        task_id, tenant = task_id_of(request), await tenant_of(request)
        return JSONAnswer(task_json(await read(deps.status.get(task_id, tenant=tenant))))

    @router.post(
        "/tasks",
        operation_id="submitTask",
        summary="Submit a task",
        tags=_TAGS,
        response_class=Response,
        status_code=201,
        openapi_extra=json_body(TaskSubmission),
        responses=answers(
            201,
            TaskAccepted,
            "The task is in the log and will run.",
            problems.UNKNOWN_TASK_TYPE,
            problems.INVALID_PAYLOAD,
            problems.BODY_TIMEOUT,
            problems.TOO_LARGE,
            problems.UNSUPPORTED_MEDIA_TYPE,
            problems.MALFORMED_BODY,
            problems.INVALID_FIELDS,
            problems.DELIVERY_UNKNOWN,
            problems.NOT_ACCEPTED,
            problems.TYPES_UNAVAILABLE,
            headers={
                "Location": {
                    "description": "Where the task's state is read.",
                    "schema": {"type": "string", "format": "uri-reference"},
                }
            },
        ),
    )
    async def submit_task(request: Request) -> Response:
        """Answers 201 only after Kafka has acknowledged the task with all in-sync copies.

        Submitting the same body again makes another task.
        """
        tenant = await tenant_of(request)
        body = await read_body(request, limit_bytes=deps.max_body_bytes, timeout_seconds=timeout_seconds)
        accepted = await deps.submissions.submit(
            parse_submission(body), tenant=tenant, traceparent=request.headers.get("traceparent")
        )
        return JSONAnswer(
            accepted_json(accepted),
            status_code=201,
            headers={"location": f"{request.scope.get('root_path', '')}/tasks/{accepted.task_id}"},
        )

    @router.get(
        "/tasks/{task_id}/history",
        operation_id="getTaskHistory",
        summary="Read a task's history",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=task_id_in_path(),
        responses=answers(200, TaskHistoryView, "The task's executions and its events.", *_READ_PROBLEMS),
    )
    async def get_task_history(request: Request) -> Response:
        """Every execution with its outcome, and the events as they stand in the log."""
        task_id, tenant = task_id_of(request), await tenant_of(request)
        return JSONAnswer(history_json(await read(deps.status.history(task_id, tenant=tenant))))

    @router.get(
        "/task-types",
        operation_id="listTaskTypes",
        summary="List the registered task types",
        tags=_TAGS,
        response_class=Response,
        responses=answers(200, TaskTypeList, "All task types, by name.", problems.TYPES_UNAVAILABLE),
    )
    async def list_task_types(request: Request) -> Response:
        """What can be submitted, with each payload's Avro schema."""
        return JSONAnswer(task_types_json(deps.types.get(name) for name in deps.types.names()))
