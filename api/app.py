"""The app: routes, errors and documentation put together on the given dependencies."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from taskline.api import openapi, tenancy
from taskline.api.auth import Access
from taskline.api.batch import add_batch_route
from taskline.api.cancel import add_cancel_route
from taskline.api.dead_letters import add_letter_routes
from taskline.api.deps import ApiDeps
from taskline.api.direct import DirectRoute
from taskline.api.errors import problem_of
from taskline.api.listing import add_listing_route
from taskline.api.metrics import ApiMetrics
from taskline.api.middleware import CLIENT_LEFT, REQUEST_ID, RequestBoundary
from taskline.api.operations import add_operations_routes
from taskline.api.problems import INVALID_TASK_ID, METHOD_NOT_ALLOWED, ProblemError, problem_response
from taskline.api.tasks import add_task_routes
from taskline.errors import TasklineError

# The app counts for itself (`taskline.api.metrics`); the framework would look for OpenTelemetry providers at every request.
# (Versions that know no such argument ignore it.)
_NO_TELEMETRY: dict[str, Any] = {"telemetry": {"tracing": False, "metrics": False, "logs": False}}


def create_app(deps: ApiDeps) -> FastAPI:
    """An ASGI app on these dependencies. It starts and stops nothing: whoever made the dependencies closes them."""
    app = begin_app("Taskline")
    add_task_routes(app.router, deps)
    add_batch_route(app.router, deps)
    add_cancel_route(app.router, deps)
    add_listing_route(app.router, deps)
    add_letter_routes(app.router, deps)
    add_operations_routes(app.router, deps.health, deps.metrics)
    access = Access(deps.settings, deps.keys, metrics=deps.metrics, clock=deps.clock, limits=deps.limits)
    return finish_app(app, access, deps.metrics, max_in_flight=deps.settings.max_requests_in_flight)


def begin_app(title: str) -> FastAPI:
    """An app without routes; they go straight into its own router, since an included one is looked up anew for each request."""
    app = FastAPI(
        title=title,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        **_NO_TELEMETRY,
    )
    app.router.route_class = DirectRoute
    return app


def finish_app(
    app: FastAPI,
    access: Access,
    metrics: ApiMetrics,
    *,
    max_in_flight: int,
    about: openapi.About | None = None,
) -> FastAPI:
    """Put around the routes what every app of Taskline has: its description, bounds, errors and the check of keys."""
    # The pages that describe the API come last: routes are tried in order.
    app.openapi_url, app.docs_url = "/openapi.json", "/docs"
    app.setup()
    app.add_middleware(RequestBoundary, metrics=metrics, max_in_flight=max_in_flight)
    for kind in (TasklineError, HTTPException):
        app.add_exception_handler(kind, _answer_problem)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    openapi.install(app, about)
    tenancy.install(app, access)
    return app


async def _answer_problem(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    own = [route for route in routes if route.path == path]
    if (
        problem.kind is INVALID_TASK_ID
        and own
        and not any(request.method in (route.methods or ()) for route in own)
    ):
        # `/tasks/batch` is no task's, although the template of one took it for a method that it does not have.
        problem = ProblemError(METHOD_NOT_ALLOWED, "the path does not take this method")
    if problem.kind is METHOD_NOT_ALLOWED:
        # All that the path takes (RFC 9110 §15.5.6): the framework names the methods of one route only.
        takers = own or [route for route in routes if route.path_regex.match(path)]
        methods = {method for route in takers for method in route.methods or ()}
        problem.headers = {"allow": ", ".join(sorted(methods))}
    return problem_response(problem, request.scope[REQUEST_ID])


async def _answer_nobody(request: Request, error: Exception) -> Response:
    # Nothing is sent to a client that has left; the status is for the numbers.
    return Response(status_code=CLIENT_LEFT)
