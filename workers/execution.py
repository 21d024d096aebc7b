"""What the engine knows of a record that it took from the buffer, until it is done or handed back."""

from __future__ import annotations

import asyncio
import random
from asyncio import Future
from enum import Enum, auto
from typing import Any

from taskline.infra.log import Position
from taskline.schemas.ids import TaskId, task_id_of
from taskline.workers.admission import Admitted, Rejected, Undecodable
from taskline.workers.dispatch import Gate
from taskline.workers.duplicates import Key
from taskline.workers.executor import Executor
from taskline.workers.feed import Waiting
from taskline.workers.progress import LoopLine

_ID_BYTES = 16


def _random_id() -> TaskId:
    # From the process's own generator, which is seeded by the system: an execution's id names it and guards nothing, and a
    # system call for each is a noticeable part of a worker's time.
    return task_id_of(random.randbytes(_ID_BYTES))  # noqa: S311 - as said


class Phase(Enum):
    """How far an execution is."""

    # Started is on its way into the log; the handler has not begun.
    STARTING = auto()
    # The handler runs.
    RUNNING = auto()
    # The outcome is on its way into the log; no slot is needed.
    SETTLING = auto()


class Execution:
    """The state of one record on its way; changed by the conductor and the engine only."""

    __slots__ = (
        "abort_asked",
        "aborted",
        "admitted",
        "again",
        "buffered",
        "checked_at",
        "ended",
        "entered",
        "error",
        "executor",
        "gates",
        "handler",
        "id",
        "key",
        "leaving",
        "left_behind",
        "limit_seconds",
        "line",
        "opened",
        "outer",
        "phase",
        "refused",
        "result",
        "slot",
        "stale",
        "stood_still",
        "suspect",
        "timed_out",
        "waiting",
    )

    def __init__(
        self,
        waiting: Waiting,
        admitted: Admitted | None,
        executor: Executor | None,
        *,
        refused: Rejected | Undecodable | None = None,
        suspect: bool = False,
    ) -> None:
        """`admitted` and `executor` are None for what is `refused`: it begins with its settlement."""
        self.waiting = waiting
        self.admitted = admitted
        self.executor = executor
        self.refused = refused
        # True: a process died under it or under an earlier attempt, so it runs alone.
        self.suspect = suspect
        # What it stands behind while it waits, the executor's first; and what else it has entered.
        self.gates: tuple[Gate, ...] = ()
        self.entered: tuple[Gate, ...] = ()
        # How its attempt is known among duplicates; None: it has none, or is counted under an earlier execution.
        self.key: Key | None = None
        # True: it counts among what its feed has buffered.
        self.buffered = False
        # True: its partition is being handed over, or is lost.
        self.leaving = False
        # True: its process died of something that ran beside it; the same record is to be run again, alone.
        self.again = False
        # As in Started.execution.
        self.id = _random_id()
        self.phase = Phase.SETTLING if admitted is None else Phase.STARTING
        # True: a Started of it may be in the log.
        self.opened = False
        # When it was known, by the loop's clock, that it may begin; None: nobody asked.
        self.checked_at: float | None = None
        # True: that was too long ago when it was about to begin, so it did not.
        self.stale = False
        # True: the process stood still while the record was being handed over, and nobody knows whose it is.
        self.stood_still = False
        # True: its task is to be cancelled; and its handler was stopped for that.
        self.abort_asked = False
        # True: its handler was stopped since its task is to be cancelled.
        self.aborted = False
        # True: it holds a slot.
        self.slot = False
        # The asyncio task that takes the record all the way, and the handler's own.
        self.outer: asyncio.Task[None] | None = None
        self.handler: asyncio.Task[None] | None = None
        # To the handler, from its beginning to its end.
        self.line: LoopLine | None = None
        # Resolves when the handler has ended or is waited for no longer.
        self.ended: Future[None] | None = None
        # The time limit, and whether it has passed while the handler ran.
        self.limit_seconds = 0.0
        self.timed_out = False
        # True: the handler runs on although nobody waits for it.
        self.left_behind = False
        # What the handler returned, or raised.
        self.result: Any = None
        self.error: BaseException | None = None

    def reopen(self) -> None:
        """Become another execution of the same record, which is opened anew."""
        self.id = _random_id()
        self.phase = Phase.STARTING
        self.stale = False

    @property
    def position(self) -> Position:
        """Where its record stands."""
        return self.waiting.record.position

    def facts(self) -> dict[str, Any]:
        """What a log line says about it."""
        place = self.position
        facts: dict[str, Any] = {
            "topic": place.topic,
            "partition": place.partition,
            "offset": place.offset,
        }
        if self.admitted is not None:
            facts["task_id"] = str(self.admitted.submission.task_id)
            facts["task_type"] = self.admitted.task.name
            facts["attempt"] = self.admitted.attempt
            if self.suspect:
                facts["suspect"] = True
        return facts
