"""What the OpenAPI document says of `GET /tasks/{task_id}`: its wait, its tags, its 304."""

from __future__ import annotations

from typing import Any

from taskline.api.models import TaskView
from taskline.api.openapi import answers, query_parameters, task_id_in_path
from taskline.api.problems import ProblemType
from taskline.api.state_reads import MAX_WAIT_SECONDS

_HEADERS: dict[str, dict[str, Any]] = {
    "ETag": {"description": "Names this very state, for If-None-Match.", "schema": {"type": "string"}},
    "Cache-Control": {
        "description": "How long the state may be kept: not without asking, unless it can't change any more.",
        "schema": {"type": "string"},
    },
}
_QUERY: dict[str, tuple[str, dict[str, Any]]] = {
    "wait": (
        "Answer when the task has ended, or after so many seconds with the state of then.",
        {"type": "number", "minimum": 0, "maximum": MAX_WAIT_SECONDS, "default": 0},
    )
}
_IF_NONE_MATCH = {
    "name": "If-None-Match",
    "in": "header",
    "required": False,
    "description": "The ETag of an earlier answer: 304 if the state is still that one.",
    "schema": {"type": "string"},
}


def state_parameters() -> dict[str, Any]:
    """For FastAPI's `openapi_extra`."""
    parameters = [*task_id_in_path()["parameters"], *query_parameters(_QUERY)["parameters"], _IF_NONE_MATCH]
    return {"parameters": parameters}


def state_answers(*problems: ProblemType) -> dict[int | str, dict[str, Any]]:
    """For FastAPI's `responses`."""
    found = answers(200, TaskView, "The task as the view knows it.", *problems, headers=_HEADERS)
    found[304] = {
        "description": "The state is the one that the client has.",
        "headers": found[200]["headers"],
    }
    return found
