"""Claims in memory, for tests and for trying things out."""

from __future__ import annotations

from dataclasses import replace

from taskline.schemas.ids import TaskId
from taskline.state.claims import Claim, ClaimKey


class MemoryClaims:
    """A `ClaimStore` for one process."""

    def __init__(self) -> None:
        """Begin with none."""
        self.rows: dict[ClaimKey, Claim] = {}

    async def take(self, wanted: Claim, now_ms: int) -> Claim:
        """As `ClaimStore.take`."""
        held = self.rows.get(wanted.key)
        if held is None or held.expires_at <= now_ms:
            held = self.rows[wanted.key] = wanted
        return held

    async def find(self, key: ClaimKey) -> Claim | None:
        """As `ClaimStore.find`."""
        return self.rows.get(key)

    async def renew(self, held: Claim, wanted: Claim, now_ms: int) -> bool:
        """As `ClaimStore.renew`."""
        found = self.rows.get(held.key)
        if found is None or found.owner != held.owner:
            return False
        # As the real store, whose `outcome` no conditional write touches.
        self.rows[held.key] = replace(wanted, outcome=found.outcome)
        return True

    async def settle(self, claim: Claim, outcome: TaskId, now_ms: int) -> None:
        """As `ClaimStore.settle`."""
        found = self.rows.get(claim.key)
        if found is not None:
            self.rows[claim.key] = replace(found, outcome=outcome)
