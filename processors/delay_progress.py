"""Commits of the delay role: when they are made, and how much may be uncommitted.

Invariant: at most `MAX_UNCOMMITTED` records of a process are forwarded and not committed, so a crash forwards no more than those
again. Nothing ticks while nothing changes.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Iterable
from functools import partial

import structlog

from taskline.infra.intake import Commit, Intake
from taskline.processors import delay_metrics as metrics
from taskline.processors.delay_lane import Lane

log = structlog.get_logger(__name__)

# A commit takes milliseconds, up to the poll of an idle consumer (0.1 s): enough for some ten thousand records a second.
MAX_UNCOMMITTED = 1_000
# Under load progress is committed before the interval is over; a commit costs as much as a few hops.
COMMIT_AFTER = 250


class Progress:
    """The commits of one intake."""

    def __init__(
        self,
        intake: Intake,
        lanes: Callable[[], Iterable[Lane]],
        interval_seconds: float,
        moved: Callable[[], None],
    ) -> None:
        """Commit what `lanes` have done; `moved` is called when there is room for more again."""
        self._intake = intake
        self._lanes = lanes
        self._interval = interval_seconds
        self._moved = moved
        # Forwarded and not committed, over all open lanes.
        self._uncommitted = 0
        # Acknowledged since the last commit was begun.
        self._done = 0
        self._commit: Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def full(self) -> bool:
        """Whether nothing more may be forwarded for now."""
        return self._uncommitted >= MAX_UNCOMMITTED

    def sent(self, lane: Lane) -> None:
        """A record of a lane is on its way."""
        lane.uncommitted += 1
        lane.under_way += 1
        self._uncommitted += 1

    def done(self, lane: Lane, offset: int) -> None:
        """It is acknowledged."""
        lane.under_way -= 1
        lane.tracker.complete(offset)
        lane.changed = True
        self._done += 1
        if self._done >= COMMIT_AFTER:
            self.commit()
        else:
            self.later()

    def later(self) -> None:
        """See to it that a commit is made when the interval is over."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._tick)

    def gone(self, lane: Lane) -> None:
        """A lane is over."""
        self._uncommitted -= lane.uncommitted
        lane.uncommitted = 0

    def stop(self) -> None:
        """Make no more commits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def commit(self) -> None:
        """Store the progress since the last commit, unless one is still under way."""
        if self._commit is not None:
            return
        self.stop()
        self._done = 0
        changed: list[tuple[Lane, Commit, int]] = []
        for lane in self._lanes():
            if lane.changed:
                lane.changed = False
                changed.append((lane, lane.tracker.commit(), lane.uncommitted - lane.under_way))
        if changed:
            self._commit = self._intake.commit({lane.name: commit for lane, commit, _ in changed})
            self._commit.add_done_callback(partial(self._committed, changed))

    def _tick(self) -> None:
        self._timer = None
        self.commit()

    def _committed(self, changed: list[tuple[Lane, Commit, int]], done: Future[None]) -> None:
        self._commit = None
        error = None if done.cancelled() else done.exception()
        if done.cancelled() or error is not None:
            metrics.COMMIT_FAILURES.inc()
            log.warning("commit failed; a newer one follows", error=str(error))
            for lane, _, _ in changed:
                lane.changed = True
            self.later()
            return
        for lane, commit, count in changed:
            if lane.open:
                lane.committed = commit
                lane.uncommitted -= count
                self._uncommitted -= count
        if self._done >= COMMIT_AFTER:
            self.commit()
        elif self._done:
            self.later()
        self._moved()
