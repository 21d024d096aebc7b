"""Gateways in memory: the real ones, on memory intakes, log and view, in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import Any, TypeVar

from taskline.infra.kafka.lifecycle import LifecycleLog
from taskline.schemas.events import ErrorCategory, Priority
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType
from taskline.settings import Settings
from taskline.testing import InMemoryTaskline
from taskline.testing.role import MemoryRole
from taskline.testing.world import World
from taskline.workers.cancels import CancelGate
from taskline.workers.failure import Failure
from taskline.workers.lease_desk import Lent
from taskline.workers.lease_gateway import Gateway, GatewayPorts
from taskline.workers.lease_outcomes import Extended, Said, Taken
from taskline.workers.outcome import ErrorInfo
from taskline.workers.registry import Registry

T = TypeVar("T")

QUEUE = "default"
SETTINGS: dict[str, Any] = {
    "gateway": {"lease_seconds": 10, "buffer": 4, "idle_seconds": 30, "unfetched_delay_seconds": 1},
    "worker": {"retry_base_seconds": 1.0, "retry_multiplier": 1.0},
}


class _Types:
    """As a directory; what is registered is known at once."""

    def __init__(self, world: World) -> None:
        self._types = world.types

    def get(self, name: str) -> TaskType:
        return self._types.get(name)

    def writer_schema(self, fingerprint: bytes) -> PayloadSchema | None:
        return self._types.writer_schema(fingerprint)

    def refresh(self) -> None:
        pass


class MemoryGateway(MemoryRole):
    """One replica, and a worker that calls it."""

    gateway: Gateway

    def __init__(self, tl: InMemoryTaskline) -> None:
        super().__init__(tl._world, "gateway")
        self._tl = tl

    def outstanding(self) -> list[str]:
        return []

    def begin(self) -> MemoryGateway:
        self._tl._call(self.start())
        self._tl.advance(0.1)
        return self

    def end(self) -> None:
        self._tl._call(self.stop())

    def die(self) -> None:
        self._tl._call(self.kill())

    def fetch(self, *task_types: str, limit: int = 1, wait: float = 5.0) -> list[Lent]:
        return self.call(self.gateway.desk.fetch("w1", task_types, limit=limit, wait_seconds=wait))

    def one(self, *task_types: str) -> Lent:
        (lent,) = self.fetch(*task_types)
        return lent

    def complete(self, lent: Lent, result: bytes | None = b"1") -> Taken:
        return self.call(self.gateway.outcomes.complete(lent.task_id, lent.token, result))

    def fail(self, lent: Lent, *, permanent: bool = False, after: float | None = None) -> Taken:
        return self.call(self.gateway.outcomes.fail(lent.task_id, lent.token, failure(permanent, after)))

    def extend(
        self, lent: Lent, seconds: float | None = None, *, said: tuple[float | None, str | None] | None = None
    ) -> Extended:
        told = None if said is None else Said(fraction=said[0], message=said[1])
        return self.call(self.gateway.outcomes.extend(lent.task_id, lent.token, seconds=seconds, said=told))

    def call(self, coroutine: Awaitable[T]) -> T:
        """Await something in this process, so that it dies with it."""
        return self._tl._call(self._within(coroutine))

    async def _within(self, coroutine: Awaitable[T]) -> T:
        async def own() -> T:
            return await coroutine

        return await self._process.spawn(own(), name="call")

    async def _run(self) -> None:
        world, settings = self._world, self._world.settings
        log, topics = self._log(), world.topics
        notices = world.notices(QUEUE)
        self._process.tie(notices.sever)
        gate = CancelGate(notices, world.view, world.codec, world.clock)
        await notices.start(gate.heard)
        lifecycle = LifecycleLog(
            log, world.codec, topics, settings.topics.lanes, settings.worker.lifecycle_linger_ms
        )
        self.gateway = Gateway(
            GatewayPorts(
                intakes={
                    priority: partial(
                        self._intake, topics.worker_group(QUEUE, priority), topics.dispatch(QUEUE, priority)
                    )
                    for priority in Priority
                },
                guards=self._intake(topics.lease_group(QUEUE), topics.leases(QUEUE)),
                log=log,
                lifecycle=lifecycle,
                view=world.view,
                codec=world.codec,
                types=_Types(world),
                clock=world.clock,
                gate=gate,
            ),
            settings,
            queue=QUEUE,
            replica=self.name,
        )
        await self.gateway.run(self._stop)
        await notices.close()
        await lifecycle.flush()
        await log.close()


def failure(permanent: bool = False, after: float | None = None) -> Failure:
    return Failure(
        info=ErrorInfo(error_class="HttpError", message="no"),
        category=ErrorCategory.PERMANENT if permanent else ErrorCategory.UNKNOWN,
        retry_after_seconds=after,
        exact=after is not None,
        retryable=not permanent,
    )


def taskline(*types: str, **sections: dict[str, Any]) -> InMemoryTaskline:
    """A Taskline without workers, for these task types."""
    registry = Registry()
    for name in types:
        registry.task(name)(_nobody)
    merged = {name: {**values, **sections.get(name, {})} for name, values in SETTINGS.items()}
    settings = Settings.model_validate({**sections, **merged})
    return InMemoryTaskline(registry, settings=settings, workers=False)


def _nobody(payload: Any) -> None:
    raise AssertionError("no handler runs here")
