"""`/internal/tasks/*`: what workers of the HTTP protocol call.

Invariant: 200 to a report only when the task's lane says that it counted, 409 only when it says that it did not; whatever is not known in time is
503, and the same report may be sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import orjson
from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from taskline.api import problems
from taskline.api.body import parse_body, read_body
from taskline.api.gateway_models import (
    CompleteRequest,
    ExtendRequest,
    FailRequest,
    FetchAnswer,
    FetchRequest,
    LeaseExtension,
    ReportTaken,
)
from taskline.api.gateway_problems import REPORT_UNKNOWN, STALE_LEASE, WRONG_QUEUE
from taskline.api.health import Health
from taskline.api.middleware import parked
from taskline.api.openapi import answers, json_body, task_id_in_path
from taskline.api.problems import OVERLOADED, TOO_LARGE, ProblemError
from taskline.api.render import JSONAnswer, instant
from taskline.api.tenancy import ACCESS_PROBLEMS, caller_of, needs, require
from taskline.errors import InvalidResult, OutcomeUnknown, StaleLease
from taskline.infra.role import Clock
from taskline.schemas.events import ErrorCategory
from taskline.schemas.ids import TaskId, from_ms, parse_task_id
from taskline.settings import Settings
from taskline.state.keys import Scope
from taskline.workers.failure import Failure
from taskline.workers.lease_desk import Lent
from taskline.workers.lease_gateway import Gateway
from taskline.workers.lease_outcomes import Said, Taken
from taskline.workers.lease_records import worker_name
from taskline.workers.line import checked
from taskline.workers.outcome import ErrorInfo, encode_result, head

T = TypeVar("T")

_TAGS: list[str | Enum] = ["workers"]
_RETRY_AFTER = {"retry-after": "2"}
# As of errors that handlers raise (taskline.workers.outcome).
_MAX_CLASS_BYTES = 256
_MAX_MESSAGE_BYTES = 1_536
# Room for the token and for what JSON adds to a result.
_BODY_EXTRA_BYTES = 131_072
_BODY_BYTES_PER_RESULT_BYTE = 2
_BODY_PROBLEMS = (
    problems.BODY_TIMEOUT,
    problems.TOO_LARGE,
    problems.UNSUPPORTED_MEDIA_TYPE,
    problems.MALFORMED_BODY,
    problems.INVALID_FIELDS,
)
_REPORT_PROBLEMS = (
    problems.INVALID_TASK_ID,
    WRONG_QUEUE,
    STALE_LEASE,
    REPORT_UNKNOWN,
    *_BODY_PROBLEMS,
    *ACCESS_PROBLEMS,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayRoutes:
    """What the routes stand on."""

    gateway: Gateway
    settings: Settings
    health: Health
    clock: Clock


def add_gateway_routes(router: APIRouter, deps: GatewayRoutes) -> None:  # noqa: PLR0915 - one route after another
    """Add the routes. The router's routes are `DirectRoute`s."""
    gateway, settings = deps.gateway, deps.settings
    patience = settings.api.request_timeout_seconds
    limit_bytes = _BODY_BYTES_PER_RESULT_BYTE * settings.worker.max_result_bytes + _BODY_EXTRA_BYTES
    waiting = 0

    async def admitted(request: Request) -> None:
        await require(request, Scope.WORK)
        key = caller_of(request).key
        if key is not None and key.queues and gateway.queue not in key.queues:
            raise ProblemError(WRONG_QUEUE, f"this process serves queue {gateway.queue!r}")

    async def body_of(request: Request) -> bytes:
        return await read_body(request, limit_bytes=limit_bytes, timeout_seconds=patience)

    def task_of(request: Request) -> TaskId:
        return parse_task_id(request.path_params["task_id"], deps.clock.now_ms())

    @router.post(
        "/internal/tasks/fetch",
        operation_id="fetchTasks",
        summary="Fetch tasks",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=json_body(FetchRequest) | needs(Scope.WORK),
        responses=answers(
            200,
            FetchAnswer,
            "What the worker was lent.",
            WRONG_QUEUE,
            problems.NOT_READY,
            *_BODY_PROBLEMS,
            *ACCESS_PROBLEMS,
        ),
    )
    async def fetch(request: Request) -> Response:
        """Waits until there is a task of these types, or the time is over. Each task is the worker's until its lease ends."""
        nonlocal waiting
        await admitted(request)
        wanted = parse_body(await body_of(request), FetchRequest)
        if deps.health.stopping:
            raise ProblemError(problems.NOT_READY, "the process is stopping", headers=_RETRY_AFTER)
        if waiting >= settings.gateway.max_waiting:
            raise ProblemError(OVERLOADED, f"{waiting} fetches are waiting", headers=_RETRY_AFTER)
        waiting += 1
        leaving = asyncio.ensure_future(_left(request))
        try:
            with parked(request.scope):
                lent = await gateway.desk.fetch(
                    worker_name(wanted.worker_id),
                    wanted.task_types,
                    limit=min(wanted.batch_size, settings.gateway.max_batch),
                    wait_seconds=min(wanted.wait_seconds, settings.gateway.max_wait_seconds),
                    left=lambda: leaving.done() or deps.health.stopping,
                )
        finally:
            waiting -= 1
            gone = leaving.done()
            leaving.cancel()
        if gone:
            await gateway.desk.release(lent, "its worker left before it was told")
            raise ClientDisconnect
        return JSONAnswer(_fetched(lent, settings.gateway.lease_seconds))

    @router.post(
        "/internal/tasks/{task_id}/complete",
        operation_id="completeTask",
        summary="Report that a task is done",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=task_id_in_path() | json_body(CompleteRequest) | needs(Scope.WORK),
        responses=answers(200, ReportTaken, "The report counted.", *_REPORT_PROBLEMS),
    )
    async def complete(request: Request) -> Response:
        """Answers 200 once the task is completed by this. Any process of the queue takes it."""
        await admitted(request)
        task_id = task_of(request)
        told = parse_body(await body_of(request), CompleteRequest)
        try:
            result = encode_result(told.result, settings.worker.max_result_bytes)
        except InvalidResult as error:
            raise ProblemError(
                TOO_LARGE, str(error), members={"limit_bytes": settings.worker.max_result_bytes}
            ) from error
        return _taken(task_id, await _reported(gateway.outcomes.complete(task_id, told.lease_token, result)))

    @router.post(
        "/internal/tasks/{task_id}/fail",
        operation_id="failTask",
        summary="Report that a task could not be done",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=task_id_in_path() | json_body(FailRequest) | needs(Scope.WORK),
        responses=answers(
            200, ReportTaken, "The report counted; `outcome` says what follows.", *_REPORT_PROBLEMS
        ),
    )
    async def fail(request: Request) -> Response:
        """Answers 200 once the next attempt, or the dead letter, is in the log."""
        await admitted(request)
        task_id = task_of(request)
        told = parse_body(await body_of(request), FailRequest)
        return _taken(
            task_id, await _reported(gateway.outcomes.fail(task_id, told.lease_token, _failure(told)))
        )

    @router.post(
        "/internal/tasks/{task_id}/extend",
        operation_id="extendLease",
        summary="Keep a task for longer",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=task_id_in_path() | json_body(ExtendRequest) | needs(Scope.WORK),
        responses=answers(200, LeaseExtension, "The lease goes on.", *_REPORT_PROBLEMS),
    )
    async def extend(request: Request) -> Response:
        """Also the heartbeat: call it every third of the lease while the work goes on."""
        await admitted(request)
        task_id = task_of(request)
        told = parse_body(await body_of(request), ExtendRequest)
        seconds = None if told.seconds is None else min(told.seconds, settings.gateway.max_lease_seconds)
        said = None
        if told.progress is not None or told.message is not None:
            fraction, message = checked(told.progress, told.message)
            said = Said(fraction=fraction, message=message)
        extended = await _reported(
            gateway.outcomes.extend(task_id, told.lease_token, seconds=seconds, said=said)
        )
        return JSONAnswer(
            orjson.dumps(
                {
                    "task_id": task_id,
                    "lease_remaining_seconds": extended.remaining_seconds,
                    "cancel_requested": extended.cancel_requested,
                }
            )
        )


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _reported(report: Awaitable[T]) -> T:
    try:
        return await report
    except StaleLease as stale:
        raise ProblemError(STALE_LEASE, str(stale), members={"task_id": str(stale.task_id)}) from stale
    except OutcomeUnknown as unknown:
        raise ProblemError(
            REPORT_UNKNOWN, str(unknown), members={"task_id": str(unknown.task_id)}, headers=_RETRY_AFTER
        ) from unknown


def _failure(told: FailRequest) -> Failure:
    if told.permanent:
        category = ErrorCategory.PERMANENT
    elif told.retry_after_seconds is not None:
        category = ErrorCategory.TRANSIENT
    else:
        category = ErrorCategory.UNKNOWN
    return Failure(
        info=ErrorInfo(
            error_class=head(told.error_class, _MAX_CLASS_BYTES),
            message=head(told.message, _MAX_MESSAGE_BYTES),
        ),
        category=category,
        retry_after_seconds=told.retry_after_seconds,
        exact=told.retry_after_seconds is not None,
        retryable=not told.permanent,
    )


def _fetched(lent: Sequence[Lent], lease_seconds: float) -> bytes:
    return orjson.dumps(
        {
            "tasks": [
                {
                    "task_id": each.task_id,
                    "task_type": each.task_type,
                    "payload": orjson.Fragment(each.payload),
                    "timeout_seconds": each.timeout_seconds,
                    "attempt": each.attempt,
                    "lease_token": each.token,
                }
                for each in lent
            ],
            "lease_duration_seconds": lease_seconds,
        }
    )


def _taken(task_id: TaskId, taken: Taken) -> Response:
    due = None if taken.due_ms is None else instant(from_ms(taken.due_ms))
    return JSONAnswer(orjson.dumps({"task_id": task_id, "outcome": taken.outcome, "next_attempt_at": due}))
