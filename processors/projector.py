"""The projector: runs of records, each acknowledged by the view before it is settled.

Invariant: when `fold` returns, everything in these records is acknowledged by the view's store, or, if it was no Taskline record,
by the dead-letter topic. Until then it tries again, for ever: nothing else it could do with a record is right. Only cancellation
and a programming error leave early, and then the caller must not settle the records. It needs no Kafka and no
Cassandra: a store and a log will do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from taskline.errors import TasklineError
from taskline.infra.backoff import pauses
from taskline.infra.log import HEADER_CAUSE, HEADER_SOURCE, AsyncLog, InRecord, OutRecord
from taskline.infra.role import Clock
from taskline.processors import metrics
from taskline.processors.projection import Halt, Layout, Partition, Projection, project
from taskline.schemas.codec import Codec
from taskline.state.store import ViewStore, Write

log = structlog.get_logger(__name__)

# A server that is away is asked again soon, then at a pace that does not disturb its return.
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0


class Projector:
    """Folds runs of records into a view; remembers which partitions it has halted."""

    def __init__(
        self, store: ViewStore, log: AsyncLog, codec: Codec, layout: Layout, *, clock: Clock
    ) -> None:
        """Write to `store`, dead-letter to `log`."""
        self._store = store
        self._log = log
        self._codec = codec
        self._layout = layout
        self._clock = clock
        self.halted: dict[Partition, Halt] = {}

    async def fold(self, records: Sequence[InRecord]) -> Projection:
        """Have the view acknowledge the records; those of one partition must be in order.

        Returns:
            What was done. All records are settled except those of `self.halted` partitions from their halt on.
        """
        started = asyncio.get_running_loop().time()
        projection = await self._projected(records)
        if projection.rejects:
            await self._dead_letter(projection.rejects)
        if projection.writes:
            await self._stored(projection.writes)
        self._halt(projection)
        self._measure(records, projection, asyncio.get_running_loop().time() - started)
        return projection

    def settles(self, record: InRecord) -> bool:
        """True if `fold` has taken care of this record, so that its offset may be committed."""
        halt = self.halted.get((record.position.topic, record.position.partition))
        return halt is None or record.position.offset < halt.position.offset

    def resumed(self, partition: Partition, offset: int) -> None:
        """Reading of a partition began (again) at this offset, where its group had come to.

        A halt below it is over: a projector that knows the record has taken care of it.
        """
        halt = self.halted.get(partition)
        if halt is not None and offset > halt.position.offset:
            del self.halted[partition]
            metrics.HALTED.set(len(self.halted))
            log.info("halt is over", topic=partition[0], partition=partition[1], offset=offset)

    async def _projected(self, records: Sequence[InRecord]) -> Projection:
        pause = pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while True:
            try:
                return project(
                    records,
                    codec=self._codec,
                    layout=self._layout,
                    now_ms=self._clock.now_ms(),
                    halted=self.halted,
                )
            except TasklineError as error:
                # The registry, asked for a schema that is not cached.
                log.warning("projection waits", error=str(error), records=len(records))
                await asyncio.sleep(next(pause))

    async def _stored(self, writes: Sequence[Write]) -> None:
        async def attempt() -> None:
            await self._store.apply(writes)

        await _until_done(attempt, "view write", metrics.STORE_RETRIES.inc, writes=len(writes))

    async def _dead_letter(self, rejects: Sequence[OutRecord]) -> None:
        waiting = list(rejects)

        async def attempt() -> None:
            outcomes = await asyncio.gather(*map(self._log.append, waiting), return_exceptions=True)
            failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            waiting[:] = [
                record
                for record, outcome in zip(waiting, outcomes, strict=True)
                if isinstance(outcome, BaseException)
            ]
            if failures:
                raise failures[0]

        await _until_done(attempt, "dead letter", metrics.DLQ_RETRIES.inc, rejects=len(rejects))
        for record in rejects:
            log.warning(
                "rejected to the dead-letter topic",
                source=record.headers[HEADER_SOURCE].decode(),
                cause=record.headers[HEADER_CAUSE].decode(errors="replace"),
            )

    def _halt(self, projection: Projection) -> None:
        for partition, halt in projection.halts.items():
            self.halted[partition] = halt
            log.error(
                "partition halted: its next record was written by a newer Taskline; deploy projectors first",
                topic=halt.position.topic,
                partition=halt.position.partition,
                offset=halt.position.offset,
                cause=halt.cause,
            )
        metrics.HALTED.set(len(self.halted))

    def _measure(self, records: Sequence[InRecord], projection: Projection, seconds: float) -> None:
        for kind, count in projection.counts.items():
            metrics.RECORDS.labels(kind).inc(count)
        metrics.FLUSHES.inc()
        metrics.FLUSH_SECONDS.observe(seconds)
        metrics.FLUSH_RECORDS.observe(len(records))
        if records:
            oldest = min(record.timestamp_ms for record in records)
            metrics.LAG_SECONDS.set((self._clock.now_ms() - oldest) / 1000)


async def _until_done(
    attempt: Callable[[], Awaitable[None]], what: str, count: Callable[[], None], **facts: int
) -> None:
    """Try until it works. An unforeseen error is waited out like an outage, but with its traceback."""
    pause = pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
    tries = 0
    while True:
        try:
            await attempt()
        except TasklineError as error:
            tries += 1
            count()
            log.warning("waiting", what=what, tries=tries, error=str(error), **facts)
        except Exception:
            tries += 1
            count()
            log.exception("waiting", what=what, tries=tries, **facts)
        else:
            if tries:
                log.info("works again", what=what, tries=tries, **facts)
            return
        await asyncio.sleep(next(pause))
