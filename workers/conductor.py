"""One task's way through a worker, once it was taken from the buffer.

Invariant, and the order of every execution: Started is acknowledged before the handler's first line; the outcome is acknowledged
before the record's offset counts as done. So a crash at any point leaves either a task that nobody has finished,
and that runs again, or one whose end is in the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from taskline.errors import InvalidResult
from taskline.settings import WorkerSettings
from taskline.workers import metrics
from taskline.workers.admission import Admitted, Rejected
from taskline.workers.context import TaskContext
from taskline.workers.execution import Execution, Phase
from taskline.workers.outcome import encode_result
from taskline.workers.ports import WorkerPorts
from taskline.workers.recorder import Recorder

log = structlog.get_logger(__name__)

# How long a coroutine that was cancelled may take to end before it is left behind.
CANCEL_GRACE_SECONDS = 2.0
_MS = 1_000


class Conductor:
    """Takes executions all the way; holds nothing between them."""

    def __init__(self, ports: WorkerPorts, recorder: Recorder, settings: WorkerSettings) -> None:
        """Time limits and the result's bound come from the settings."""
        self._clock = ports.clock
        self._recorder = recorder
        self._default_limit = settings.default_timeout_seconds
        self._max_result_bytes = settings.max_result_bytes

    async def perform(self, run: Execution, slot_free: Callable[[], None]) -> None:
        """Started, handler, outcome, done. `slot_free` is called once the handler is over."""
        admitted = run.admitted
        assert admitted is not None  # noqa: S101 - the engine's own doing
        run.opened = True
        await self._recorder.started(run, admitted)
        run.phase = Phase.RUNNING
        await self._handle(run, admitted)
        run.phase = Phase.SETTLING
        slot_free()
        await self._settle(run, admitted)
        run.waiting.assignment.complete(run.position.offset)

    async def reject(self, run: Execution, rejected: Rejected) -> None:
        """A task that can't be run here: dead letter, done."""
        await self._recorder.rejected(run, rejected)
        run.waiting.assignment.complete(run.position.offset)

    async def bury(self, run: Execution, cause: str) -> None:
        """Bytes that are no task: onto the dead-letter topic, done."""
        await self._recorder.undecodable(run, cause)
        run.waiting.assignment.complete(run.position.offset)

    async def _handle(self, run: Execution, admitted: Admitted) -> None:
        loop = asyncio.get_running_loop()
        submission, task = admitted.submission, admitted.task
        limit_ms = submission.timeout_ms or task.type.timeout_ms
        limit = limit_ms / _MS if limit_ms else self._default_limit
        now_ms = self._clock.now_ms()
        ctx = TaskContext(
            task_id=submission.task_id,
            root_id=submission.root_id,
            task_type=submission.task_type,
            attempt=admitted.attempt,
            tenant=submission.tenant,
            queue=submission.queue,
            priority=submission.priority,
            deadline_ms=now_ms + round(limit * _MS),
            traceparent=submission.traceparent,
        )
        waited_ms = now_ms - run.waiting.record.timestamp_ms
        metrics.pickup(run.waiting.priority).observe(max(0, waited_ms) / _MS)
        begun = loop.time()
        run.ended = loop.create_future()
        run.handler = loop.create_task(_guarded(run, admitted, ctx))
        timer = loop.call_later(limit, self._time_is_up, run)
        try:
            await run.ended
        finally:
            timer.cancel()
            metrics.handler_seconds(task.name).observe(loop.time() - begun)
        # Whatever else a handler does when its time is up (return, or fail in its own way) is its outcome.
        if run.left_behind or (run.timed_out and isinstance(run.error, asyncio.CancelledError)):
            run.error = TimeoutError(f"the handler did not end within {limit:g} s")

    def _time_is_up(self, run: Execution) -> None:
        run.timed_out = True
        assert run.executor is not None and run.handler is not None  # noqa: S101, PT018 - set before the timer
        if run.executor.interruptible:
            run.handler.cancel()
            asyncio.get_running_loop().call_later(CANCEL_GRACE_SECONDS, self._leave_behind, run)
        else:
            self._leave_behind(run)

    def _leave_behind(self, run: Execution) -> None:
        if run.ended is None or run.ended.done() or run.admitted is None or run.executor is None:
            return
        run.left_behind = True
        run.ended.set_result(None)
        metrics.ABANDONED.labels(run.admitted.task.name).inc()
        log.error(
            "handler still runs after its time limit; its task is counted as failed",
            interruptible=run.executor.interruptible,
            **run.facts(),
        )

    async def _settle(self, run: Execution, admitted: Admitted) -> None:
        encoded: bytes | None = None
        result, run.result = run.result, None
        error, run.error = run.error, None
        if error is None:
            try:
                encoded = encode_result(result, self._max_result_bytes)
            except InvalidResult as invalid:
                error = invalid
        if error is None:
            metrics.tasks(admitted.task.name, "succeeded").inc()
            await self._recorder.succeeded(run, admitted, encoded)
        else:
            metrics.tasks(admitted.task.name, "timed_out" if run.timed_out else "failed").inc()
            await self._recorder.failed(run, admitted, error)


async def _guarded(run: Execution, admitted: Admitted, ctx: TaskContext) -> None:
    """The handler in an asyncio task of its own; whatever it raises ends here, SystemExit and KeyboardInterrupt too."""
    assert run.executor is not None and run.ended is not None  # noqa: S101, PT018 - set by the caller
    try:
        payload = admitted.value if run.executor.remote else admitted.payload
        run.result = await run.executor.run(admitted.task, payload, ctx)
    except BaseException as error:
        run.error = error
    finally:
        if not run.ended.done():
            run.ended.set_result(None)
