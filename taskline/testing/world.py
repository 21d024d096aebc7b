"""What the roles in memory share: the log, the view, the clock, and the agreements (settings, codec, task types)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from taskline.errors import IncompatibleSchema
from taskline.infra.role import Clock
from taskline.infra.topics import Topics
from taskline.schemas.catalogue import Outcome, TypeCatalogue
from taskline.schemas.codec import Codec
from taskline.settings import Settings
from taskline.testing.broker import MemoryBroker
from taskline.testing.cancels import MemoryNotices
from taskline.testing.intake import MemoryIntake
from taskline.testing.log import MemoryLog
from taskline.testing.view import MemoryView
from taskline.workers.registry import Registry

_MS = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """One Taskline in memory."""

    broker: MemoryBroker
    view: MemoryView
    clock: Clock
    codec: Codec
    topics: Topics
    settings: Settings
    # Every task type that was registered, with all its schemas.
    types: TypeCatalogue
    # Of its processes, for their names.
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def log(self) -> MemoryLog:
        """A producer, as a process of its own would have."""
        producer = self.settings.producer
        return MemoryLog(
            self.broker,
            delivery_timeout_seconds=producer.delivery_timeout_seconds,
            max_buffered_records=producer.max_buffered_records,
        )

    def intake(self, group: str, *topics: str) -> MemoryIntake:
        """A member of a group, as a process of its own would have."""
        session_seconds = self.settings.kafka.session_timeout_ms / _MS
        return MemoryIntake(self.broker, group, topics, session_seconds=session_seconds)

    def notices(self, queue: str) -> MemoryNotices:
        """A follower of a queue's cancel notices."""
        return MemoryNotices(self.broker, self.topics.cancels(queue), self.codec, self.clock)

    def rng(self) -> random.Random:
        """What a process draws its jitter from."""
        return random.Random()  # noqa: S311 - jitter

    def register(self, registry: Registry) -> None:
        """Register a registry's task types, as `taskline types register` does; all or nothing.

        Raises:
            IncompatibleSchema: a type's schema can't read what was queued under an earlier one.
        """
        judged = [self.types.judge(task_type) for task_type in registry.types]
        for registration in judged:
            if registration.outcome is Outcome.REFUSED:
                raise IncompatibleSchema(registration.task_type, registration.problems)
        for task_type in registry.types:
            self.types.register(task_type)
