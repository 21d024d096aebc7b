"""What the engine is plugged into: everything of a worker that is not its own logic."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from taskline.infra.intake import Intake
from taskline.infra.kafka.lifecycle import LifecycleLog
from taskline.infra.log import AsyncLog
from taskline.infra.role import Clock
from taskline.schemas.codec import Codec
from taskline.schemas.events import Priority
from taskline.workers.admission import WriterSchemas
from taskline.workers.cancels import CancelGate
from taskline.workers.executor import Executor, InlineExecutor


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPorts:
    """A worker's surroundings; `taskline.testing` plugs in memory, the role Kafka."""

    # One per priority that is served.
    intakes: Mapping[Priority, Intake]
    # Dead letters go here.
    log: AsyncLog
    # Started and outcomes go here.
    lifecycle: LifecycleLog
    codec: Codec
    # Finds the schemas that payloads were written under: a TypeCatalogue or a TypeDirectory's.
    types: WriterSchemas
    clock: Clock
    # Keeps cancelled tasks from being run; None: they are not looked for.
    cancels: CancelGate | None = None
    # For the jitter of retries.
    rng: random.Random = field(default_factory=random.Random)
    # Runs `async def` handlers.
    coroutines: Executor = field(default_factory=InlineExecutor)
    # Runs `def` handlers: a ThreadExecutor, or an InlineExecutor where they are known to return at once.
    functions: Executor
    # Runs what may kill its process, of both kinds, one at a time; None: it runs where it always does.
    alone: Executor | None = None
    # For tasks that ask for a place other than the usual one (`isolation`); None: they run in the usual one.
    loops: Executor | None = None
    inline: Executor | None = None
    threads: Executor | None = None

    @property
    def executors(self) -> tuple[Executor, ...]:
        """All of them, each once."""
        each = (self.coroutines, self.functions, self.alone, self.loops, self.inline, self.threads)
        return tuple({id(executor): executor for executor in each if executor is not None}.values())
