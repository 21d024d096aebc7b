"""Routes whose endpoint takes the request and gives the answer, with nothing in between.

FastAPI matches and documents them as any other. Its solving of parameters and dependencies is left out: it costs as much as all the
rest of a status read, and these endpoints look at the request themselves.
"""

from __future__ import annotations

from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.types import Receive, Scope, Send


class DirectRoute(APIRoute):
    """For `APIRouter.route_class`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as the base takes them
        """Build the documented route, then serve it directly."""
        super().__init__(*args, **kwargs)
        endpoint = self.endpoint

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)

        self.app = serve
