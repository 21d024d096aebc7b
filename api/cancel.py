"""`DELETE /tasks/{task_id}`: cancel a task, and know what came of it.

Invariant: 200 only when the task's lane says that it is cancelled, 409 only when it says that it was running or over; whatever is not known in
time is 202 (it is in the log, and resolved later), and whatever may not be in the log is 503.
"""

from __future__ import annotations

from enum import Enum

import orjson
import structlog
from fastapi import APIRouter, Request
from starlette.responses import Response

from taskline.api import problems
from taskline.api.cancel_models import CancelPending, TaskCancelled
from taskline.api.deps import ApiDeps
from taskline.api.openapi import answers, query_parameters, task_id_in_path
from taskline.api.problems import BAD_REQUEST, CANCEL_UNKNOWN, NOT_CANCELLED, ProblemError
from taskline.api.render import JSONAnswer, instant
from taskline.api.state_reads import within
from taskline.api.tenancy import ACCESS_PROBLEMS, needs, require
from taskline.errors import DeliveryError
from taskline.producers.cancelling import Cancellation, Fate
from taskline.schemas.ids import parse_task_id
from taskline.state.keys import Scope

log = structlog.get_logger(__name__)

_TAGS: list[str | Enum] = ["tasks"]
_ABORT = "abort"
_RETRY_AFTER = {"retry-after": "2"}
_LOCATION = {
    "Location": {
        "description": "Where the task's state is read.",
        "schema": {"type": "string", "format": "uri-reference"},
    }
}
_QUERY = query_parameters(
    {
        "running": (
            "What to do if the task is running: stop it, too. Without this it is left alone (409).",
            {"type": "string", "enum": [_ABORT]},
        )
    }
)
_PROBLEMS = (
    BAD_REQUEST,
    problems.INVALID_TASK_ID,
    problems.TASK_NOT_FOUND,
    NOT_CANCELLED,
    CANCEL_UNKNOWN,
    problems.VIEW_UNAVAILABLE,
    *ACCESS_PROBLEMS,
)


def add_cancel_route(router: APIRouter, deps: ApiDeps) -> None:
    """Add the route, on these dependencies. The router's routes are `DirectRoute`s."""
    timeout_seconds = deps.settings.request_timeout_seconds

    @router.delete(
        "/tasks/{task_id}",
        operation_id="cancelTask",
        summary="Cancel a task",
        tags=_TAGS,
        response_class=Response,
        openapi_extra={"parameters": [*task_id_in_path()["parameters"], *_QUERY["parameters"]]}
        | needs(Scope.SUBMIT),
        responses=answers(
            200, TaskCancelled, "It is cancelled: its handler will not start again.", *_PROBLEMS
        )
        | {
            202: answers(202, CancelPending, "In the log; the task's state will tell.", headers=_LOCATION)[
                202
            ]
        },
    )
    async def cancel_task(request: Request) -> Response:
        """For what waits: for a worker, for its time, for its next attempt. Asking again is answered the same way.

        A task that runs is left alone, unless `running=abort` asks for it to be stopped, too.
        """
        tenant = await require(request, Scope.SUBMIT)
        task_id = parse_task_id(request.path_params["task_id"], deps.clock.now_ms())
        abort = _abort_of(request)
        before = await within(timeout_seconds, deps.status.get(task_id, tenant=tenant))
        try:
            found = await deps.cancels.ask(before, abort=abort)
        except (DeliveryError, TimeoutError) as error:
            deps.metrics.cancels.labels("unknown").inc()
            log.warning("cancel not acknowledged", task_id=str(task_id), error=str(error))
            raise ProblemError(
                CANCEL_UNKNOWN,
                f"Kafka did not acknowledge the cancel of task {task_id} in time; it may take effect all the same: ask again",
                members={"task_id": str(task_id)},
                headers=_RETRY_AFTER,
            ) from error
        deps.metrics.cancels.labels(found.fate.name.lower()).inc()
        return _answer(found, root_path=request.scope.get("root_path", ""))


def _abort_of(request: Request) -> bool:
    running = request.query_params.get("running")
    if running not in (None, _ABORT):
        raise ProblemError(BAD_REQUEST, f"`running` may be {_ABORT}, or absent")
    return running == _ABORT


def _answer(found: Cancellation, *, root_path: str) -> Response:
    state = found.state
    if found.fate is Fate.CANCELLED:
        body = {"task_id": state.task_id, "status": state.status, "cancelled_at": instant(state.completed_at)}
        return JSONAnswer(orjson.dumps(body))
    if found.fate is Fate.REQUESTED:
        return JSONAnswer(
            orjson.dumps({"task_id": state.task_id, "status": "cancel_requested"}),
            status_code=202,
            headers={"location": f"{root_path}/tasks/{state.task_id}"},
        )
    over = (
        f"it has ended: {state.status}"
        if state.status.ended
        else "it is running, or its worker has just died"
    )
    raise ProblemError(
        NOT_CANCELLED,
        f"task {state.task_id} can't be cancelled: {over}",
        members={"task_id": str(state.task_id), "task_status": state.status.value},
    )
