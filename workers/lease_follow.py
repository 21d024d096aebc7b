"""What follows a lease that closed without success: decided by the retry policy from the task's lane, and written.

Invariant: it is called for a lease whose closing has *counted* and that has nothing following it yet. All that is decided on stands in the log:
attempts, deaths and errors are counted from the task's own events, so any replica decides alike, whatever it has seen itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import structlog

from taskline.infra.log import Position
from taskline.infra.role import Clock
from taskline.schemas.events import ErrorCategory
from taskline.settings import WorkerSettings
from taskline.state.leases import Lease
from taskline.workers.failure import Failure
from taskline.workers.lease_records import LeaseRecords
from taskline.workers.outcome import ErrorInfo
from taskline.workers.retry import Bury, Expire, RetryAt, RetryPolicy, Spent, decide

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Following:
    """What becomes of the task."""

    what: Literal["retry_scheduled", "dead", "expired"]
    # Of a retry: when it is due, in ms since the epoch.
    due_ms: int | None = None


class LeaseFollower:
    """Decides and writes what follows."""

    def __init__(
        self, records: LeaseRecords, settings: WorkerSettings, clock: Clock, rng: random.Random | None = None
    ) -> None:
        """The policy is the workers' default one; `rng` is for its jitter."""
        self._records = records
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._poison_deaths = settings.poison_deaths
        self._policy = RetryPolicy(
            base_seconds=settings.retry_base_seconds,
            multiplier=settings.retry_multiplier,
            cap_seconds=settings.retry_cap_seconds,
        )

    async def follow(self, lease: Lease, submission: bytes, failure: Failure | None = None) -> Following:
        """Write what follows a closed lease.

        Args:
            lease: as the task's lane tells it, with its closing.
            submission: the task's own bytes, as they were queued.
            failure: what its worker said, with its wish when to come back; None: only what the lane says.
        """
        spent = Spent(
            attempt=lease.started.attempt,
            max_retries=lease.submission.max_retries,
            start_by=lease.submission.start_by,
            deaths=lease.deaths,
            server_errors=lease.server_errors,
        )
        decision = decide(
            failure or _told(lease),
            spent,
            self._policy,
            poison_deaths=self._poison_deaths,
            now_ms=self._clock.now_ms(),
            rng=self._rng,
        )
        facts = {
            "task_id": str(lease.submission.task_id),
            "task_type": lease.submission.task_type,
            "attempt": lease.started.attempt,
            "outcome": lease.outcome.value,
        }
        if isinstance(decision, RetryAt):
            log.warning("lease ended badly; another attempt follows", due_ms=decision.due_ms, **facts)
            await self._records.retried(lease, submission, decision.due_ms)
            return Following(what="retry_scheduled", due_ms=decision.due_ms)
        if isinstance(decision, Bury):
            await self._records.buried(lease, submission, decision.reason)
            return Following(what="dead")
        assert isinstance(decision, Expire)  # noqa: S101 - the third of three
        log.warning("task expired", **facts)
        started = lease.started
        place = Position(
            topic=started.source_topic, partition=started.source_partition, offset=started.source_offset
        )
        await self._records.expired(lease.submission, place, started.attempt)
        return Following(what="expired")


def _told(lease: Lease) -> Failure:
    """The failure that the lane tells of."""
    if not lease.errors:
        return Failure(info=ErrorInfo(error_class="", message=""), category=ErrorCategory.UNKNOWN)
    error = lease.errors[-1].error
    return Failure(
        info=ErrorInfo(error_class=error.error_class, message=error.message, traceback=error.traceback),
        category=error.category,
        retryable=error.retryable,
    )
