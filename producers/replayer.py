"""What is done about a dead letter: it is replayed, or discarded.

Invariant: the new task is acknowledged by the log before the letter is said to be resolved. Whatever breaks off in between, the next
try comes to the same new task (`taskline.producers.replay`): it looks in the view whether that was submitted, and then only
says so. What it can't see there yet it submits once more, under the same id.

Raw bytes have no such id: if their replay breaks off before it is noted, the next one appends the bytes once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import structlog

from taskline.errors import LetterGone, LetterResolved
from taskline.infra.kafka.fetch import RecordSource
from taskline.infra.log import AsyncLog, InRecord, Position
from taskline.infra.role import Clock, SystemClock
from taskline.infra.topics import Topics
from taskline.producers.replay import Edit, letter_in, raw_replay, replay_of, resolution_record
from taskline.producers.submission import dispatch_record
from taskline.schemas.codec import Codec
from taskline.schemas.events import LetterAction, TaskSubmitted
from taskline.schemas.ids import TaskId
from taskline.settings import Settings
from taskline.state.letter_row import Letter, LetterKind, Resolution
from taskline.state.store import ViewStore

log = structlog.get_logger(__name__)


class Done(StrEnum):
    """What became of a letter."""

    REPLAYED = "replayed"
    # An earlier replay had submitted the task and was broken off before it said so.
    RESUMED = "resumed"
    DISCARDED = "discarded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Handled:
    """A letter that is resolved now."""

    letter: Letter
    done: Done
    # The task that replays it; None: the letter was raw, or was discarded.
    task: TaskSubmitted | None = None

    @property
    def replayed_as(self) -> TaskId | None:
        """That task's id."""
        return None if self.task is None else self.task.task_id


class Replayer:
    """Replays and discards dead letters; belongs to one event loop."""

    def __init__(
        self,
        log: AsyncLog,
        records: RecordSource,
        tasks: ViewStore,
        codec: Codec,
        settings: Settings,
        *,
        by: str,
        clock: Clock | None = None,
    ) -> None:
        """Work for `by`.

        Args:
            log: where tasks and resolutions are appended.
            records: where whole letters are read.
            tasks: the view, for what was submitted before.
            codec: reads and writes records.
            settings: topics, limits, generations.
            by: who does it, as resolutions say it.
            clock: the machine's when None.
        """
        self._log = log
        self._records = records
        self._tasks = tasks
        self._codec = codec
        self._settings = settings
        self._topics = Topics(namespace=settings.kafka.namespace)
        self._by = by
        self._clock = clock or SystemClock()

    async def read(self, letters: Sequence[Letter]) -> Mapping[TaskId, InRecord]:
        """The whole letters, by id; what the log has deleted is left out.

        Raises:
            Unavailable: the log does not answer in time.
        """
        places = {letter.letter_id: self.place(letter) for letter in letters}
        found = await self._records.fetch(list(places.values()))
        return {letter_id: found[place] for letter_id, place in places.items() if place in found}

    async def read_one(self, letter: Letter) -> InRecord:
        """One whole letter.

        Raises:
            LetterGone: the log has deleted it.
            Unavailable: the log does not answer in time.
        """
        record = (await self.read([letter])).get(letter.letter_id)
        if record is None:
            raise LetterGone(letter.letter_id, self.place(letter))
        return record

    def place(self, letter: Letter) -> Position:
        """Where a letter stands on the dead-letter topic."""
        return Position(topic=self._topics.dlq, partition=letter.dlq_partition, offset=letter.dlq_offset)

    async def replay(
        self, letter: Letter, record: InRecord | None = None, *, edit: Edit | None = None
    ) -> Handled:
        """Submit a dead task again, or put raw bytes back; returns once the log has acknowledged it and the resolution.

        Args:
            letter: as the view has it.
            record: the whole letter if it is at hand; None: it is read.
            edit: another payload for the task.

        Raises:
            LetterResolved: something was done about it before.
            LetterGone: the log has deleted it.
            GenerationsExhausted, NotReplayable: it can't be replayed.
            PayloadTooLarge: the task does not fit its topic (any more).
            DeliveryError: not, or not certainly, appended; try again.
            Unavailable: the log or the view does not answer.
        """
        _check_open(letter)
        whole = record or await self.read_one(letter)
        if letter.kind is LetterKind.RAW:
            await self._log.append(raw_replay(letter, whole, codec=self._codec, settings=self._settings))
            await self._resolve(letter, LetterAction.REPLAYED)
            return Handled(letter=letter, done=Done.REPLAYED)
        dead, submission = letter_in(letter, whole, self._codec)
        if dead.task_id != letter.letter_id:
            # The topic was made anew, and something else stands there now.
            raise LetterGone(letter.letter_id, self.place(letter))
        task = replay_of(letter, submission, now_ms=self._clock.now_ms(), settings=self._settings, edit=edit)
        stored = await self._tasks.read(task.task_id)
        resumed = stored is not None and stored.submission is not None
        if not resumed:
            record_out = dispatch_record(
                task, self._topics, self._codec, max_record_bytes=self._settings.topics.max_record_bytes
            )
            await self._log.append(record_out)
        await self._resolve(letter, LetterAction.REPLAYED, replayed_as=task.task_id)
        # The resolution says so to everybody; thousands of lines would not.
        log.debug(
            "dead letter replayed",
            task_id=str(letter.letter_id),
            replayed_as=str(task.task_id),
            generation=task.generation,
            resumed=resumed,
        )
        return Handled(letter=letter, done=Done.RESUMED if resumed else Done.REPLAYED, task=task)

    async def discard(self, letter: Letter, *, note: str | None = None) -> Handled:
        """Note that nothing will be done about a letter; returns once the log has acknowledged it.

        Raises:
            LetterResolved: something was done about it before.
            DeliveryError: not, or not certainly, noted; try again.
        """
        _check_open(letter)
        await self._resolve(letter, LetterAction.DISCARDED, note=note)
        return Handled(letter=letter, done=Done.DISCARDED)

    async def _resolve(
        self,
        letter: Letter,
        action: LetterAction,
        *,
        replayed_as: TaskId | None = None,
        note: str | None = None,
    ) -> None:
        resolution = Resolution(
            action=action, at_ms=self._clock.now_ms(), by=self._by, replayed_as=replayed_as, note=note
        )
        await self._log.append(resolution_record(letter, resolution, codec=self._codec, topics=self._topics))


def _check_open(letter: Letter) -> None:
    if letter.resolution is not None:
        raise LetterResolved(letter.letter_id, letter.resolution.action.value, letter.resolution.replayed_as)
