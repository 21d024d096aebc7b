"""Whose request it is. The one place that authentication replaces."""

from __future__ import annotations

from starlette.requests import Request

DEFAULT_TENANT = "default"


async def tenant_of(request: Request) -> str:
    """The tenant on whose behalf a request is made: everybody is the same one."""
    return DEFAULT_TENANT
