"""`AsyncClient`: the API from asyncio; the same conversations as `Client` has, with awaits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from taskline.client import calls, flows, submitting
from taskline.client.asking import Patience, ask
from taskline.client.calls import LetterFields, ListFields, Submit, SubmitFields
from taskline.client.connection import OptionFields, answer_of, client_arguments, lost, request_arguments
from taskline.client.options import DEFAULT_URL, ClientOptions, where
from taskline.client.results import (
    Cancellation,
    DeadLetter,
    History,
    LetterPage,
    Replayed,
    SubmittedTask,
    TaskLookup,
    TaskPage,
    TaskSnapshot,
    TaskTypeInfo,
)
from taskline.client.submitting import SubmitFailure
from taskline.client.wire import Answer, Call, Lost, Pause, Request, Talk
from taskline.schemas.ids import TaskId

T = TypeVar("T")

_UNCHANGED: Any = object()


class AsyncClient:
    """Submits tasks over HTTP and reads what became of them, in one event loop. Close it, or use it as a context manager.

    The methods and their errors are those of `Client`, which documents them; whatever gives an iterator there gives an async one here.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        key: str | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        patience: Patience | None = None,
        **options: Unpack[OptionFields],
    ) -> None:
        """Connections are made when they are needed.

        Args:
            url: the API's address, with the path before `/tasks`, if a proxy adds one.
            key: tk_…; None: the API runs without keys.
            transport: in place of the network, for tests.
            patience: in place of the machine's clock and chance, for tests.
            **options: as in `ClientOptions`.

        Raises:
            InvalidOption: a value that can't be.
        """
        self._options = ClientOptions(url=url, key=key, **options)
        self._patience = patience or self._options.patience()
        self._http = httpx.AsyncClient(transport=transport, **client_arguments(self._options))

    @classmethod
    def from_env(cls, **options: Unpack[OptionFields]) -> Self:
        """A client of the API at `TASKLINE_API_URL` (default: http://127.0.0.1:8080), with the key in `TASKLINE_API_KEY`.

        Raises:
            InvalidSettings: a variable is set to what can't be.
        """
        url, key = where()
        return cls(url, key, **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    # ---- submitting ------------------------------------------------------------------------------------------

    async def submit(self, task_type: str, payload: Any, **options: Unpack[SubmitFields]) -> SubmittedTask:  # noqa: ANN401
        """As `Client.submit`."""
        safe = self._options.safe_retries
        return await self._run(submitting.submit(task_type, payload, options, self._patience, safe=safe))

    async def submit_many(self, items: Iterable[Submit]) -> AsyncIterator[SubmittedTask | SubmitFailure]:
        """As `Client.submit_many`."""
        for batch in submitting.batches(items, safe=self._options.safe_retries):
            for result in await self._run(submitting.submit_batch(batch, self._patience)):
                yield result

    # ---- reading ---------------------------------------------------------------------------------------------

    async def get(self, task_id: TaskId | str) -> TaskSnapshot:
        """As `Client.get`."""
        return await self._ask(calls.get(task_id))

    async def get_many(self, task_ids: Iterable[TaskId | str]) -> TaskLookup:
        """As `Client.get_many`."""
        return await self._run(flows.get_many(task_ids, self._patience))

    async def wait(
        self,
        task_id: TaskId | str,
        timeout: float | None = None,  # noqa: ASYNC109 - the server's wait is part of it
    ) -> TaskSnapshot:
        """As `Client.wait`."""
        return await self._run(flows.wait(task_id, timeout, self._patience))

    async def history(self, task_id: TaskId | str) -> History:
        """As `Client.history`."""
        return await self._ask(calls.history(task_id))

    async def list(
        self, *, page_size: int = calls.MAX_PAGE, **filters: Unpack[ListFields]
    ) -> AsyncIterator[TaskSnapshot]:
        """As `Client.list`."""
        cursor: str | None = None
        while True:
            found = await self.list_page(limit=page_size, cursor=cursor, **filters)
            for task in found.tasks:
                yield task
            cursor = found.next_cursor
            if cursor is None:
                return

    async def list_page(
        self, *, limit: int = 50, cursor: str | None = None, **filters: Unpack[ListFields]
    ) -> TaskPage:
        """As `Client.list_page`."""
        return await self._ask(calls.tasks_page(filters, limit=limit, cursor=cursor))

    async def task_types(self) -> tuple[TaskTypeInfo, ...]:
        """As `Client.task_types`."""
        return await self._ask(calls.task_types())

    # ---- acting ----------------------------------------------------------------------------------------------

    async def cancel(self, task_id: TaskId | str, *, running: bool = False) -> Cancellation:
        """As `Client.cancel`."""
        return await self._ask(calls.cancel(task_id, running=running))

    async def dead_letters(
        self, *, page_size: int = calls.MAX_PAGE, **filters: Unpack[LetterFields]
    ) -> AsyncIterator[DeadLetter]:
        """As `Client.dead_letters`."""
        cursor: str | None = None
        while True:
            found = await self.dead_letters_page(limit=page_size, cursor=cursor, **filters)
            for letter in found.dead_letters:
                yield letter
            cursor = found.cursor
            if cursor is None:
                return

    async def dead_letters_page(
        self, *, limit: int = 50, cursor: str | None = None, **filters: Unpack[LetterFields]
    ) -> LetterPage:
        """As `Client.dead_letters_page`."""
        return await self._ask(calls.letters_page(filters, limit=limit, cursor=cursor))

    async def replay(self, letter_id: TaskId | str, *, payload: Any = _UNCHANGED) -> Replayed:  # noqa: ANN401
        """As `Client.replay`."""
        edit = payload is not _UNCHANGED
        return await self._ask(calls.replay(letter_id, edit=edit, payload=payload if edit else None))

    # ---- the connection --------------------------------------------------------------------------------------

    async def _ask(self, call: Call[T]) -> T:
        return await self._run(ask(call, self._patience))

    async def _run(self, talk: Talk[T]) -> T:
        reply: Answer | Lost | None = None
        try:
            while True:
                step = talk.send(reply)
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    reply = None
                else:
                    reply = await self._send(step)
        except StopIteration as done:
            result: T = done.value
            return result

    async def _send(self, request: Request) -> Answer | Lost:
        try:
            return answer_of(await self._http.request(**request_arguments(request, self._options)))
        except httpx.TransportError as error:
            return lost(error)
