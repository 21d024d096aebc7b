"""Holding a name before a task is appended under it, and waiting for whoever holds it already.

Invariant: a request appends the task of a claim only while it owns it, and early enough that the log's own time-out ends before the claim's
deadline does. So whoever finds the deadline passed, and the task neither noted as acknowledged nor in the view, may take its place.
The clocks of the API's processes may differ by `_MARGIN_SECONDS`; by more, and the same task may be appended twice under the same id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar
from uuid import UUID, uuid4

import structlog
from prometheus_client import Counter

from taskline.api.problems import CLAIMS_UNAVAILABLE, IDEMPOTENCY_CONFLICT, IN_PROGRESS, ProblemError
from taskline.errors import Unavailable
from taskline.infra.role import Clock
from taskline.schemas.ids import TaskId
from taskline.state.claims import Claim, ClaimKey, ClaimKind, ClaimStore
from taskline.state.lists import TasksById
from taskline.state.status import TaskState

log = structlog.get_logger(__name__)

T = TypeVar("T")

_WAITS = Counter(
    "taskline_api_claim_waits",
    "Submissions that had to wait for another one with the same idempotency key, or in the same dedup window.",
)

# Time to win a claim; one that takes longer is given up, so that others need not wait for it.
_HOLD_SECONDS = 5.0
# For what is under way besides, and for clocks that differ.
_MARGIN_SECONDS = 2.0
# Between looks at a claim that somebody else is about to settle: an append takes a few ms.
_FIRST_PAUSE_SECONDS = 0.02
_PAUSE_GROWTH = 1.6
_LONGEST_PAUSE_SECONDS = 0.5
# A note that only saves others a wait must not keep this one's caller.
_NOTE_SECONDS = 1.0
_RETRY_AFTER_SECONDS = "2"


class Known(Protocol):
    """Whether tasks are in the view, asked without waiting; `ListQueries` answers."""

    async def many(self, task_ids: Sequence[TaskId], *, tenant: str) -> TasksById:
        """Those of the tasks that are the tenant's; raises Unavailable."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A name that a request needs."""

    key: ClaimKey
    task_id: TaskId
    request_hash: bytes
    # How long the name shall be held, from now.
    seconds: float


class Claims:
    """The claims of one process's API."""

    def __init__(
        self,
        store: ClaimStore,
        known: Known,
        *,
        patience_seconds: float,
        delivery_seconds: float,
        clock: Clock,
    ) -> None:
        """Hold claims in `store`.

        Args:
            store: where they are kept.
            known: whether a task has turned up.
            patience_seconds: how long a request waits for another one's outcome.
            delivery_seconds: the longest that the log may take to append, or to give up.
            clock: compared with the clocks of other processes.
        """
        self._store = store
        self._known = known
        self._patience = patience_seconds
        self._clock = clock
        self._delivery_ms = round((delivery_seconds + _MARGIN_SECONDS / 2) * 1000)
        self._hold_seconds = min(_HOLD_SECONDS, patience_seconds)
        self._window_ms = round((self._hold_seconds + _MARGIN_SECONDS / 2) * 1000) + self._delivery_ms
        # Of many requests for one name in this process, one asks the store for it: conditional writes get in each other's way.
        self._taking: dict[ClaimKey, asyncio.Future[Claim]] = {}

    async def hold(
        self, wanted: Wanted, within: Claim | None = None, *, seconds: float | None = None
    ) -> tuple[Claim, bool]:
        """Hold a name. True: the request owns the claim, and is to append its task; False: the task is there already.

        Waits while another request owns the claim and its task may still turn up, but not for longer than `left` says of the claim `within`,
        that the request has already, nor than `seconds`.

        Raises:
            ProblemError: the key was used for another request (409), the other request's outcome is not known in time (503), or the
                store does not answer (503); nothing was appended by this request.
        """
        left = self.left(within)
        owner, other = uuid4(), None
        try:
            async with asyncio.timeout(max(0.0, left if seconds is None else min(left, seconds))):
                found = await self._take(wanted, owner)
                pause = _FIRST_PAUSE_SECONDS
                while found.owner != owner:
                    other, now_ms = found, self._clock.now_ms()
                    over = found.expires_at <= now_ms
                    if not over and _conflicts(found, wanted):
                        raise ProblemError(
                            IDEMPOTENCY_CONFLICT,
                            f"this idempotency key belongs to task {found.task_id}, which was another request's",
                            members={"task_id": str(found.task_id)},
                        )
                    if not over and await self.settled(found):
                        return found, False
                    if over or found.deadline <= now_ms:
                        mine = self._successor(found, wanted, owner, over=over)
                        if await self._store.renew(found, mine, now_ms):
                            return mine, True
                    else:
                        if pause == _FIRST_PAUSE_SECONDS:
                            _WAITS.inc()
                        await asyncio.sleep(pause)
                        pause = min(pause * _PAUSE_GROWTH, _LONGEST_PAUSE_SECONDS)
                    found = await self._store.find(wanted.key) or await self._take(wanted, owner)
                return found, True
        except TimeoutError as error:
            raise (self._unavailable() if other is None else self.in_progress(other)) from error
        except Unavailable as error:
            log.warning("claims do not answer", error=str(error))
            raise self._unavailable() from error

    def left(self, within: Claim | None = None) -> float:
        """Seconds that a request may take until it appends: its patience, or what a claim that it owns has left."""
        if within is None:
            return self._patience
        return min(self._patience, (within.deadline - self._delivery_ms - self._clock.now_ms()) / 1000)

    async def find(self, key: ClaimKey) -> Claim | None:
        """The claim that stands.

        Raises:
            ProblemError: the store does not answer.
        """
        try:
            async with asyncio.timeout(self._patience):
                found = await self._store.find(key)
        except (TimeoutError, Unavailable) as error:
            raise self._unavailable() from error
        return None if found is None or found.expires_at <= self._clock.now_ms() else found

    async def settled(self, claim: Claim) -> bool:
        """Whether the claim's task is in the log for certain, or has turned out to be a duplicate; raises Unavailable."""
        if claim.outcome is not None and (
            claim.outcome == claim.task_id or claim.key.kind is ClaimKind.IDEMPOTENCY
        ):
            return True
        found = await self._known.many([claim.task_id], tenant=claim.key.tenant)
        return claim.task_id in found.tasks or claim.task_id in found.unreadable

    async def state(self, task_id: TaskId, *, tenant: str) -> TaskState | None:
        """The task's state, if the view has it and answers."""
        try:
            async with asyncio.timeout(_NOTE_SECONDS):
                return (await self._known.many([task_id], tenant=tenant)).tasks.get(task_id)
        except (TimeoutError, Unavailable):
            return None

    def check_time(self, *claims: Claim) -> None:
        """See that an append which begins now is over before the claims' deadlines.

        Raises:
            ProblemError: it may not be.
        """
        now_ms = self._clock.now_ms()
        if any(now_ms > claim.deadline - self._delivery_ms for claim in claims):
            raise self._unavailable()

    async def settle(self, claim: Claim, outcome: TaskId) -> None:
        """Note what has come of the claim; if that fails, others ask the view."""
        await self._noted(self._store.settle(claim, outcome, self._clock.now_ms()), claim)

    async def release(self, claim: Claim) -> None:
        """Let others go on at once: nothing was appended, nor will be. If that fails, they wait until the deadline."""
        now_ms = self._clock.now_ms()
        await self._noted(self._store.renew(claim, replace(claim, deadline=now_ms), now_ms), claim)

    async def replace(self, held: Claim, wanted: Wanted) -> Claim | None:
        """Put the request in the place of one whose task was withdrawn; None: another one was faster.

        Raises:
            ProblemError: the store does not answer.
        """
        mine = self._successor(held, wanted, uuid4(), over=True)
        try:
            async with asyncio.timeout(self._hold_seconds):
                return mine if await self._store.renew(held, mine, self._clock.now_ms()) else None
        except (TimeoutError, Unavailable) as error:
            raise self._unavailable() from error

    async def _take(self, wanted: Wanted, owner: UUID) -> Claim:
        key = wanted.key
        taking = self._taking.get(key)
        if taking is None:
            now_ms = self._clock.now_ms()
            taking = asyncio.ensure_future(self._store.take(self._claim(wanted, owner, now_ms), now_ms))
            self._taking[key] = taking
            taking.add_done_callback(lambda done: self._taken(key, done))
        # One who gives up must not take the others' answer away.
        return await asyncio.shield(taking)

    def _taken(self, key: ClaimKey, done: asyncio.Future[Claim]) -> None:
        del self._taking[key]
        if not done.cancelled():
            # Looked at, also when nobody waits any more.
            done.exception()

    def _claim(self, wanted: Wanted, owner: UUID, now_ms: int) -> Claim:
        return Claim(
            key=wanted.key,
            task_id=wanted.task_id,
            owner=owner,
            request_hash=wanted.request_hash,
            deadline=now_ms + self._window_ms,
            expires_at=now_ms + round(wanted.seconds * 1000),
        )

    def _successor(self, found: Claim, wanted: Wanted, owner: UUID, *, over: bool) -> Claim:
        now_ms = self._clock.now_ms()
        if over or found.key.kind is not ClaimKind.IDEMPOTENCY:
            return self._claim(wanted, owner, now_ms)
        return replace(found, owner=owner, deadline=now_ms + self._window_ms)

    async def _noted(self, writing: Awaitable[T], claim: Claim) -> None:
        try:
            async with asyncio.timeout(_NOTE_SECONDS):
                await writing
        except (TimeoutError, Unavailable) as error:
            log.warning("claim not noted", task_id=str(claim.task_id), error=str(error))

    def in_progress(self, other: Claim) -> ProblemError:
        """The problem of a request that can't wait any longer for another one's claim."""
        left_ms = max(0, other.deadline - self._clock.now_ms())
        return ProblemError(
            IN_PROGRESS,
            f"task {other.task_id} is being submitted under this key by another request, whose outcome is not known yet",
            members={"task_id": str(other.task_id)},
            headers={"retry-after": str(left_ms // 1000 + 1)},
        )

    def _unavailable(self) -> ProblemError:
        return ProblemError(
            CLAIMS_UNAVAILABLE,
            "Cassandra does not answer in time, so nobody can tell whether the key was used before; the task was not accepted",
            headers={"retry-after": _RETRY_AFTER_SECONDS},
        )


def _conflicts(found: Claim, wanted: Wanted) -> bool:
    return found.key.kind is ClaimKind.IDEMPOTENCY and found.request_hash != wanted.request_hash
