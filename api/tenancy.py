"""What a route asks before anything else: may this caller do it, and whose tasks are theirs?"""

from __future__ import annotations

from typing import Any, NewType

from starlette.applications import Starlette
from starlette.requests import Request

from taskline.api.auth import Access, Caller
from taskline.api.problems import FORBIDDEN, KEYS_UNAVAILABLE, RATE_LIMITED, UNAUTHORIZED
from taskline.state.keys import Scope

# The name that whatever a caller submits, sees or steers is kept under. Only `require` makes one.
Tenant = NewType("Tenant", str)

# For `answers` of every route that calls `require`.
ACCESS_PROBLEMS = (UNAUTHORIZED, FORBIDDEN, RATE_LIMITED, KEYS_UNAVAILABLE)
SECURITY_SCHEME = "apiKey"
_CALLER = "taskline.caller"


def install(app: Starlette, access: Access) -> None:
    """Let the app's routes ask `access`."""
    app.state.access = access


def needs(scope: Scope) -> dict[str, Any]:
    """What the OpenAPI document says of a route that requires the scope, for FastAPI's `openapi_extra`."""
    return {"security": [{SECURITY_SCHEME: [scope.value]}]}


async def require(request: Request, scope: Scope, *, cost: int = 1) -> Tenant:
    """The caller's tenant, if their key has the scope.

    Args:
        request: whose caller is meant.
        scope: what the request needs.
        cost: how much it counts against the caller's rate limit for submissions (`Scope.SUBMIT`) or reads (`Scope.READ`); a
            route that learns it only from the body gives 0, and calls `charge` when it knows.

    Raises:
        ProblemError: no usable key (401), one without the scope (403), too many requests (429), or no way to tell (503).
    """
    caller = await _access(request).admit(request, scope, cost)
    request.scope[_CALLER] = caller
    return Tenant(caller.tenant)


async def charge(request: Request, scope: Scope, cost: int) -> None:
    """Count `cost` more against the caller's rate limit; after `require`.

    Raises:
        ProblemError: there is not enough left (429), or the cost is over what a limit ever allows (422).
    """
    await _access(request).charge(request, caller_of(request), scope, cost)


def caller_of(request: Request) -> Caller:
    """The caller that `require` let in: the key, with the queues that it may work on, besides the tenant."""
    caller: Caller = request.scope[_CALLER]
    return caller


def _access(request: Request) -> Access:
    access: Access = request.scope["app"].state.access
    return access
