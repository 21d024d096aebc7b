"""`Client`: the API from plain (threaded) code."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
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


class Client:
    """Submits tasks over HTTP and reads what became of them; safe to share between threads. Close it, or use it as a context manager.

    Every method raises: `Unauthorized`, `Forbidden`, `RateLimited`, `ServiceUnavailable`, `Unavailable` (no answer), `ServerFault`,
    `UnexpectedAnswer`; beside what it names itself. What is tried again before that, and for how long, is in docs/how-to/http-client.md.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        key: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
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
        self._http = httpx.Client(transport=transport, **client_arguments(self._options))

    @classmethod
    def from_env(cls, **options: Unpack[OptionFields]) -> Self:
        """A client of the API at `TASKLINE_API_URL` (default: http://127.0.0.1:8080), with the key in `TASKLINE_API_KEY`.

        Raises:
            InvalidSettings: a variable is set to what can't be.
        """
        url, key = where()
        return cls(url, key, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # ---- submitting ------------------------------------------------------------------------------------------

    def submit(self, task_type: str, payload: Any, **options: Unpack[SubmitFields]) -> SubmittedTask:  # noqa: ANN401
        """Submit a task; returns once it is in the log.

        Args:
            task_type: a registered name.
            payload: the handler's argument, as JSON can write it (dataclasses and pydantic models can be).
            **options: as in `SubmitFields`.

        Raises:
            UnknownTaskType: no such type.
            InvalidPayload: off the type's schema; `pointer` names the field.
            PayloadTooLarge, InvalidFields: too large; an impossible option.
            IdempotencyConflict: the key was used for another submission.
            SubmissionUnknown: nobody could tell whether it is in the log (a `DeliveryUnknown`).
        """
        safe = self._options.safe_retries
        return self._run(submitting.submit(task_type, payload, options, self._patience, safe=safe))

    def submit_many(self, items: Iterable[Submit]) -> Iterator[SubmittedTask | SubmitFailure]:
        """Submit tasks by the hundred; the results come in the order of the items, which are taken as they are needed.

        One that is refused, or whose fate is unknown, gives a `SubmitFailure` and does not stop the others.
        """
        for batch in submitting.batches(items, safe=self._options.safe_retries):
            yield from self._run(submitting.submit_batch(batch, self._patience))

    # ---- reading ---------------------------------------------------------------------------------------------

    def get(self, task_id: TaskId | str) -> TaskSnapshot:
        """A task's state.

        Raises:
            TaskNotFound: never accepted, another tenant's, or forgotten.
        """
        return self._ask(calls.get(task_id))

    def get_many(self, task_ids: Iterable[TaskId | str]) -> TaskLookup:
        """The states of any number of tasks, a hundred to a request; ids that are no task of the tenant's are in `unknown`."""
        return self._run(flows.get_many(task_ids, self._patience))

    def wait(self, task_id: TaskId | str, timeout: float | None = None) -> TaskSnapshot:
        """Wait until a task has ended (completed, dead, cancelled, expired); None: however long it takes.

        Raises:
            TaskNotFound: as `get`.
            NotEnded: not within `timeout` seconds (a `TimeoutError`); `task` is as it was then.
        """
        return self._run(flows.wait(task_id, timeout, self._patience))

    def history(self, task_id: TaskId | str) -> History:
        """A task's executions and its events.

        Raises:
            TaskNotFound: as `get`.
        """
        return self._ask(calls.history(task_id))

    def list(
        self, *, page_size: int = calls.MAX_PAGE, **filters: Unpack[ListFields]
    ) -> Iterator[TaskSnapshot]:
        """The tenant's tasks, newest first, without their results; pages are asked for as they are needed."""
        cursor: str | None = None
        while True:
            found = self.list_page(limit=page_size, cursor=cursor, **filters)
            yield from found.tasks
            cursor = found.next_cursor
            if cursor is None:
                return

    def list_page(
        self, *, limit: int = 50, cursor: str | None = None, **filters: Unpack[ListFields]
    ) -> TaskPage:
        """One page of `list`; go on with its `next_cursor` and the same filters.

        Raises:
            InvalidFields: a filter that can't be.
            InvalidCursor: not of a list with these filters.
        """
        return self._ask(calls.tasks_page(filters, limit=limit, cursor=cursor))

    def task_types(self) -> tuple[TaskTypeInfo, ...]:
        """What can be submitted."""
        return self._ask(calls.task_types())

    # ---- acting ----------------------------------------------------------------------------------------------

    def cancel(self, task_id: TaskId | str, *, running: bool = False) -> Cancellation:
        """Withdraw a task; with `decided` in the result its handler will not start again.

        Args:
            task_id: the task.
            running: abort it if it runs.

        Raises:
            TaskNotFound: as `get`.
            CancelRefused: it runs, or is over.
        """
        return self._ask(calls.cancel(task_id, running=running))

    def dead_letters(
        self, *, page_size: int = calls.MAX_PAGE, **filters: Unpack[LetterFields]
    ) -> Iterator[DeadLetter]:
        """What was given up, newest first; pages are asked for as they are needed."""
        cursor: str | None = None
        while True:
            found = self.dead_letters_page(limit=page_size, cursor=cursor, **filters)
            yield from found.dead_letters
            cursor = found.cursor
            if cursor is None:
                return

    def dead_letters_page(
        self, *, limit: int = 50, cursor: str | None = None, **filters: Unpack[LetterFields]
    ) -> LetterPage:
        """One page of `dead_letters`; raises as `list_page`."""
        return self._ask(calls.letters_page(filters, limit=limit, cursor=cursor))

    def replay(self, letter_id: TaskId | str, *, payload: Any = _UNCHANGED) -> Replayed:  # noqa: ANN401
        """Submit a dead task again, as a new one; under another `payload`, if one is given.

        Raises:
            LetterNotFound, LetterResolved, NotReplayable: nothing to replay.
            InvalidPayload, UnknownTaskType: as `submit`.
            Conflict: replayed as often as is allowed.
        """
        edit = payload is not _UNCHANGED
        return self._ask(calls.replay(letter_id, edit=edit, payload=payload if edit else None))

    # ---- the connection --------------------------------------------------------------------------------------

    def _ask(self, call: Call[T]) -> T:
        return self._run(ask(call, self._patience))

    def _run(self, talk: Talk[T]) -> T:
        reply: Answer | Lost | None = None
        try:
            while True:
                step = talk.send(reply)
                if isinstance(step, Pause):
                    time.sleep(step.seconds)
                    reply = None
                else:
                    reply = self._send(step)
        except StopIteration as done:
            result: T = done.value
            return result

    def _send(self, request: Request) -> Answer | Lost:
        try:
            return answer_of(self._http.request(**request_arguments(request, self._options)))
        except httpx.TransportError as error:
            return lost(error)
