"""What the delay role does besides forwarding: it counts what waits, deletes what it has forwarded, and sees retired tiers run dry.

Invariant: nothing is deleted that a group has still to read. In a tier that is what lies above the delay group's committed offset; in
`tasks.scheduled` also what lies above the projector's, and whatever a rebuild of the view may want (topics.retention_days).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from taskline.errors import TasklineError
from taskline.infra.intake import TopicPartition
from taskline.infra.kafka.offsets import GroupTopic, committed
from taskline.infra.kafka.records import LogEnds
from taskline.infra.role import Clock
from taskline.infra.topics import Topics
from taskline.processors import delay_metrics as metrics
from taskline.processors.delay_core import Stage
from taskline.processors.delay_lane import Lane
from taskline.settings import Settings

log = structlog.get_logger(__name__)

# Between two looks at the ends of the owned partitions: one request each time, also while nothing happens.
LOOK_SECONDS = 15.0
# For one round of requests; the next one comes soon.
_REQUEST_SECONDS = 10.0
_DAY_MS = 86_400_000


class Upkeep:
    """Looks after the partitions that an engine owns."""

    def __init__(
        self,
        settings: Settings,
        ends: LogEnds,
        lanes: Callable[[], Sequence[Lane]],
        *,
        retired: Collection[Stage],
        clock: Clock,
    ) -> None:
        """Look after `lanes` by way of `ends`; `retired` are the tiers that are not declared any more."""
        self._settings = settings
        self._ends = ends
        self._lanes = lanes
        self._retired = {stage.topic for stage in retired}
        self._clock = clock
        self._scheduled = Topics(namespace=settings.kafka.namespace).scheduled
        # How far each partition is known to be deleted.
        self._deleted: dict[TopicPartition, int] = {}
        # Retired topics that were found empty, and said to be.
        self._dry: set[str] = set()

    async def run(self) -> None:
        """Look and delete, each at its interval, for ever."""
        loop = asyncio.get_running_loop()
        purge_at = loop.time() + self._settings.delay.purge_interval_seconds
        while True:
            await asyncio.sleep(max(0.0, min(LOOK_SECONDS, purge_at - loop.time())))
            lanes = [lane for lane in self._lanes() if lane.open]
            places = {lane.name: lane.committed.offset for lane in lanes}
            metrics.HELD.set(sum(map(len, lanes)))
            metrics.UNDER_WAY.set(sum(lane.under_way for lane in lanes))
            try:
                if places:
                    await self._look(lanes, places)
                if loop.time() >= purge_at:
                    await asyncio.to_thread(self.purge, places)
            except TasklineError as error:
                # The forwarding itself waits for the log; a look is made up for by the next.
                log.warning("upkeep put off", error=str(error))
            if loop.time() >= purge_at:
                purge_at = loop.time() + self._settings.delay.purge_interval_seconds

    async def _look(self, lanes: Sequence[Lane], places: Mapping[TopicPartition, int]) -> None:
        ends = await asyncio.to_thread(self._ends.latest, tuple(places), _REQUEST_SECONDS)
        waiting: dict[str, int] = {}
        topics: dict[str, int] = {}
        for lane in lanes:
            # Committed is behind what was forwarded by moments, and holes in it are few.
            left = max(0, ends[lane.name] - lane.committed.offset)
            waiting[lane.stage.name] = waiting.get(lane.stage.name, 0) + left
            topics[lane.name.topic] = topics.get(lane.name.topic, 0) + left
        metrics.WAITING.clear()
        for name, count in waiting.items():
            metrics.WAITING.labels(name).set(count)
        for topic in self._retired & topics.keys():
            if topics[topic]:
                self._dry.discard(topic)
            elif topic not in self._dry:
                self._dry.add(topic)
                partitions = sorted(lane.name.partition for lane in lanes if lane.name.topic == topic)
                log.info(
                    "retired tier is empty: when it is so in all partitions, its topic can be deleted",
                    topic=topic,
                    partitions=partitions,
                )

    def purge(self, places: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete what lies below the committed offsets in `places`; blocks for seconds at most.

        Returns:
            Up to where each partition was deleted; those with nothing to delete are left out.

        Raises:
            TasklineError: the broker did not answer, or refused.
        """
        bounds = {name: offset for name, offset in places.items() if name.topic != self._scheduled}
        scheduled = {name: offset for name, offset in places.items() if name.topic == self._scheduled}
        if any(offset > self._deleted.get(name, 0) for name, offset in scheduled.items()):
            bounds |= self._forgettable(scheduled)
        wanted = {name: offset for name, offset in bounds.items() if offset > self._deleted.get(name, 0)}
        if not wanted:
            return {}
        first = self._ends.earliest(tuple(wanted), _REQUEST_SECONDS)
        due = {name: offset for name, offset in wanted.items() if offset > first[name]}
        if due:
            self._ends.delete_before(due, _REQUEST_SECONDS)
            metrics.PURGED.inc(len(due))
            log.info("forwarded records deleted", partitions=len(due))
        self._deleted.update(wanted)
        for name in tuple(self._deleted):
            if name not in places:
                # Another owner deletes on.
                del self._deleted[name]
        return due

    def _forgettable(self, places: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Up to where nobody wants the scheduled submissions any more."""
        group = Topics(namespace=self._settings.kafka.namespace).projector_group
        reader = GroupTopic(group, self._scheduled)
        counts = {self._scheduled: 1 + max(name.partition for name in places)}
        projected = committed(self._settings.kafka, (reader,), counts, _REQUEST_SECONDS)[reader]
        before_ms = self._clock.now_ms() - round(self._settings.topics.retention_days * _DAY_MS)
        old = self._ends.at(tuple(places), before_ms, _REQUEST_SECONDS)
        return {
            name: min(offset, projected.get(name.partition, 0), old[name]) for name, offset in places.items()
        }
