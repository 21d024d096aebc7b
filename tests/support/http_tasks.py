"""Handlers for tests over HTTP: what they are given comes back as a result, as an error, or late."""

from __future__ import annotations

import asyncio
from typing import Any

from taskline import Permanent, Registry, task


@task("http.echo")
async def echo(payload: Any) -> Any:
    return payload


@task("http.fail")
async def fail(payload: dict[str, Any]) -> None:
    raise Permanent(payload["secret"])


@task("http.sleep")
async def sleep(payload: dict[str, float]) -> str:
    await asyncio.sleep(payload["seconds"])
    return "slept"


registry = Registry(echo, fail, sleep)
