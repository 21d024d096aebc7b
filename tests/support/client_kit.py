"""For tests of the HTTP client: a conversation with scripted replies and a clock of its own, and both clients behind one face."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import orjson
from api_kit import Api

from taskline.client import AsyncClient, Client
from taskline.client.asking import Patience
from taskline.client.wire import Answer, Lost, Pause, Request, Talk

T = TypeVar("T")

URL = "http://test"
TASK_ID = "019ad6e2-7c00-7d3a-9b1e-0f6c3a52d481"


def problem(slug: str, status: int, *, after: int | None = None, **members: object) -> Answer:
    document = {
        "type": f"urn:taskline:problem:{slug}",
        "title": slug,
        "status": status,
        "detail": "in words",
        "instance": "urn:taskline:request:1",
    } | members
    headers = {"content-type": "application/problem+json"}
    if after is not None:
        headers["retry-after"] = str(after)
    return Answer(status=status, headers=headers, body=orjson.dumps(document))


def good(document: object, status: int = 200) -> Answer:
    return Answer(status=status, headers={"content-type": "application/json"}, body=orjson.dumps(document))


def unsent() -> Lost:
    return Lost(error=httpx.ConnectError("refused"), sent=False)


def broken() -> Lost:
    return Lost(error=httpx.ReadError("reset"), sent=True)


Reply = Answer | Lost


@dataclass(kw_only=True)
class Script:
    """Answers a conversation's requests with what was written down; each takes `request_seconds`."""

    replies: Sequence[Reply | Callable[[Request], Reply]]
    request_seconds: float = 0.0
    now: float = 1_000.0
    requests: list[Request] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def patience(self, budget_seconds: float = 10.0, *, chance: float = 0.0) -> Patience:
        return Patience(
            budget_seconds=budget_seconds,
            now=lambda: self.now,
            pauses=lambda: itertools.repeat(1.0),
            chance=lambda: chance,
        )

    def run(self, talk: Talk[T], *, all_asked: bool = True) -> T:
        replies: Iterator[Reply | Callable[[Request], Reply]] = iter(self.replies)
        answer: Reply | None = None
        try:
            while True:
                step = talk.send(answer)
                if isinstance(step, Pause):
                    self.pauses.append(step.seconds)
                    self.now += step.seconds
                    answer = None
                else:
                    self.requests.append(step)
                    self.now += self.request_seconds
                    reply = next(replies)
                    answer = reply(step) if callable(reply) else reply
        except StopIteration as done:
            result: T = done.value
        left = list(replies)
        assert not (all_asked and left), f"{len(left)} replies were not asked for"
        return result


class OnApi(httpx.BaseTransport):
    """The app in memory, from plain code."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        content = request.read()

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._api.app)
            async with httpx.AsyncClient(transport=transport) as http:
                return await http.request(
                    request.method, request.url, headers=request.headers, content=content
                )

        found = self._api.run(send())
        return httpx.Response(found.status_code, headers=found.headers, content=found.content)


@dataclass(kw_only=True)
class Caller:
    """Calls a method of either client, and gives its result, lists for iterators."""

    client: Client | AsyncClient
    run: Callable[[Any], Any]

    def __call__(self, method: str, *arguments: Any, **options: Any) -> Any:
        found = getattr(self.client, method)(*arguments, **options)
        if isinstance(self.client, AsyncClient):
            return self.run(_collected(found))
        return list(found) if isinstance(found, Iterator) else found

    def close(self) -> None:
        if isinstance(self.client, AsyncClient):
            self.run(self.client.close())
        else:
            self.client.close()


async def _collected(found: Any) -> Any:
    return [each async for each in found] if hasattr(found, "__aiter__") else await found


def on_api(kind: str, api: Api, **options: Any) -> Caller:
    if kind == "asyncio":
        transport = httpx.ASGITransport(app=api.app)
        return Caller(client=AsyncClient(URL, transport=transport, **options), run=api.run)
    return Caller(client=Client(URL, transport=OnApi(api), **options), run=api.run)
