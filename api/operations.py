"""`/healthz`, `/readyz` and `/metrics`: for orchestrators, balancers and monitoring."""

from __future__ import annotations

from enum import Enum

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from taskline.api.health import PURPOSES, Health
from taskline.api.metrics import CONTENT_TYPE, ApiMetrics
from taskline.api.models import Alive, Ready
from taskline.api.openapi import answers
from taskline.api.problems import BAD_REQUEST, NOT_READY, ProblemError
from taskline.api.render import JSONAnswer

_TAGS: list[str | Enum] = ["operations"]
_PURPOSE = {
    "parameters": [
        {
            "name": "for",
            "in": "query",
            "required": False,
            "description": "Ask only about what this needs: submissions go on without Cassandra.",
            "schema": {"type": "string", "enum": sorted(PURPOSES)},
        }
    ]
}
# Probes come every few seconds anyway.
_RETRY_AFTER_SECONDS = "2"


def add_operations_routes(router: APIRouter, health: Health, metrics: ApiMetrics) -> None:
    """Add the routes, on this process's health and numbers."""

    @router.get(
        "/healthz",
        operation_id="getHealth",
        summary="Is the process alive?",
        tags=_TAGS,
        response_class=Response,
        responses=answers(200, Alive, "The process answers; it may still lack what it needs."),
    )
    async def alive(request: Request) -> Response:
        """Alive as long as it answers. Restart the process when this fails, and only then."""
        return JSONAnswer(b'{"status":"alive"}')

    @router.get(
        "/readyz",
        operation_id="getReadiness",
        summary="Can the process do its work?",
        openapi_extra=_PURPOSE,
        tags=_TAGS,
        response_class=Response,
        responses=answers(200, Ready, "All that was asked about is there.", NOT_READY, BAD_REQUEST),
    )
    async def ready(request: Request) -> Response:
        """503 while something is away or the process is stopping; `checks` says what."""
        purpose = request.query_params.get("for")
        if purpose is not None and purpose not in PURPOSES:
            raise ProblemError(BAD_REQUEST, f"`for` may be {' or '.join(sorted(PURPOSES))}")
        checks = health.checks(purpose)
        shown = {name: {"up": check.up, "detail": check.detail} for name, check in checks.items()}
        away = [f"{name}: {check.detail or 'down'}" for name, check in checks.items() if not check.up]
        if health.stopping or away:
            raise ProblemError(
                NOT_READY,
                "; ".join((["the process is stopping"] if health.stopping else []) + away),
                members={"checks": shown},
                headers={"retry-after": _RETRY_AFTER_SECONDS},
            )
        return JSONAnswer(orjson.dumps({"status": "ready", "checks": shown}))

    @router.get(
        "/metrics",
        operation_id="getMetrics",
        summary="Prometheus metrics",
        tags=_TAGS,
        response_class=Response,
        responses=answers(
            200,
            None,
            "All numbers of the process.",
            content={"text/plain": {"schema": {"type": "string"}}},
        ),
    )
    async def numbers(request: Request) -> Response:
        """In Prometheus' text format."""
        return Response(metrics.page(), headers={"content-type": CONTENT_TYPE})
