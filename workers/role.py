"""The worker as a process: checks, registration of its task types, the engine on Kafka, a clean stop.

Invariant: nothing is taken before the topology is right and the log has accepted the task types. Kafka being away is waited for, at
the start as at any later time; what waiting can't mend ends the process with the reason and a non-zero status.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any, Required, TypedDict, TypeVar

import structlog

from taskline.errors import InvalidRegistry
from taskline.infra.available import Stopped, when_available
from taskline.infra.backoff import pauses
from taskline.infra.kafka.admin import check_topology
from taskline.infra.kafka.asynclog import KafkaLog
from taskline.infra.kafka.consumer import IntakeOptions
from taskline.infra.kafka.intake import KafkaIntake
from taskline.infra.outbox import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS
from taskline.infra.role import SystemClock, process_name, run_role
from taskline.infra.tiers import Tiers
from taskline.infra.topics import Topics
from taskline.schemas.confluent import codec_for
from taskline.schemas.events import Priority
from taskline.settings import Settings
from taskline.workers.cancel_view import LateView
from taskline.workers.child import ChildConfig
from taskline.workers.children import ProcessExecutor
from taskline.workers.children_loop import LoopExecutor
from taskline.workers.children_server import ForkServer
from taskline.workers.children_wear import WearLimits
from taskline.workers.dispatch import ALL
from taskline.workers.engine import WorkerEngine
from taskline.workers.executor import Executor, InlineExecutor, ThreadExecutor
from taskline.workers.limits_file import follow_limits, read_limits
from taskline.workers.ports import WorkerPorts
from taskline.workers.registry import Registry
from taskline.workers.surroundings import cancel_gate, followed_types, lifecycle_log

log = structlog.get_logger(__name__)

T = TypeVar("T")

# What may still be on its way when the engine has ended are courtesies (Released); they get this long.
_FLUSH_SECONDS = 5.0


def main(
    settings: Settings,
    registry: Registry,
    queue: str,
    reference: str | None = None,
    *,
    priorities: Collection[Priority] = ALL,
) -> None:
    """Run a worker of `queue` until SIGTERM or SIGINT.

    Args:
        settings: all of them.
        registry: the tasks that can be run.
        queue: whose tasks are run.
        reference: `module:attribute` of the registry, by which child processes find it; None: handlers run in this process, plain ones on threads.
        priorities: that are served; others are left to other workers.

    Raises:
        InvalidRegistry: the registry has no task of that queue.
        InvalidSettings: the file of limits can't be used.
        IncompatibleSchema: a task can't read what is queued under an earlier schema.
        WrongTopology: the topics or groups are not as declared.
        OffsetLost: what the group was to run is not in the log any more.
    """
    served = served_tasks(registry, queue)
    run_role(
        "worker",
        settings.telemetry,
        lambda stop: run_worker(settings, served, queue, stop, reference, priorities=priorities),
    )


def served_tasks(registry: Registry, queue: str) -> Registry:
    """The tasks of one queue.

    Raises:
        InvalidRegistry: there is none.
    """
    served = registry.for_queue(queue)
    if not len(served):
        others = ", ".join(registry.queues)
        detail = f"; its tasks are of {others}" if others else "; it has no tasks at all"
        raise InvalidRegistry(f"the registry has no task of queue {queue!r}{detail}")
    return served


async def run_worker(
    settings: Settings,
    registry: Registry,
    queue: str,
    stop: asyncio.Event,
    reference: str | None = None,
    *,
    priorities: Collection[Priority] = ALL,
) -> None:
    """Serve `queue` with `registry` until `stop` is set; arguments and errors as `main`."""
    name = process_name()
    topics = Topics(namespace=settings.kafka.namespace)
    codec = codec_for(settings.schemas)
    limits_file = settings.worker.limits_file
    limits = {} if limits_file is None else read_limits(limits_file)

    def there(step: Callable[[], T]) -> Awaitable[T]:
        waits = pauses(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        return when_available(lambda: asyncio.to_thread(step), stop, waits, what="Kafka")

    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.enter_context(contextlib.suppress(Stopped))
        server = None if reference is None else _fork_server(settings, reference)
        if server is not None:
            # It imports the registry while this process looks at the topics. Its end comes after the engine's, which lets go of the children.
            cleanup.push_async_callback(server.close)
            server.start()
        await there(partial(check_topology, settings, queues=(queue,)))
        await there(codec.prepare)
        directory = await there(partial(followed_types, settings, codec))
        cleanup.push_async_callback(asyncio.to_thread, directory.close)
        await there(partial(directory.register, registry.types))
        gate = None
        if settings.worker.cancels:
            view = LateView(settings)
            cleanup.push_async_callback(view.close)
            gate = await cancel_gate(
                settings, codec, view, topics.cancels(queue), name=name, stop=stop, cleanup=cleanup
            )
        # Events gather in their lanes already; a second wait in the client would only delay each start.
        kafka_log = KafkaLog(settings, client_id=name, linger_ms=0.0)
        cleanup.push_async_callback(kafka_log.close, _FLUSH_SECONDS)
        lifecycle = lifecycle_log(settings, kafka_log, codec, topics)
        ports = WorkerPorts(
            intakes={
                priority: _intake(settings, topics, queue, priority, name)
                for priority in Priority
                if priority in priorities
            },
            log=kafka_log,
            lifecycle=lifecycle,
            codec=codec,
            types=directory,
            clock=SystemClock(),
            cancels=gate,
            **_executors(settings, server),
        )
        engine = WorkerEngine(
            registry,
            ports,
            settings.worker,
            topics=topics,
            tiers=Tiers.of(settings.delay.tiers),
            worker=name,
        )
        engine.limit(limits)
        if limits_file is not None:
            following = asyncio.create_task(follow_limits(limits_file, engine.limit), name="limits-file")
            cleanup.callback(following.cancel)
        if server is not None:
            # The import must not use up the first tasks' time.
            await _either(server.start(), stop)
        log.info(
            "serving",
            worker=name,
            queue=queue,
            priorities=[priority.value for priority in Priority if priority in priorities],
            tasks=registry.names,
            concurrency=settings.worker.concurrency,
        )
        try:
            await engine.run(stop)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_SECONDS):
                    await lifecycle.flush()


class _Executors(TypedDict, total=False):
    coroutines: Executor
    functions: Required[Executor]
    alone: Executor
    loops: Executor
    inline: Executor
    threads: Executor


def _fork_server(settings: Settings, reference: str) -> ForkServer:
    return ForkServer(
        ChildConfig(
            registry=reference,
            max_result_bytes=settings.worker.max_result_bytes,
            memory_mb=settings.worker.child_memory_mb or None,
            telemetry=settings.telemetry.model_dump(),
        )
    )


def _executors(settings: Settings, server: ForkServer | None) -> _Executors:
    """Where handlers run; children are started when they are needed."""
    worker = settings.worker
    threads, inline = ThreadExecutor(worker.threads), InlineExecutor()
    if server is None:
        return {"functions": threads}
    limits = WearLimits(
        max_tasks=worker.child_max_tasks, max_rss_mb=worker.child_max_rss_mb, memory_mb=worker.child_memory_mb
    )
    processes = ProcessExecutor(server, worker.children, limits)
    loops = LoopExecutor(server, worker.loop_children, worker.loop_stall_seconds, limits=limits)
    return {
        "coroutines": loops if worker.coroutines == "child" else inline,
        "functions": processes,
        "alone": processes,
        "loops": loops,
        "inline": inline,
        "threads": threads,
    }


async def _either(done: asyncio.Future[None], stop: asyncio.Event) -> None:
    """Wait for one of them."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        either: list[asyncio.Future[Any]] = [done, stopping]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()


def _intake(settings: Settings, topics: Topics, queue: str, priority: Priority, name: str) -> KafkaIntake:
    return KafkaIntake(
        settings.kafka,
        IntakeOptions(batch=settings.worker.prefetch, grace_seconds=settings.worker.grace_seconds),
        topics=(topics.dispatch(queue, priority),),
        group=topics.worker_group(queue, priority),
        client_id=f"{name}-{priority.value}",
    )
