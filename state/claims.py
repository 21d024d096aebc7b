"""Claims: a name that one submission holds for a while, so that others of the same name do not become tasks beside it.

Invariant: of all who `take` a name, in all processes, one owns the claim until its deadline, and only the owner may append the
claim's task to the log. Whoever finds a claim whose deadline has passed without its task having turned up may `renew` it, which
again one of them succeeds in. So a process that dies between claim and log holds a name up until the deadline, and no longer.

An idempotency key is a claim that keeps its task's id for ever: whoever renews it appends under the id that the first has minted, so that
even an append that turns up late makes no second task. A dedup window is a claim of `task_type` and `dedup_key`; renewed, it is another
task's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol
from uuid import UUID

from taskline.schemas.ids import TaskId


class ClaimKind(StrEnum):
    """What names are claimed for."""

    IDEMPOTENCY = "idempotency"
    DEDUP = "dedup"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimKey:
    """A name; claims of different kinds or tenants have nothing to do with each other."""

    tenant: str
    kind: ClaimKind
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A name and the submission that holds it. Instants are ms since the epoch."""

    key: ClaimKey
    task_id: TaskId
    # A nonce of the request that may append the task; never two requests' the same.
    owner: UUID
    # SHA-256 of what was asked for.
    request_hash: bytes
    # After this the owner does not append any more; others may take over.
    deadline: int
    # After this the name is free.
    expires_at: int
    # The task that answers for the name: its own, once the log has acknowledged it, or the one that it turned out to
    # be a duplicate of. None: not known (here; the view may know).
    outcome: TaskId | None = None


class ClaimStore(Protocol):
    """Where claims are kept."""

    async def take(self, wanted: Claim, now_ms: int) -> Claim:
        """Claim a name, and return the claim that stands: `wanted` itself (by its owner), or the one that was there before.

        Raises:
            Unavailable: the store does not answer. The claim may stand all the same, until its end.
        """
        ...

    async def find(self, key: ClaimKey) -> Claim | None:
        """The claim that stands, also one whose end has just passed; None: there is none. Raises as `take`."""
        ...

    async def renew(self, held: Claim, wanted: Claim, now_ms: int) -> bool:
        """Put `wanted` in the place of `held`, if that still stands (by its owner); False: it does not. Raises as `take`."""
        ...

    async def settle(self, claim: Claim, outcome: TaskId, now_ms: int) -> None:
        """Note the task that answers for the name, for the rest of the claim's time. Raises as `take`."""
        ...
