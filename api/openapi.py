"""The OpenAPI 3.1 document: what FastAPI derives from the routes, with the schemas and problems put in.

Routes read their bodies and write their answers themselves, so they describe both here, through `answers` and `json_body`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from taskline import __version__
from taskline.api.cancel_models import CANCEL_MODELS
from taskline.api.examples import EXAMPLE_ID
from taskline.api.letter_models import LETTER_MODELS
from taskline.api.listing_models import LIST_MODELS
from taskline.api.models import DOCUMENTED, Problem
from taskline.api.problems import INTERNAL_ERROR, OVERLOADED, PROBLEM_JSON, ProblemType
from taskline.api.tenancy import SECURITY_SCHEME

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
    {"name": "tasks", "description": "Submit a task; read its state and its history; cancel it."},
    {"name": "dead letters", "description": "What was given up: look at it, replay it, discard it."},
    {"name": "operations", "description": "For orchestrators, balancers and monitoring."},
]
_SECURITY: Json = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key, `tk_<prefix>_<secret>`, as `taskline keys create` printed it. Each operation names the scope that it needs.",
}
# Problems that any route may answer with.
_ANYWHERE = (INTERNAL_ERROR, OVERLOADED)
_RETRY_AFTER: Json = {
    "Retry-After": {
        "description": "Seconds after which to try again.",
        "schema": {"type": "integer", "minimum": 1},
    }
}
_RATE_LIMIT: Json = {
    "RateLimit-Policy": {
        "description": "Every limit that applies: its name, `q` units in `w` seconds (draft-ietf-httpapi-ratelimit-headers). Absent: none.",
        "schema": {"type": "string"},
    },
    "RateLimit": {
        "description": "For each, how much is left (`r`) and when there will be more (`t`, in seconds).",
        "schema": {"type": "string"},
    },
}
_CHALLENGE: Json = {"WWW-Authenticate": {"description": "As RFC 6750 has it.", "schema": {"type": "string"}}}
# Headers that go with a status, beyond those of every answer.
_HEADERS_OF: dict[int, Json] = {
    401: _CHALLENGE,
    403: _CHALLENGE,
    429: _RETRY_AFTER | _RATE_LIMIT,
    503: _RETRY_AFTER,
}
_REQUEST_ID: Json = {
    "X-Request-Id": {"description": "Names the request in the server's log.", "schema": {"type": "string"}}
}
_EXAMPLE_MEMBERS: Json = {
    "task_type": "geo.nearest",
    "nearest": "geo.nearest",
    "pointer": "/iata",
    "task_id": EXAMPLE_ID,
    "task_status": "running",
    "replayed_as": EXAMPLE_ID,
    "scope": "submit",
    "violated-policies": ["submissions-tenant-60s"],
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


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a document says of its API as a whole."""

    title: str
    summary: str
    description: str
    tags: Sequence[Json]
    # Those that its routes refer to.
    models: Sequence[type[BaseModel]]


PUBLIC = About(
    title="Taskline",
    summary=_SUMMARY,
    description=_DESCRIPTION,
    tags=_TAGS,
    models=(*DOCUMENTED, *CANCEL_MODELS, *LETTER_MODELS, *LIST_MODELS),
)


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
            "headers": _REQUEST_ID | _HEADERS_OF.get(code, {}),
            "content": {
                PROBLEM_JSON: {
                    "schema": ref(Problem),
                    "examples": {kind.slug: {"value": _example(kind)} for kind in kinds},
                }
            },
        }
    return found


def json_body(model: type[BaseModel], *, required: bool = True) -> Json:
    """A JSON body, for FastAPI's `openapi_extra`."""
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": ref(model)}}}}


def query_parameters(parameters: Mapping[str, tuple[str, Json]]) -> Json:
    """Optional query parameters (name → description and schema), for FastAPI's `openapi_extra`."""
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "description": description, "schema": schema}
            for name, (description, schema) in parameters.items()
        ]
    }


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


def install(app: FastAPI, about: About | None = None) -> None:
    """Make `app.openapi()` (and /openapi.json) the whole document, built on first use; `about` another API than the public one."""
    told = about or PUBLIC

    def document() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, told)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # the way FastAPI documents


def _document(app: FastAPI, about: About) -> Json:
    document = get_openapi(
        title=about.title,
        version=__version__,
        openapi_version="3.1.0",
        summary=about.summary,
        description=about.description,
        routes=app.routes,
        tags=list(about.tags),
    )
    document["info"]["license"] = {"name": "Apache 2.0", "identifier": "Apache-2.0"}
    _, schemas = models_json_schema(
        [(model, "validation") for model in about.models],
        ref_template=_REF + "{model}",
    )
    components = document.setdefault("components", {})
    components["schemas"] = dict(sorted(schemas["$defs"].items()))
    components["securitySchemes"] = {SECURITY_SCHEME: _SECURITY}
    # What a route does not say otherwise.
    document["security"] = []
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
