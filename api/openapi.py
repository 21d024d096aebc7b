"""The OpenAPI 3.1 document: what FastAPI derives from the routes, with the schemas and problems put in.

Routes read their bodies and write their answers themselves, so they describe both here, through `answers` and `json_body`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from taskline import __version__
from taskline.api.examples import EXAMPLE_ID
from taskline.api.models import DOCUMENTED, Problem
from taskline.api.problems import INTERNAL_ERROR, OVERLOADED, PROBLEM_JSON, ProblemType

Json = dict[str, Any]

_REF = "#/components/schemas/"
_SUMMARY = "Submit tasks to a distributed queue and read what became of them."
_DESCRIPTION = """\
A submitted task is in the log once `POST /tasks` answers 201: it will run, whatever dies. Its state is read from a view that follows the log
within milliseconds; a read just after the submission waits for it.

Errors are problems (RFC 9457): decide by `type` or by the status, the words may change. Every answer carries `X-Request-Id`, the
caller's own or a new one. Instants are ISO 8601 in UTC with milliseconds.
"""
_TAGS = [
    {"name": "tasks", "description": "Submit a task; read its state and its history."},
    {"name": "operations", "description": "For orchestrators, balancers and monitoring."},
]
# Problems that any route may answer with.
_ANYWHERE = (INTERNAL_ERROR, OVERLOADED)
_RETRY_AFTER: Json = {
    "Retry-After": {
        "description": "Seconds after which to try again.",
        "schema": {"type": "integer", "minimum": 1},
    }
}
_REQUEST_ID: Json = {
    "X-Request-Id": {"description": "Names the request in the server's log.", "schema": {"type": "string"}}
}
_EXAMPLE_MEMBERS: Json = {
    "task_type": "geo.nearest",
    "nearest": "geo.nearest",
    "pointer": "/iata",
    "task_id": EXAMPLE_ID,
    "limit_bytes": 262_144,
    "size_bytes": 300_112,
    "errors": [
        {
            "pointer": "/priorty",
            "detail": "unknown field 'priorty'; did you mean 'priority'?",
            "nearest": "priority",
        }
    ],
    "checks": {
        "kafka": {"up": True, "detail": None},
        "view": {"up": False, "detail": "Cassandra does not answer"},
    },
}


def ref(model: type[BaseModel]) -> Json:
    """A reference to one of the documented models."""
    return {"$ref": _REF + model.__name__}


def answers(
    status: int,
    model: type[BaseModel] | None,
    description: str,
    *problems: ProblemType,
    headers: Mapping[str, Json] | None = None,
    content: Json | None = None,
) -> dict[int | str, Json]:
    """Every answer of a route, for FastAPI's `responses`: the good one, and each problem under its status."""
    found: dict[int | str, Json] = {
        status: {
            "description": description,
            "headers": {**_REQUEST_ID, **(headers or {})},
            "content": content or ({"application/json": {"schema": ref(model)}} if model else {}),
        }
    }
    by_status: dict[int, list[ProblemType]] = {}
    for problem in (*problems, *_ANYWHERE):
        by_status.setdefault(problem.status, []).append(problem)
    for code, kinds in sorted(by_status.items()):
        found[code] = {
            "description": "\n\n".join(f"`{kind.slug}`: {kind.meaning}" for kind in kinds),
            "headers": _REQUEST_ID | (_RETRY_AFTER if code == 503 else {}),
            "content": {
                PROBLEM_JSON: {
                    "schema": ref(Problem),
                    "examples": {kind.slug: {"value": _example(kind)} for kind in kinds},
                }
            },
        }
    return found


def json_body(model: type[BaseModel]) -> Json:
    """A required JSON body, for FastAPI's `openapi_extra`."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": ref(model)}}}}


def task_id_in_path() -> Json:
    """The path parameter `task_id`, for FastAPI's `openapi_extra`."""
    return {
        "parameters": [
            {
                "name": "task_id",
                "in": "path",
                "required": True,
                "description": "The task's id, a UUIDv7, as `POST /tasks` gave it.",
                "schema": {"type": "string", "format": "uuid"},
                "example": EXAMPLE_ID,
            }
        ]
    }


def install(app: FastAPI) -> None:
    """Make `app.openapi()` (and /openapi.json) the whole document, built on first use."""

    def document() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # the way FastAPI documents


def _document(app: FastAPI) -> Json:
    document = get_openapi(
        title="Taskline",
        version=__version__,
        openapi_version="3.1.0",
        summary=_SUMMARY,
        description=_DESCRIPTION,
        routes=app.routes,
        tags=_TAGS,
    )
    document["info"]["license"] = {"name": "Apache 2.0", "identifier": "Apache-2.0"}
    _, schemas = models_json_schema(
        [(model, "validation") for model in DOCUMENTED], ref_template=_REF + "{model}"
    )
    document.setdefault("components", {})["schemas"] = dict(sorted(schemas["$defs"].items()))
    return document


def _example(kind: ProblemType) -> Json:
    return {
        "type": kind.uri,
        "title": kind.title,
        "status": kind.status,
        "detail": kind.meaning,
        "instance": "urn:taskline:request:5f2b9c0d1e7a4b36",
        **{name: _EXAMPLE_MEMBERS[name] for name in kind.members},
    }
