"""What is done about the dead letters once their subscribers are mended: some are replayed over HTTP, the others by the command."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import httpx

from examples.webhooks.story import Story
from examples.webhooks.tasks import TASK_TYPE
from taskline import Settings
from taskline.errors import TasklineError
from taskline.settings import as_environment

# The reason of those that the command replays; the others are replayed one by one over HTTP.
BY_COMMAND = "exhausted"
# Letters a second: nobody likes to be flooded on the day of being mended.
RATE = 100
_PAGE_LETTERS = 100
_TIMEOUT_SECONDS = 30.0
# A dead letter is in the view moments after its task reads dead, and is gone from the open ones moments after its replay.
_VISIBLE_SECONDS = 60.0
_POLL_SECONDS = 0.25


async def replay_all(settings: Settings, base_url: str, dead: Mapping[str, Story]) -> dict[str, str]:
    """Replay the dead letters of these tasks.

    Returns:
        Name → the id of the task that replays it.

    Raises:
        TimeoutError: the view did not list them all in time.
        TasklineError: the command failed.
        httpx.HTTPError: the API refused.
    """
    if not dead:
        return {}
    replayed: dict[str, str] = {}
    async with httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
        await _until_open(client, dead, {story.task_id for story in dead.values()})
        for story in dead.values():
            if story.reason != BY_COMMAND:
                answer = await client.post(f"/dead-letters/{story.task_id}/replay")
                answer.raise_for_status()
                replayed[story.task_id] = answer.json()["task_id"]
    if any(story.reason == BY_COMMAND for story in dead.values()):
        choice = ("--type", TASK_TYPE, "--reason", BY_COMMAND, "--after", _since(dead), "--rate", str(RATE))
        replayed |= await _command(settings, "replay", "--all", *choice, "--yes", "--json")
    return {name: replayed[story.task_id] for name, story in dead.items() if story.task_id in replayed}


async def still_open(base_url: str, dead: Mapping[str, Story]) -> list[str]:
    """Which of these letters nothing seems to have been done about, one line each."""
    async with httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
        try:
            await _until_open(client, dead, set())
        except TimeoutError:
            left = await _open(client, dead)
            return [f"{name}: its dead letter is still open" for name in dead if dead[name].task_id in left]
    return []


async def _until_open(client: httpx.AsyncClient, dead: Mapping[str, Story], wanted: set[str]) -> None:
    """Wait until just these of the letters are open."""
    mine = {story.task_id for story in dead.values()}
    async with asyncio.timeout(_VISIBLE_SECONDS):
        while True:
            if mine & await _open(client, dead) == wanted:
                return
            await asyncio.sleep(_POLL_SECONDS)


async def _open(client: httpx.AsyncClient, dead: Mapping[str, Story]) -> set[str]:
    """The ids of the open letters since the first of these tasks was submitted."""
    found: set[str] = set()
    if not dead:
        return found
    query: dict[str, str | int] = {"task_type": TASK_TYPE, "after": _since(dead), "limit": _PAGE_LETTERS}
    while True:
        answer = await client.get("/dead-letters", params=query)
        answer.raise_for_status()
        page = answer.json()
        found |= {letter["letter_id"] for letter in page["dead_letters"]}
        if page["cursor"] is None:
            return found
        query["cursor"] = page["cursor"]


def _since(dead: Mapping[str, Story]) -> str:
    """Only what has died since the first was submitted: the log may hold others' letters."""
    return min(story.created_at for story in dead.values()).isoformat()


async def _command(settings: Settings, *arguments: str) -> dict[str, str]:
    """Run `taskline dlq …`: a dead task's id → its replay's."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TASKLINE_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "taskline",
        "dlq",
        *arguments,
        env=environ | as_environment(settings),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    if process.returncode:
        raise TasklineError(f"`taskline dlq {' '.join(arguments)}` failed: {errors.decode().strip()}")
    rows: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines()]
    return {row["letter_id"]: row["replayed_as"] for row in rows}
