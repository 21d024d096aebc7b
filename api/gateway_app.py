"""The gateway's app: the worker protocol and the operations, with the public API's errors, bounds and keys."""

from __future__ import annotations

from fastapi import FastAPI

from taskline.api.app import begin_app, finish_app
from taskline.api.auth import Access
from taskline.api.gateway_models import GATEWAY_MODELS
from taskline.api.gateway_routes import GatewayRoutes, add_gateway_routes
from taskline.api.metrics import ApiMetrics
from taskline.api.models import Alive, Problem, Ready
from taskline.api.openapi import About
from taskline.api.operations import add_operations_routes
from taskline.state.keys import KeyReader

_ABOUT = About(
    title="Taskline workers",
    summary="Fetch tasks of one queue, and report what became of them, in any language.",
    description="""\
A fetched task is lent: it is the worker's until its lease ends, and the worker keeps it for longer with `extend`. Report `complete` or `fail` to any
process of the queue. 409 `stale-lease` means that the task went on without this worker; 503 `report-unknown` that the same report is to be sent again.

Execution is at least once: a task whose lease has ended is run again, although its first worker may still be at it.
""",
    tags=(
        {"name": "workers", "description": "Fetch tasks, report outcomes, keep leases."},
        {"name": "operations", "description": "For orchestrators, balancers and monitoring."},
    ),
    models=(*GATEWAY_MODELS, Ready, Alive, Problem),
)


def create_gateway_app(deps: GatewayRoutes, keys: KeyReader, metrics: ApiMetrics) -> FastAPI:
    """An ASGI app on a gateway. It starts and stops nothing."""
    app = begin_app(_ABOUT.title)
    add_gateway_routes(app.router, deps)
    add_operations_routes(app.router, deps.health, metrics)
    api = deps.settings.api
    access = Access(api, keys, metrics=metrics, clock=deps.clock)
    return finish_app(app, access, metrics, max_in_flight=api.max_requests_in_flight, about=_ABOUT)
