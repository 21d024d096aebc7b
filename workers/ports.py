"""What the engine is plugged into: everything of a worker that is not its own logic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from taskline.infra.intake import Intake
from taskline.infra.kafka.lifecycle import LifecycleLog
from taskline.infra.log import AsyncLog
from taskline.infra.role import Clock
from taskline.schemas.codec import Codec
from taskline.schemas.events import Priority
from taskline.workers.admission import WriterSchemas
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
    # Runs `async def` handlers.
    coroutines: Executor = field(default_factory=InlineExecutor)
    # Runs `def` handlers: a ThreadExecutor, or an InlineExecutor where they are known to return at once.
    functions: Executor
