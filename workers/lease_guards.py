"""Guards: records in the delay tiers that come back when leases end.

Invariant: `write` returns once a guard that names the lease, due after its end, is in the log. From then on the lease can't be forgotten, whoever
dies: a guard is done with only when each of its leases was seen to, or has a newer guard (`taskline.workers.lease_watch`).

Leases that begin while a guard is on its way share the next one, so that their number is bounded by the log's round trips and not by
the leases'.
"""

from __future__ import annotations

import asyncio
import secrets
from asyncio import Future
from collections.abc import Sequence
from dataclasses import dataclass, field

from taskline.infra.log import AsyncLog, OutRecord, Position
from taskline.infra.outbox import deliver
from taskline.infra.role import Clock
from taskline.infra.tiers import Tiers, delayed
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import LeaseGuard, LeaseRef
from taskline.workers import lease_metrics as metrics

# Leases that end within one of these share a guard.
_STEP_MS = 1_000
# A report that a worker made just in time is in the view by then.
_AFTER_END_MS = 500
# 36 bytes each: a guard stays far below the smallest record limit.
_MOST_LEASES = 400
_KEY_BYTES = 8


@dataclass(kw_only=True, slots=True)
class _Guard:
    leases: list[LeaseRef] = field(default_factory=list)
    retain_until: int = 0
    written: Future[None]


class GuardWriter:
    """Writes the guards of one gateway."""

    def __init__(
        self, log: AsyncLog, codec: Codec, clock: Clock, *, queue: str, topics: Topics, tiers: Tiers
    ) -> None:
        """Guard the leases of `queue`'s tasks."""
        self._log = log
        self._codec = codec
        self._clock = clock
        self._topic = topics.leases(queue)
        self._topics = topics
        self._tiers = tiers
        # By when they are due; the newest of each.
        self._gathering: dict[int, _Guard] = {}
        self._sending: asyncio.Task[None] | None = None

    async def write(self, lease: LeaseRef, *, ends_ms: int, retain_until: int) -> None:
        """Guard a lease that ends at `ends_ms`."""
        due_ms = due_after(ends_ms)
        guard = self._gathering.get(due_ms)
        if guard is None or len(guard.leases) >= _MOST_LEASES:
            if guard is not None:
                self._gathering[due_ms + len(self._gathering) + 1] = guard
            guard = self._gathering[due_ms] = _Guard(written=asyncio.get_running_loop().create_future())
        guard.leases.append(lease)
        guard.retain_until = max(guard.retain_until, retain_until)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send(), name="lease-guards")
        # Others share it: who is cancelled must not take it from them.
        await asyncio.shield(guard.written)

    async def _send(self) -> None:
        while self._gathering:
            batch, self._gathering = self._gathering, {}
            try:
                await asyncio.gather(*(self._deliver(due_ms, guard) for due_ms, guard in batch.items()))
            except BaseException:
                for guard in batch.values():
                    guard.written.cancel()
                raise
            for guard in batch.values():
                guard.written.set_result(None)

    async def _deliver(self, due_ms: int, guard: _Guard) -> None:
        key = secrets.token_bytes(_KEY_BYTES)
        record = LeaseGuard(retain_until=guard.retain_until, leases=tuple(guard.leases))

        def append() -> Sequence[Future[Position]]:
            plain = OutRecord(topic=self._topic, key=key, value=self._codec.encode(record))
            now_ms = self._clock.now_ms()
            return (
                self._log.append(
                    delayed(plain, due_ms=due_ms, now_ms=now_ms, topics=self._topics, tiers=self._tiers)
                ),
            )

        await deliver(append, what="lease guard", task_id=None)
        metrics.GUARDED.inc()


def due_after(ends_ms: int) -> int:
    """When the guard of a lease that ends then is due, in ms since the epoch."""
    return -(-ends_ms // _STEP_MS) * _STEP_MS + _AFTER_END_MS
