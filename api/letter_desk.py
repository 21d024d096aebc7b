"""Dead letters on behalf of HTTP callers: those of one tenant, and tasks only.

Raw bytes are nobody's and are not shown: they are the operators', who have `taskline dlq`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from taskline.api.problems import DELIVERY_UNKNOWN, LOG_UNAVAILABLE, NOT_ACCEPTED, ProblemError
from taskline.errors import (
    DeadLetterError,
    DeliveryError,
    DeliveryUnknown,
    InvalidRequest,
    LetterGone,
    LetterNotFound,
    Unavailable,
)
from taskline.infra.log import InRecord
from taskline.producers.dlq_show import Types, task_document
from taskline.producers.replay import edited, letter_in
from taskline.producers.replayer import Handled, Replayer
from taskline.schemas.codec import Codec
from taskline.schemas.ids import TaskId
from taskline.state.dead_letters import DeadLetters, LetterFilter, LetterPage, Order
from taskline.state.letter_row import Letter, LetterKind

log = structlog.get_logger(__name__)

_RETRY_AFTER: Mapping[str, str] = {"retry-after": "2"}
_RETRY_AFTER_UNKNOWN: Mapping[str, str] = {"retry-after": "10"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one letter of many."""

    letter: Letter
    # None: a dry run.
    result: Handled | Exception | None


class LetterDesk:
    """What the routes about dead letters ask."""

    def __init__(
        self,
        letters: DeadLetters,
        replayer: Replayer,
        types: Types,
        codec: Codec,
        *,
        max_payload_bytes: int,
        timeout_seconds: float,
    ) -> None:
        """Answer from `letters` and act through `replayer`, each time within `timeout_seconds`."""
        self._letters = letters
        self._replayer = replayer
        self._types = types
        self._codec = codec
        self._max_payload_bytes = max_payload_bytes
        self._timeout = timeout_seconds

    async def page(
        self, wanted: LetterFilter, *, limit: int, cursor: str | None, order: Order = Order.NEWEST_FIRST
    ) -> LetterPage:
        """A page; raises as `DeadLetters.list`."""
        return await self._letters.list(wanted, order=order, limit=limit, cursor=cursor)

    async def show(self, letter_id: TaskId, *, tenant: str) -> dict[str, Any]:
        """A whole letter as a document.

        Raises:
            LetterNotFound, LetterGone, NotReplayable: it can't be shown.
            ProblemError: the log does not answer.
        """
        letter = await self._own(letter_id, tenant)
        whole, submission = letter_in(letter, await self._record(letter), self._codec)
        types: Types | None = self._types
        try:
            return task_document(letter, whole, submission, types, None)
        except ProblemError:
            # The types have not been read yet.
            return task_document(letter, whole, submission, None, None)

    async def replay(
        self,
        letter_id: TaskId,
        *,
        tenant: str,
        payload: Any = None,  # noqa: ANN401 - JSON
        edit: bool = False,
    ) -> Handled:
        """Replay a letter; with `edit` under another payload.

        Raises:
            DeadLetterError: it can't be replayed; its subclasses say why.
            InvalidPayload, PayloadTooLarge: the payload can't be the task's.
            ProblemError: not acknowledged, or a server is away.
        """
        letter = await self._own(letter_id, tenant)
        if letter.resolution is not None:
            # Before anything is read: the answer is the same.
            return await self._replayer.replay(letter)
        record = await self._record(letter)
        changed = None
        if edit:
            _, submission = letter_in(letter, record, self._codec)
            task_type = self._types.get(submission.task_type)
            changed = edited(task_type, payload, max_payload_bytes=self._max_payload_bytes)
        try:
            async with asyncio.timeout(self._timeout):
                return await self._replayer.replay(letter, record, edit=changed)
        except (DeliveryError, TimeoutError) as error:
            raise _undelivered(letter_id, error) from error

    async def discard(self, letter_id: TaskId, *, tenant: str, note: str | None) -> Handled:
        """Discard a letter; raises as `replay`."""
        letter = await self._own(letter_id, tenant)
        try:
            async with asyncio.timeout(self._timeout):
                return await self._replayer.discard(letter, note=note)
        except (DeliveryError, TimeoutError) as error:
            raise _undelivered(letter_id, error) from error

    async def replay_many(
        self, wanted: LetterFilter, *, limit: int, cursor: str | None, dry_run: bool
    ) -> tuple[list[Outcome], str | None]:
        """Replay a page of open letters, oldest first; each one's outcome, and where to go on.

        Raises:
            ProblemError: the log does not answer; nothing was done.
        """
        page = await self.page(wanted, limit=limit, cursor=cursor, order=Order.OLDEST_FIRST)
        if dry_run or not page.letters:
            return [Outcome(letter=letter, result=None) for letter in page.letters], page.cursor
        try:
            records = await self._replayer.read(page.letters)
        except Unavailable as error:
            raise _log_unavailable(error) from error
        results = await asyncio.gather(
            *(self._one(letter, records.get(letter.letter_id)) for letter in page.letters)
        )
        return [
            Outcome(letter=letter, result=result)
            for letter, result in zip(page.letters, results, strict=True)
        ], page.cursor

    async def _one(self, letter: Letter, record: InRecord | None) -> Handled | Exception:
        if record is None:
            return LetterGone(letter.letter_id, self._replayer.place(letter))
        try:
            async with asyncio.timeout(self._timeout):
                return await self._replayer.replay(letter, record)
        except (DeadLetterError, InvalidRequest, Unavailable) as error:
            return error
        except (DeliveryError, TimeoutError) as error:
            return _undelivered(letter.letter_id, error)

    async def _own(self, letter_id: TaskId, tenant: str) -> Letter:
        letter = await self._letters.get(letter_id, tenant=tenant)
        if letter.kind is not LetterKind.TASK:
            raise LetterNotFound(letter_id)
        return letter

    async def _record(self, letter: Letter) -> InRecord:
        try:
            return await self._replayer.read_one(letter)
        except Unavailable as error:
            raise _log_unavailable(error) from error


class LateLetters:
    """The desk, once the view is connected."""

    def __init__(self) -> None:
        self.desk: LetterDesk | None = None

    def connected(self) -> LetterDesk:
        """The desk.

        Raises:
            Unavailable: the view has not answered yet.
        """
        if self.desk is None:
            raise Unavailable("the view has not answered since this process started")
        return self.desk


def _log_unavailable(error: Unavailable) -> ProblemError:
    log.warning("dead letter not read", error=str(error))
    return ProblemError(LOG_UNAVAILABLE, "Kafka does not answer", headers=_RETRY_AFTER)


def _undelivered(letter_id: TaskId, error: Exception) -> ProblemError:
    log.warning("dead letter: not acknowledged", task_id=str(letter_id), error=str(error))
    if isinstance(error, DeliveryUnknown | TimeoutError):
        return ProblemError(
            DELIVERY_UNKNOWN,
            f"Kafka did not acknowledge in time what was done about dead letter {letter_id}; asking again does not do it twice",
            headers=_RETRY_AFTER_UNKNOWN,
        )
    return ProblemError(NOT_ACCEPTED, "Kafka did not take it; ask again", headers=_RETRY_AFTER)
