"""What `POST /tasks` answers: accepted, accepted before, or a duplicate; and the same for the OpenAPI document."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from taskline.api import problems
from taskline.api.dedup import Duplicate
from taskline.api.models import TaskAccepted, TaskDuplicate
from taskline.api.openapi import answers
from taskline.api.problems import ProblemType
from taskline.api.render import JSONAnswer, accepted_json, duplicate_fields
from taskline.api.submissions import Outcome
from taskline.api.tenancy import ACCESS_PROBLEMS

_LOCATION: dict[str, Any] = {
    "Location": {
        "description": "Where the task's state is read.",
        "schema": {"type": "string", "format": "uri-reference"},
    }
}
_REPLAYED: dict[str, Any] = {
    "Idempotency-Replayed": {
        "description": "Present: an earlier request with the same idempotency key has submitted the task.",
        "schema": {"type": "string", "const": "true"},
    }
}
# What can be wrong with a request's body, of one task or several.
BODY_PROBLEMS: tuple[ProblemType, ...] = (
    problems.BODY_TIMEOUT,
    problems.TOO_LARGE,
    problems.UNSUPPORTED_MEDIA_TYPE,
    problems.MALFORMED_BODY,
    problems.INVALID_FIELDS,
)


def submission_answer(outcome: Outcome, *, root_path: str) -> Response:
    """201, or 200 for a duplicate."""
    if isinstance(outcome, Duplicate):
        return JSONAnswer(
            orjson.dumps(duplicate_fields(outcome)),
            headers={"location": f"{root_path}/tasks/{outcome.task_id}"},
        )
    submission = outcome.submission
    headers = {"location": f"{root_path}/tasks/{submission.task_id}"}
    if outcome.replayed:
        headers["idempotency-replayed"] = "true"
    return JSONAnswer(accepted_json(submission), status_code=201, headers=headers)


def submission_answers() -> dict[int | str, dict[str, Any]]:
    """Every answer, for FastAPI's `responses`."""
    duplicate = answers(
        200,
        TaskDuplicate,
        "Not accepted: inside its dedup window another task stands for it.",
        headers=_LOCATION,
    )
    accepted = answers(
        201,
        TaskAccepted,
        "The task is in the log and will run.",
        problems.UNKNOWN_TASK_TYPE,
        problems.INVALID_PAYLOAD,
        *BODY_PROBLEMS,
        problems.IDEMPOTENCY_CONFLICT,
        problems.DELIVERY_UNKNOWN,
        problems.IN_PROGRESS,
        problems.REPLACE_UNKNOWN,
        problems.NOT_ACCEPTED,
        problems.TYPES_UNAVAILABLE,
        problems.CLAIMS_UNAVAILABLE,
        *ACCESS_PROBLEMS,
        headers=_LOCATION | _REPLAYED,
    )
    return {200: duplicate[200], **accepted}
