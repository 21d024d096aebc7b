"""Read the tasks back from the view, over the status API."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from examples.webhooks.story import Story, story_of

_CONCURRENCY = 16
_TIMEOUT_SECONDS = 30.0
_ENDED = frozenset({"completed", "dead", "cancelled", "expired"})
# Pause between two looks at tasks that are not over yet.
_POLL_SECONDS = 0.2


class View:
    """Reads, over one client; use it as an asynchronous context manager. It notes every status that it has met."""

    def __init__(self, base_url: str) -> None:
        """Read from the API at that address."""
        self.met: Counter[str] = Counter()
        self._client = httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT_SECONDS, trust_env=False)

    async def __aenter__(self) -> View:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def status(self, task_id: str) -> dict[str, Any] | None:
        """`GET /tasks/{id}`; None: not in the view yet."""
        answer = await self._client.get(f"/tasks/{task_id}")
        if answer.status_code != httpx.codes.OK:
            return None
        document: dict[str, Any] = answer.json()
        self.met[document["status"]] += 1
        return document

    async def until_failed_once(self, task_ids: list[str], *, seconds: float) -> dict[str, Any] | None:
        """Wait until each of the tasks shows an error.

        Returns:
            One of them as it stood while its next attempt waited; None: none was met so, or there are no tasks.

        Raises:
            TimeoutError: one shows none in time.
        """
        waiting = None
        async with asyncio.timeout(seconds):
            for task_id in task_ids:
                document = await self._until_failed(task_id)
                if document["status"] == "failed" and document["next_attempt_at"] is not None:
                    waiting = document
        return waiting

    async def stories(
        self, tasks: Mapping[str, str], advance: Callable[[], None], *, seconds: float
    ) -> dict[str, Story]:
        """Wait for the end of every task, and read its status and history.

        Args:
            tasks: name → task id.
            advance: called for each that has ended.
            seconds: for all together.

        Raises:
            TimeoutError: some did not end in time; the message names a few.
        """
        found: dict[str, Story] = {}
        names = iter(tasks)

        async def reader() -> None:
            for name in names:
                while name not in found:
                    status = await self.status(tasks[name])
                    if status is not None and status["status"] in _ENDED:
                        found[name] = story_of(status, await self._history(tasks[name]))
                        advance()
                    else:
                        await asyncio.sleep(_POLL_SECONDS)

        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for _ in range(_CONCURRENCY):
                    group.create_task(reader())
        except TimeoutError:
            missing = [f"{name} ({tasks[name]})" for name in tasks if name not in found]
            message = f"{len(missing)} tasks did not end within {seconds:.0f} s: {', '.join(missing[:5])}"
            raise TimeoutError(message) from None
        except ExceptionGroup as errors:
            # The first one tells enough; the others met the same server.
            raise errors.exceptions[0] from errors
        return {name: found[name] for name in tasks}

    async def _until_failed(self, task_id: str) -> dict[str, Any]:
        while True:
            document = await self.status(task_id)
            if document is not None and document["last_error"] is not None:
                return document
            await asyncio.sleep(_POLL_SECONDS)

    async def _history(self, task_id: str) -> dict[str, Any]:
        answer = await self._client.get(f"/tasks/{task_id}/history")
        answer.raise_for_status()
        document: dict[str, Any] = answer.json()
        return document
