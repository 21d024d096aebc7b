"""`GET /tasks/{id}` behind the route: the state as bytes with a tag, from memory, from the view, or after a wait for its end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

from prometheus_client import Counter
from starlette.requests import ClientDisconnect, Request

from taskline.api.deps import ApiDeps
from taskline.api.ended import UNCHANGING, EndedCache, Kept
from taskline.api.etag import MAX_AGE_SECONDS, Rendered
from taskline.api.middleware import parked
from taskline.api.problems import BAD_REQUEST, OVERLOADED, VIEW_UNAVAILABLE, ProblemError
from taskline.api.render import task_json
from taskline.schemas.ids import TaskId, to_ms
from taskline.state.status import TaskState
from taskline.state.waiting import EndWaiter

T = TypeVar("T")

MAX_WAIT_SECONDS = 60.0
_WAIT = re.compile(r"[0-9]{1,3}(\.[0-9]{1,6})?")
_RETRY_AFTER_VIEW = {"retry-after": "2"}
_RETRY_AFTER_WAITING = {"retry-after": "5"}


def wait_of(request: Request) -> float:
    """The query parameter `wait`, in seconds; 0 when it is absent.

    Raises:
        ProblemError: it is no such number.
    """
    text = request.query_params.get("wait", "0")
    if _WAIT.fullmatch(text) and float(text) <= MAX_WAIT_SECONDS:
        return float(text)
    raise ProblemError(BAD_REQUEST, f"wait is a number of seconds from 0 to {MAX_WAIT_SECONDS:g}")


class StateReads:
    """Reads states for the routes of one app."""

    def __init__(self, deps: ApiDeps) -> None:
        """Read from the dependencies' view; when the process stops, nobody waits any longer."""
        self._deps = deps
        self._timeout_seconds = deps.settings.request_timeout_seconds
        self._max_waiting = deps.settings.max_waiting
        self._ended = EndedCache(deps.settings.ended_cache_bytes)
        self._waiter = EndWaiter(lambda task_id, tenant: deps.status.get(task_id, tenant=tenant))
        deps.health.on_stop(self._waiter.drain)
        self._hits = Counter(
            "taskline_api_ended_cache_hits",
            "Status reads answered from memory, since the task has ended.",
            registry=deps.metrics.registry,
        )
        deps.metrics.waiting.set_function(lambda: self._waiter.waiting)

    async def read(self, task_id: TaskId, *, tenant: str, request: Request, wait_seconds: float) -> Rendered:
        """The state as it is answered, once it has ended or the wait is over.

        Raises:
            ProblemError: the view does not answer in time, or too many wait already.
            ClientDisconnect: the client has left while it waited.
            TaskNotFound: unknown, or another tenant's.
            Unavailable: the view does not answer.
        """
        kept = self._ended.get(task_id, tenant=tenant, now_ms=self._deps.clock.now_ms())
        if kept is not None:
            self._hits.inc()
            return kept
        status = self._deps.status
        state = await within(self._timeout_seconds, status.get(task_id, tenant=tenant))
        if wait_seconds and not state.status.ended:
            state = await self._wait(task_id, tenant, request, wait_seconds)
        return self._rendered(state)

    async def _wait(self, task_id: TaskId, tenant: str, request: Request, seconds: float) -> TaskState:
        if self._waiter.waiting >= self._max_waiting:
            raise ProblemError(
                OVERLOADED,
                f"{self._max_waiting} requests wait for tasks already; ask without wait",
                headers=_RETRY_AFTER_WAITING,
            )
        waiting = self._waiter.wait(task_id, tenant=tenant, seconds=seconds)
        with parked(request.scope):
            return await unless_left(request, within(seconds + self._timeout_seconds, waiting))

    def _rendered(self, state: TaskState) -> Rendered:
        body = task_json(state)
        if state.status not in UNCHANGING:
            return Rendered.of(body)
        retain_until = to_ms(state.retain_until)
        left_seconds = (retain_until - self._deps.clock.now_ms()) // 1000
        rendered = Rendered.of(body, max_age_seconds=max(0, min(MAX_AGE_SECONDS, left_seconds)))
        self._ended.put(
            state.task_id, Kept(tenant=state.tenant, rendered=rendered, retain_until=retain_until)
        )
        return rendered


async def within(seconds: float, query: Awaitable[T], said: str = "the view did not answer") -> T:
    """What the view answers, in time.

    Raises:
        ProblemError: it did not, as `said`.
    """
    try:
        async with asyncio.timeout(seconds):
            return await query
    except TimeoutError:
        raise ProblemError(
            VIEW_UNAVAILABLE, f"{said} within {seconds:g} seconds", headers=_RETRY_AFTER_VIEW
        ) from None


async def unless_left(request: Request, awaited: Awaitable[T]) -> T:
    """Wait for something as long as the client is there.

    Raises:
        ClientDisconnect: it has left; what was awaited is cancelled.
    """
    work = asyncio.ensure_future(awaited)
    left = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        left.cancel()
        work.cancel()
        await asyncio.wait((work, left))


async def _left(receive: Callable[[], Awaitable[object]]) -> None:
    while True:
        message = await receive()
        if isinstance(message, dict) and message["type"] == "http.disconnect":
            return
