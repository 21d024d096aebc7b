"""A gateway: lending, reports and guards of one queue, on their ports. Kafka and Cassandra are wired in `taskline.api.gateway_wiring`.

Invariant: what is shared by replicas is in the log and the view alone. Any of them takes any report and sees to any guard; a replica that dies takes
with it nothing but fetches that nobody was answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from taskline.infra.intake import Intake
from taskline.infra.kafka.lifecycle import LifecycleLog
from taskline.infra.log import AsyncLog
from taskline.infra.role import Clock
from taskline.infra.tiers import Tiers
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import Priority
from taskline.settings import Settings
from taskline.workers.cancels import CancelGate, TaskView
from taskline.workers.lease_desk import DeskPorts, LeaseDesk, TypeSource
from taskline.workers.lease_follow import LeaseFollower
from taskline.workers.lease_guards import GuardWriter
from taskline.workers.lease_outcomes import LeaseOutcomes
from taskline.workers.lease_reading import LeaseReader
from taskline.workers.lease_records import LeaseRecords
from taskline.workers.lease_watch import LeaseWatch

# What a stop gives reports of failure whose next step is on its way; the rest is for the leases' guards.
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayPorts:
    """What a gateway stands on."""

    # Makes a member of the workers' group of one priority; called each time that somebody fetches again.
    intakes: Mapping[Priority, Callable[[], Intake]]
    # The member of the leases' group.
    guards: Intake
    log: AsyncLog
    lifecycle: LifecycleLog
    view: TaskView
    codec: Codec
    types: TypeSource
    clock: Clock
    # None: cancelled tasks are lent all the same (worker.cancels).
    gate: CancelGate | None


class Gateway:
    """One replica."""

    def __init__(self, ports: GatewayPorts, settings: Settings, *, queue: str, replica: str) -> None:
        """Lend the tasks of `queue`, under the process's name."""
        topics, tiers = Topics(namespace=settings.kafka.namespace), Tiers.of(settings.delay.tiers)
        self.queue = queue
        self._guards_intake = ports.guards
        records = LeaseRecords(
            ports.log,
            ports.lifecycle,
            ports.codec,
            ports.clock,
            replica=replica,
            topics=topics,
            tiers=tiers,
        )
        guards = GuardWriter(ports.log, ports.codec, ports.clock, queue=queue, topics=topics, tiers=tiers)
        reader = LeaseReader(ports.view, ports.codec)
        follower = LeaseFollower(records, settings.worker, ports.clock)
        self.desk = LeaseDesk(
            DeskPorts(
                intakes=ports.intakes,
                types=ports.types,
                codec=ports.codec,
                clock=ports.clock,
                records=records,
                guards=guards,
                gate=ports.gate,
            ),
            settings,
        )
        self.outcomes = LeaseOutcomes(
            reader,
            records,
            follower,
            book=self.desk.book,
            gate=ports.gate,
            clock=ports.clock,
            settings=settings,
            queue=queue,
        )
        self._watch = LeaseWatch(
            reader=reader,
            records=records,
            guards=guards,
            follower=follower,
            codec=ports.codec,
            clock=ports.clock,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set; what is in memory is given back then.

        Raises:
            Exception: what ended an intake.
        """
        parts = [
            asyncio.create_task(self.desk.run(stop), name="lease-desk"),
            asyncio.create_task(self._watch.run(self._guards_intake, stop), name="lease-watch"),
        ]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.set()
            await asyncio.wait(parts)
            await self.outcomes.close(_CLOSE_SECONDS)
        for part in parts:
            part.result()
