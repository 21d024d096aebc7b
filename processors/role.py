"""The projector as a process: checks, connections, one Faust app after another, a clean stop.

Invariant: the process either consumes, or is about to, or ends with an error. Servers that are away are waited for; a Faust app that
has died or stalled is replaced within the process; one that can't even be stopped ends the process (a supervisor starts it anew).
On a stop, what was taken is written and committed if Cassandra answers in time; what is not is read again by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from taskline.infra.available import Stopped, pause, when_available
from taskline.infra.backoff import pauses
from taskline.infra.kafka.admin import check_topology
from taskline.infra.kafka.asynclog import KafkaLog
from taskline.infra.role import SystemClock, process_name, run_role
from taskline.infra.topics import Topics
from taskline.processors import metrics
from taskline.processors.faust_app import Received, Source, SourceDied
from taskline.processors.group_watch import GroupWatch
from taskline.processors.letter_watch import LetterWatch
from taskline.processors.liveness import Liveness
from taskline.processors.projection import Layout, Partition
from taskline.processors.projector import Projector
from taskline.processors.quiet import quiet_handlers
from taskline.processors.runs import Runs
from taskline.schemas.confluent import codec_for
from taskline.settings import Settings
from taskline.state.cassandra import CassandraStore
from taskline.state.dead_letters import DeadLetters
from taskline.state.migrations import check_view

log = structlog.get_logger(__name__)

T = TypeVar("T")

# A run is bounded by bytes too, so that a thousand of the largest records do not fill the memory.
_MAX_RUN_BYTES = 8 * 1024 * 1024
# A stop waits this long for Cassandra to take what was read; a supervisor's patience is usually 30 s.
_DRAIN_SECONDS = 10.0
# Leaving the group and closing connections; also with a broker that is away.
_STOP_SECONDS = 15.0
_CHECK_SECONDS = 1.0
_LOOK_SECONDS = 10.0
# Longer than a rebalance with a member that died, on a slow machine.
_PATIENCE_SECONDS = 90.0
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 10.0
# An app that ran for this long was healthy: its death starts the pauses anew.
_HEALTHY_SECONDS = 60.0
# EX_SOFTWARE of sysexits.h.
_EXIT_STUCK = 70


def main(settings: Settings) -> None:
    """Run the projector until SIGTERM or SIGINT.

    Raises:
        WrongTopology: topics or tables are not as declared.
    """
    run_role("projector", settings.telemetry, lambda stop: run_projector(settings, stop))


async def run_projector(settings: Settings, stop: asyncio.Event) -> None:
    """Project until `stop` is set."""
    quiet_handlers()
    name = process_name()

    def there(attempt: Callable[[], Awaitable[T]], what: str) -> Awaitable[T]:
        return when_available(attempt, stop, pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS), what=what)

    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.enter_context(contextlib.suppress(Stopped))
        await there(lambda: asyncio.to_thread(check_topology, settings), "topics")
        await there(lambda: asyncio.to_thread(check_view, settings), "view")
        store = await there(lambda: CassandraStore.connect(settings), "view")
        cleanup.push_async_callback(store.close)
        kafka_log = KafkaLog(settings, client_id=f"{name}-dlq")
        cleanup.push_async_callback(kafka_log.close, _DRAIN_SECONDS)
        projector = Projector(
            store, kafka_log, codec_for(settings.schemas), Layout.of(settings), clock=SystemClock()
        )
        letters = LetterWatch(
            DeadLetters(store, settings), Topics(namespace=settings.kafka.namespace).dlq, clock=SystemClock()
        )
        log.info("servers are ready", client_id=name)
        await _lives(settings, projector, letters, name, stop)


async def _lives(
    settings: Settings, projector: Projector, letters: LetterWatch, name: str, stop: asyncio.Event
) -> None:
    """One Faust app after another, until `stop`."""
    loop = asyncio.get_running_loop()
    watch = GroupWatch(settings, client_id=f"{name}-watch")
    waits = pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
    while not stop.is_set():
        began = loop.time()
        life = _Life(settings, projector, watch, letters, name)
        try:
            await life.run(stop)
        except SourceDied as error:
            metrics.RESTARTS.inc()
            log.error("consumer died and is replaced", error=str(error), cause=repr(error.__cause__))  # noqa: TRY400
        finally:
            await life.end()
        if loop.time() - began > _HEALTHY_SECONDS:
            waits = pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        if not stop.is_set():
            await pause(next(waits), stop)


class _Life:
    """One Faust app from start to end, and what it feeds."""

    def __init__(
        self,
        settings: Settings,
        projector: Projector,
        watch: GroupWatch,
        letters: LetterWatch,
        name: str,
    ) -> None:
        self._projector = projector
        self._watch = watch
        self._letters = letters
        self._liveness = Liveness(_PATIENCE_SECONDS)
        self._source = Source(settings, client_id=name)
        self._runs: Runs[Received] = Runs(
            max_items=settings.projector.flush_records,
            max_bytes=_MAX_RUN_BYTES,
            linger_seconds=settings.projector.flush_interval_ms / 1000,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Consume until `stop`, then write what was taken.

        Raises:
            SourceDied: the app is dead or stalled.
        """
        await self._source.start()
        folding = asyncio.create_task(self._fold(), name="projector-fold")
        others = [
            asyncio.create_task(self._read(), name="projector-read"),
            asyncio.create_task(self._look_after(), name="projector-watch"),
            asyncio.create_task(self._letters.run(lambda: self._source.assigned), name="projector-letters"),
            asyncio.create_task(stop.wait(), name="projector-stop"),
        ]
        try:
            await asyncio.wait([folding, *others], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in others:
                task.cancel()
            ended = await asyncio.gather(*others, return_exceptions=True)
            # What was taken before a death is as good as before a stop: it came in order.
            self._runs.close()
            await asyncio.wait([folding], timeout=_DRAIN_SECONDS)
            if not folding.done():
                log.warning(
                    "stopped with records unwritten; they will be read again", records=len(self._runs)
                )
                folding.cancel()
                await asyncio.wait([folding])
        for outcome in ended:
            if isinstance(outcome, Exception):
                raise outcome
        if not folding.cancelled():
            folding.result()

    async def end(self) -> None:
        """Stop the app; if that does not end, neither will the process by itself: end it."""
        stopping = asyncio.create_task(self._source.stop(), name="faust-stop")
        await asyncio.wait([stopping], timeout=_STOP_SECONDS)
        if not stopping.done():
            log.critical("the Faust app can't be stopped; the process ends", exit_status=_EXIT_STUCK)
            os._exit(_EXIT_STUCK)
        error = stopping.exception()
        if error is not None:
            log.warning("the Faust app did not stop cleanly", error=repr(error))

    async def _read(self) -> None:
        runs = self._runs
        async for received, first in self._source.records():
            record = received.record
            if first:
                partition = (record.position.topic, record.position.partition)
                self._projector.resumed(partition, record.position.offset)
            if runs.full:
                await runs.room()
            runs.add(received, len(record.value or b""))

    async def _fold(self) -> None:
        projector = self._projector
        while run := await self._runs.take():
            await projector.fold([received.record for received in run])
            halted: set[Partition] = set()
            for received in run:
                if projector.settles(received.record):
                    received.settle()
                else:
                    halted.add((received.record.position.topic, received.record.position.partition))
            for partition in halted:
                self._source.pause(partition)

    async def _look_after(self) -> None:
        loop = asyncio.get_running_loop()
        next_look = loop.time() + _LOOK_SECONDS
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            self._source.check()
            if loop.time() < next_look:
                continue
            # One that has been given nothing is either a spare or stuck: it looks at all there is.
            offsets = await asyncio.to_thread(self._watch.look, self._source.assigned)
            cause = self._liveness.observe(
                offsets,
                taken=self._source.taken,
                excused=self._projector.halted,
                busy=self._runs.full,
                now=loop.time(),
            )
            if cause is not None:
                raise SourceDied(cause)
            next_look = loop.time() + _LOOK_SECONDS
