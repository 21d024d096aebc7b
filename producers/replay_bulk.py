"""Many dead letters at once: those that a filter takes, at a rate, until they are done or somebody stops it.

Invariant: a letter is counted as done only after `Replayer` has had everything about it acknowledged. What a kill leaves is found by the
next run by itself, since the filter takes open letters only. Letters that die while it runs are left to the next one, so that a
task which dies again at once does not keep it going.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import structlog

from taskline.errors import DeadLetterError, DeliveryError, InvalidRequest, LetterGone, Unavailable
from taskline.infra.available import pause
from taskline.infra.log import InRecord
from taskline.infra.role import Clock, SystemClock
from taskline.producers.replay_rate import TokenBucket
from taskline.producers.replayer import Handled, Replayer
from taskline.schemas.events import LetterAction
from taskline.schemas.ids import TaskId
from taskline.state.dead_letters import DeadLetters, LetterFilter, Order
from taskline.state.letter_row import Letter

log = structlog.get_logger(__name__)

# Letters that are looked up and read together: some requests for each side, and not many megabytes.
_PAGE_LETTERS = 200
_CHUNK_BYTES = 8 * 1024 * 1024
# Letters that wait for their acknowledgements at once: two round trips of some ms each, so enough for thousands a second.
DEFAULT_CONCURRENCY = 64
# What a page's look-up costs is made up for afterwards.
_BURST_SECONDS = 0.5
# Refusals that a report lists.
_MAX_REFUSALS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkOrder:
    """What is to be done with which letters."""

    wanted: LetterFilter
    action: LetterAction = LetterAction.REPLAYED
    # Oldest first, so that tasks come back in the order in which they died.
    order: Order = Order.OLDEST_FIRST
    # A second.
    rate: float
    # Most letters; None: all.
    limit: int | None = None
    # True: look only.
    dry_run: bool = False
    concurrency: int = DEFAULT_CONCURRENCY
    # Of a discard.
    note: str | None = None


@dataclass(kw_only=True, slots=True)
class BulkReport:
    """How far it came."""

    # By `Done`, or "matched" in a dry run.
    counts: Counter[str] = field(default_factory=Counter)
    # Letters that can't be replayed, with the reasons of the first ones.
    refused: int = 0
    refusals: list[tuple[TaskId, str]] = field(default_factory=list)
    # True: it was stopped before it was through.
    stopped: bool = False
    # What ended it early; None: nothing.
    error: str | None = None

    @property
    def handled(self) -> int:
        """Letters that were dealt with, or matched in a dry run."""
        return sum(self.counts.values())


class Bulk:
    """One run."""

    def __init__(
        self,
        letters: DeadLetters,
        replayer: Replayer,
        asked: BulkOrder,
        *,
        clock: Clock | None = None,
        on_letter: Callable[[Letter, Handled | DeadLetterError | InvalidRequest | None], None] | None = None,
    ) -> None:
        """Prepare; `on_letter` is told of each letter and what became of it (None: a dry run)."""
        self._letters = letters
        self._replayer = replayer
        self._asked = asked
        self._clock = clock or SystemClock()
        self._on_letter = on_letter
        self._report = BulkReport()
        self._begun = 0
        self._open: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> BulkReport:
        """Go through the letters until they are done or `stop` is set; what is under way then is finished."""
        stopping = asyncio.create_task(self._pass_on(stop), name="dlq-stop")
        try:
            await self._pages()
        except Unavailable as error:
            self._fail(error)
        finally:
            stopping.cancel()
            if self._open:
                await asyncio.wait(self._open)
        self._report.stopped = stop.is_set() or self._report.error is not None
        return self._report

    async def _pages(self) -> None:
        asked, loop = self._asked, asyncio.get_running_loop()
        now_ms = self._clock.now_ms() + 1
        before_ms = now_ms if asked.wanted.before_ms is None else min(now_ms, asked.wanted.before_ms)
        wanted = replace(asked.wanted, before_ms=before_ms, resolved=False)
        bucket = TokenBucket(asked.rate, burst_seconds=_BURST_SECONDS, now=loop.time())
        cursor: str | None = None
        while not self._stop.is_set() and (left := self._left()) > 0:
            page = await self._letters.list(
                wanted, order=asked.order, limit=min(_PAGE_LETTERS, left), cursor=cursor
            )
            for chunk in _chunks(page.letters):
                await self._chunk(chunk, bucket)
            cursor = page.cursor
            if cursor is None:
                return

    def _left(self) -> int:
        return _PAGE_LETTERS if self._asked.limit is None else self._asked.limit - self._begun

    async def _chunk(self, letters: Sequence[Letter], bucket: TokenBucket) -> None:
        if self._stop.is_set():
            return
        if self._asked.dry_run:
            self._begun += len(letters)
            for letter in letters:
                self._report.counts["matched"] += 1
                self._tell(letter, None)
            return
        replays = self._asked.action is LetterAction.REPLAYED
        records = await self._replayer.read(letters) if replays else {}
        loop = asyncio.get_running_loop()
        for letter in letters:
            wait = bucket.reserve(loop.time())
            if wait > 0:
                await pause(wait, self._stop)
            while len(self._open) >= self._asked.concurrency:
                await asyncio.wait(self._open, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                return
            self._begun += 1
            task = asyncio.create_task(self._one(letter, records.get(letter.letter_id)))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _one(self, letter: Letter, record: InRecord | None) -> None:
        outcome: Handled | DeadLetterError | InvalidRequest
        try:
            if self._asked.action is LetterAction.DISCARDED:
                outcome = await self._replayer.discard(letter, note=self._asked.note)
            elif record is None:
                outcome = LetterGone(letter.letter_id, self._replayer.place(letter))
            else:
                outcome = await self._replayer.replay(letter, record)
        except (DeadLetterError, InvalidRequest) as error:
            outcome = error
        except (DeliveryError, Unavailable) as error:
            self._fail(error)
            return
        except Exception as error:
            log.exception("dead letter", task_id=str(letter.letter_id))
            self._fail(error)
            return
        if isinstance(outcome, Handled):
            self._report.counts[outcome.done.value] += 1
        else:
            self._report.refused += 1
            if len(self._report.refusals) < _MAX_REFUSALS:
                self._report.refusals.append((letter.letter_id, str(outcome)))
        self._tell(letter, outcome)

    def _tell(self, letter: Letter, outcome: Handled | DeadLetterError | InvalidRequest | None) -> None:
        if self._on_letter is not None:
            self._on_letter(letter, outcome)

    def _fail(self, error: Exception) -> None:
        """A server is away: the first of many who would say so ends the run."""
        if self._report.error is None:
            self._report.error = f"{type(error).__name__}: {error}"
        self._stop.set()

    async def _pass_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._stop.set()


async def count_matching(letters: DeadLetters, wanted: LetterFilter, *, at_most: int) -> tuple[int, bool]:
    """How many letters a filter takes, up to `at_most`, and whether those are all."""
    count, cursor = 0, None
    while count < at_most:
        page = await letters.list(
            wanted, order=Order.OLDEST_FIRST, limit=min(_PAGE_LETTERS, at_most - count), cursor=cursor
        )
        count += len(page.letters)
        cursor = page.cursor
        if cursor is None:
            return count, True
    return count, False


def _chunks(letters: Sequence[Letter]) -> Iterator[Sequence[Letter]]:
    """Runs of letters that are not too many bytes together; a larger one comes alone."""
    chunk: list[Letter] = []
    size = 0
    for letter in letters:
        if chunk and size + letter.size_bytes > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(letter)
        size += letter.size_bytes
    if chunk:
        yield chunk
