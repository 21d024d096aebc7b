"""The `gateway` role: one queue's workers over HTTP, from start to stop.

Invariant: nothing is lent before the topology is right and the task types and a day's cancel notices were read. Cassandra may be away: tasks are lent
all the same, and reports are answered 503 until it is back. A stop answers what is in flight, then leaves the groups; what was only in
memory spends no attempt, and leases go on without this process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from taskline.api.gateway_app import create_gateway_app
from taskline.api.gateway_routes import GatewayRoutes
from taskline.api.gateway_view import GatewayView
from taskline.api.health import KAFKA, VIEW, Health
from taskline.api.metrics import ApiMetrics
from taskline.api.server import bound_socket, serve
from taskline.api.watching import watch
from taskline.api.wiring import kafka_probe
from taskline.infra.available import Stopped, when_available
from taskline.infra.backoff import pauses
from taskline.infra.intake import Intake
from taskline.infra.kafka.admin import check_topology
from taskline.infra.kafka.asynclog import KafkaLog
from taskline.infra.kafka.consumer import IntakeOptions
from taskline.infra.kafka.intake import KafkaIntake
from taskline.infra.kafka.lifecycle import LifecycleLog
from taskline.infra.outbox import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS
from taskline.infra.role import SystemClock, process_name
from taskline.infra.topics import Topics
from taskline.schemas.confluent import codec_for
from taskline.schemas.events import Priority
from taskline.settings import Settings
from taskline.workers.lease_gateway import Gateway, GatewayPorts
from taskline.workers.surroundings import cancel_gate, followed_types, lifecycle_log

log = structlog.get_logger(__name__)

T = TypeVar("T")

_FLUSH_SECONDS = 5.0
# What leaves a group waits for starts that are on their way; see `taskline.workers.lease_desk`.
_GRACE_SECONDS = 15.0
# A fetch of the client brings no more than a partition's room in memory, so that little is read twice when a replica leaves.
_QUEUED_MESSAGES = 500


async def run_gateway(
    settings: Settings, queue: str, stop: asyncio.Event, *, announce: Path | None = None
) -> None:
    """Serve `queue`'s HTTP workers until `stop` is set.

    Args:
        settings: of the process.
        queue: whose tasks are lent.
        stop: set when it shall stop.
        announce: a file that gets the base URL once the port is open.

    Raises:
        WrongTopology: the topics or groups are not as declared.
        OffsetLost: what a group was to read is not in the log any more.
        InvalidSettings: the address can't be listened on, or Kafka's client refuses its settings.
    """
    listener = bound_socket(settings.gateway.host, settings.gateway.port)
    async with AsyncExitStack() as cleanup:
        cleanup.callback(listener.close)
        cleanup.enter_context(contextlib.suppress(Stopped))
        view = GatewayView(settings)
        cleanup.push_async_callback(view.close)
        gateway, lifecycle = await _gateway(settings, queue, view, stop, cleanup)
        metrics = ApiMetrics()
        health = Health(metrics=metrics)
        routes = GatewayRoutes(gateway=gateway, settings=settings, health=health, clock=SystemClock())
        app = create_gateway_app(routes, view.keys, metrics)
        leaving = asyncio.Event()
        tasks = [
            asyncio.create_task(watch(KAFKA, _probe(settings), health), name="watch-kafka"),
            asyncio.create_task(watch(VIEW, view.connect, health), name="watch-view"),
            asyncio.create_task(gateway.run(leaving), name="gateway"),
            asyncio.create_task(
                serve(app, listener, settings.api, health, stop, announce=announce), name="serve"
            ),
        ]
        log.info("serving", worker=process_name(), queue=queue, lease_seconds=settings.gateway.lease_seconds)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # Requests in flight are answered while the gateway still works.
            stop.set()
            await tasks[3]
            leaving.set()
            await tasks[2]
        finally:
            leaving.set()
            for task in tasks[:2]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_SECONDS):
                    await lifecycle.flush()
        for task in tasks[:2]:
            if not task.cancelled():
                task.result()


async def _gateway(
    settings: Settings, queue: str, view: GatewayView, stop: asyncio.Event, cleanup: AsyncExitStack
) -> tuple[Gateway, LifecycleLog]:
    """The gateway on Kafka, once that is there and as declared.

    Raises:
        Stopped: `stop` came first.
        WrongTopology: the topics or groups are not as declared.
    """
    name = process_name()
    topics = Topics(namespace=settings.kafka.namespace)
    codec = codec_for(settings.schemas)

    def there(step: Callable[[], T]) -> Awaitable[T]:
        waits = pauses(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        return when_available(lambda: asyncio.to_thread(step), stop, waits, what="Kafka")

    await there(partial(check_topology, settings, queues=(queue,)))
    await there(codec.prepare)
    directory = await there(partial(followed_types, settings, codec))
    cleanup.push_async_callback(asyncio.to_thread, directory.close)
    gate = None
    if settings.worker.cancels:
        gate = await cancel_gate(
            settings, codec, view, topics.cancels(queue), name=name, stop=stop, cleanup=cleanup
        )
    kafka_log = KafkaLog(settings, client_id=name, linger_ms=0.0)
    cleanup.push_async_callback(kafka_log.close, _FLUSH_SECONDS)
    lifecycle = lifecycle_log(settings, kafka_log, codec, topics)

    def member(topic: str, group: str, tail: str) -> Intake:
        return KafkaIntake(
            settings.kafka,
            IntakeOptions(
                batch=settings.worker.prefetch, grace_seconds=_GRACE_SECONDS, queued_messages=_QUEUED_MESSAGES
            ),
            topics=(topic,),
            group=group,
            client_id=f"{name}-{tail}",
        )

    ports = GatewayPorts(
        intakes={
            priority: partial(
                member,
                topics.dispatch(queue, priority),
                topics.worker_group(queue, priority),
                priority.value,
            )
            for priority in Priority
        },
        guards=member(topics.leases(queue), topics.lease_group(queue), "leases"),
        log=kafka_log,
        lifecycle=lifecycle,
        view=view,
        codec=codec,
        types=directory,
        clock=SystemClock(),
        gate=gate,
    )
    return Gateway(ports, settings, queue=queue, replica=name), lifecycle


def _probe(settings: Settings) -> Callable[[], Awaitable[Callable[[], Awaitable[None]]]]:
    async def connect() -> Callable[[], Awaitable[None]]:
        return kafka_probe(settings)

    return connect
