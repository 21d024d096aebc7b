"""Tasks into the log on behalf of HTTP callers: as they come, or once per idempotency key and dedup window.

Invariant: what needs a name (an idempotency key, a dedup window) is appended only by a request that owns the claim on it
(`taskline.api.claims`), under the id that the claim has; the claim is there before the record. So whichever step a process dies at, the
same request sent again finds the claim, and makes the one task. What replaces a task is appended only once that one is cancelled.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from taskline.api.appending import Appending, Draft, TaskTypes
from taskline.api.claims import Claims, Wanted
from taskline.api.dedup import REPLACE, Duplicate, window_name, window_of
from taskline.api.idempotency import request_hash
from taskline.api.models import TaskSubmission
from taskline.api.problems import CLAIMS_UNAVAILABLE, DELIVERY_UNKNOWN, REPLACE_UNKNOWN, ProblemError
from taskline.api.replacing import Replacing
from taskline.errors import InvalidOption
from taskline.infra.log import AsyncLog
from taskline.infra.role import Clock
from taskline.schemas.codec import Codec
from taskline.schemas.events import TaskSubmitted
from taskline.schemas.ids import TaskId
from taskline.settings import Settings
from taskline.state.claims import Claim, ClaimKey, ClaimKind

_HOUR_SECONDS = 3_600
# Of the time that a request has, for those before it; the rest is for what it does itself.
_WAITING_SHARE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """Accepted: the task is in the log."""

    submission: TaskSubmitted
    # An earlier request with the same idempotency key had submitted it.
    replayed: bool = False


Outcome = Submitted | Duplicate


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """One request, on its way."""

    request: TaskSubmission
    tenant: str
    traceparent: str | None
    window_seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Own:
    """A dedup window that the request holds for its task."""

    claim: Claim


class Submissions:
    """Submits what the routes have read."""

    def __init__(
        self,
        log: AsyncLog,
        types: TaskTypes,
        codec: Codec,
        settings: Settings,
        *,
        clock: Clock,
        claims: Claims | None = None,
        replacing: Replacing | None = None,
    ) -> None:
        """Append to `log`, as `Appending` does; without `claims`, what needs a name is refused, and without `replacing` what replaces."""
        self._appending = Appending(log, types, codec, settings, clock=clock)
        self._claims = claims
        self._replacing = replacing
        self._key_seconds = settings.api.idempotency_hours * _HOUR_SECONDS

    async def submit(
        self, request: TaskSubmission, *, tenant: str, traceparent: str | None = None
    ) -> Outcome:
        """Returns once the broker has acknowledged the task, or another one stands for it.

        Raises:
            InvalidRequest: the submission is wrong (its subclasses say how); nothing was produced.
            ProblemError: not accepted, or not known to be.
        """
        order = _Order(
            request=request, tenant=tenant, traceparent=traceparent, window_seconds=window_of(request)
        )
        if needs_claim(request):
            return await self._claimed(order, self._ensure_claims())
        draft = self._draft(order)
        await self._appending.append(draft)
        return Submitted(submission=draft.submission)

    def draft(self, request: TaskSubmission, *, tenant: str, traceparent: str | None) -> Draft:
        """Check and encode a submission that needs no claim, for `append_all`; raises as `submit`."""
        order = _Order(
            request=request, tenant=tenant, traceparent=traceparent, window_seconds=window_of(request)
        )
        return self._draft(order)

    async def append_all(self, drafts: list[Draft]) -> list[ProblemError | None]:
        """Append them together; what `submit` would raise, of each."""
        return await self._appending.append_all(drafts)

    async def _claimed(self, order: _Order, claims: Claims) -> Outcome:
        request = order.request
        asked = request_hash(request)
        if request.idempotency_key is None:
            # Checked before anything is claimed.
            return await self._in_window(order, claims, self._draft(order), asked, None)
        wanted = Wanted(
            key=ClaimKey(tenant=order.tenant, kind=ClaimKind.IDEMPOTENCY, name=request.idempotency_key),
            task_id=self._appending.new_id(),
            request_hash=asked,
            seconds=self._key_seconds,
        )
        draft = await self._first_draft(order, claims, wanted)
        claim, mine = await claims.hold(wanted)
        if not mine and claim.outcome not in (None, claim.task_id):
            return await self._duplicate(order, claims, claim.outcome or claim.task_id)
        if draft is None or claim.task_id != wanted.task_id:
            draft = self._draft(order, claim)
        if not mine:
            return Submitted(submission=draft.submission, replayed=True)
        if order.window_seconds is None:
            return await self._append(claims, draft, claim)
        return await self._in_window(order, claims, draft, asked, claim)

    async def _first_draft(self, order: _Order, claims: Claims, wanted: Wanted) -> Draft | None:
        """The task as a new one, so that nothing wrong claims a key; None: it is wrong now, and was right when the key came first."""
        try:
            return self._draft(order, wanted)
        except InvalidOption:
            # Time has passed, e.g. its start_by.
            earlier = await claims.find(wanted.key)
            if earlier is None or earlier.request_hash != wanted.request_hash:
                raise
            return None

    async def _in_window(
        self, order: _Order, claims: Claims, draft: Draft, asked: bytes, outer: Claim | None
    ) -> Outcome:
        """Submit what has a dedup key; `outer` is the idempotency key's claim, which the request owns."""
        task_id = draft.submission.task_id
        wanted = Wanted(
            key=window_name(order.request, order.tenant),
            task_id=task_id,
            request_hash=asked,
            seconds=order.window_seconds or 0,
        )
        left = claims.left(outer)
        end = asyncio.get_running_loop().time() + left
        async with AsyncExitStack() as stack:
            try:
                if order.request.dedup_mode == REPLACE:
                    turn = self._ensure_replacing().turn(wanted.key, seconds=left * _WAITING_SHARE)
                    await stack.enter_async_context(turn)
                stands = await self._place(order, claims, wanted, outer, end)
            except Exception:
                if outer is not None:
                    await claims.release(outer)
                raise
            if isinstance(stands, _Own):
                owned = (stands.claim,) if outer is None else (stands.claim, outer)
                return await self._append(claims, draft, *owned)
        first = task_id if stands is None else stands.task_id
        if outer is not None:
            await claims.settle(outer, first)
        # None: the key's own task; an earlier request got as far as the log.
        return Submitted(submission=draft.submission, replayed=True) if stands is None else stands

    async def _place(
        self, order: _Order, claims: Claims, wanted: Wanted, outer: Claim | None, end: float
    ) -> _Own | Duplicate | None:
        """Find a window's place: this request's own, held by another task, or (None) held by this very task. `end` is the loop's time."""
        loop = asyncio.get_running_loop()
        while True:
            claim, mine = await claims.hold(wanted, outer, seconds=end - loop.time())
            if mine:
                return _Own(claim=claim)
            if claim.task_id == wanted.task_id:
                return None
            if order.request.dedup_mode != REPLACE:
                return await self._duplicate(order, claims, claim.task_id)
            stands = await self._ensure_replacing().withdraw(
                claim.task_id,
                task_type=order.request.task_type,
                tenant=order.tenant,
                seconds=end - loop.time(),
            )
            if stands is not None:
                return stands
            replaced = await claims.replace(claim, wanted)
            if replaced is not None:
                return _Own(claim=replaced)
            # Somebody was faster, whose task is now the one to be replaced.
            if loop.time() >= end:
                raise claims.in_progress(claim)

    async def _append(self, claims: Claims, draft: Draft, *owned: Claim) -> Submitted:
        """Append the task of claims that this request owns."""
        try:
            claims.check_time(*owned)
            await self._appending.append(draft)
        except ProblemError as problem:
            if problem.kind is not DELIVERY_UNKNOWN:
                for claim in owned:
                    await claims.release(claim)
            raise
        for claim in owned:
            await claims.settle(claim, draft.submission.task_id)
        return Submitted(submission=draft.submission)

    async def _duplicate(self, order: _Order, claims: Claims, first: TaskId) -> Duplicate:
        return Duplicate(
            task_id=first,
            task_type=order.request.task_type,
            state=await claims.state(first, tenant=order.tenant),
        )

    def _draft(self, order: _Order, placed: Wanted | Claim | None = None) -> Draft:
        """The task, under the id that a claim has."""
        return self._appending.draft(
            order.request,
            tenant=order.tenant,
            traceparent=order.traceparent,
            task_id=None if placed is None else placed.task_id,
        )

    def _ensure_claims(self) -> Claims:
        if self._claims is None:
            raise ProblemError(
                CLAIMS_UNAVAILABLE, "this process keeps no claims", headers={"retry-after": "2"}
            )
        return self._claims

    def _ensure_replacing(self) -> Replacing:
        if self._replacing is None:
            raise ProblemError(
                REPLACE_UNKNOWN, "this process replaces no tasks", headers={"retry-after": "2"}
            )
        return self._replacing


def needs_claim(request: TaskSubmission) -> bool:
    """Whether the submission has a key that another one may have had before."""
    return request.idempotency_key is not None or request.dedup_key is not None
