"""One task's way through a worker, once it was taken from the buffer.

Invariant, and the order of every execution: Started is acknowledged before the handler's first line; the outcome, and whatever follows
from it (the next attempt, the dead letter), is acknowledged before the record's offset counts as done. So a crash at any point leaves
either a task that nobody has finished, and that runs again, or one whose end is in the log.

Between Started and the handler stands the gate (`cancels`), if there is one: what it does not let through is not run.

One way leads back: an execution whose process died of something that ran beside it has no outcome. Its record is not done; the
engine runs it again, alone.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Protocol

import structlog

from taskline.errors import HandBack, InvalidResult
from taskline.schemas.events import ErrorCategory
from taskline.settings import WorkerSettings
from taskline.workers import metrics
from taskline.workers.admission import Admitted, Rejected
from taskline.workers.cancels import FRESH_SECONDS, CancelGate, Verdict
from taskline.workers.context import TaskContext
from taskline.workers.execution import Execution, Phase
from taskline.workers.executor import ChildDied, EncodedResult, HandlerFailed
from taskline.workers.failure import Failure, crashed, failure_of, timed_out
from taskline.workers.outcome import encode_result
from taskline.workers.ports import WorkerPorts
from taskline.workers.progress import LoopLine, pause_seconds
from taskline.workers.recorder import Recorder, deaths_of
from taskline.workers.retry import Bury, Expire, RetryAt, RetryPolicy, Spent, decide

log = structlog.get_logger(__name__)

# How long a coroutine that was cancelled may take to end before it is left behind.
CANCEL_GRACE_SECONDS = 2.0
_MS = 1_000
# How metrics call an execution's end; any other is "failed".
_OUTCOMES = {ErrorCategory.TIMEOUT: "timed_out", ErrorCategory.CRASH: "crashed"}


class SlotHost(Protocol):
    """What the conductor needs of the engine."""

    def handler_over(self, run: Execution) -> None:
        """The handler has ended, or is waited for no longer."""
        ...

    def step_aside(self, run: Execution) -> None:
        """The execution waits for something else than its slot, and gives it away; nothing if it has none."""
        ...

    async def step_back(self, run: Execution) -> None:
        """Return when the execution has a slot again."""
        ...

    async def still_ours(self, run: Execution) -> None:
        """Return when the execution's record is this process's for certain; at once, unless the process stood still."""
        ...


class Conductor:
    """Takes executions all the way; holds nothing between them."""

    def __init__(self, ports: WorkerPorts, recorder: Recorder, settings: WorkerSettings) -> None:
        """Time limits, the result's bound and what follows a failure come from the settings."""
        self._clock = ports.clock
        self._rng: random.Random = ports.rng
        self._recorder = recorder
        self._gate = ports.cancels
        self._default_limit = settings.default_timeout_seconds
        self._max_result_bytes = settings.max_result_bytes
        self._pace = partial(pause_seconds, least_seconds=settings.progress_interval_seconds)
        self._poison_deaths = settings.poison_deaths
        self._policy = RetryPolicy(
            base_seconds=settings.retry_base_seconds,
            multiplier=settings.retry_multiplier,
            cap_seconds=settings.retry_cap_seconds,
        )

    async def perform(self, run: Execution, host: SlotHost) -> None:
        """Started, handler, outcome, done."""
        admitted = run.admitted
        assert admitted is not None  # noqa: S101 - the engine's own doing
        while (verdict := await self._open(run, admitted, host)) is Verdict.RUN:
            run.phase = Phase.RUNNING
            await self._handle(run, admitted)
            if not run.stale:
                break
            run.reopen()
            # It stood still between the check and the handler's first line: whose is the record now?
            await host.still_ours(run)
        if verdict is Verdict.RUN:
            run.phase = Phase.SETTLING
            host.handler_over(run)
            await self._settle(run, admitted, host)
        elif verdict is Verdict.ABORT:
            metrics.tasks(admitted.task.name, "cancelled").inc()
            await self._recorder.cancelled(run, admitted)
        else:
            metrics.tasks(admitted.task.name, "dropped").inc()
            await self._recorder.dropped(run, admitted)
        if not run.again:
            run.waiting.assignment.complete(run.position.offset)

    def abort(self, run: Execution) -> None:
        """Stop a handler, since its task is to be cancelled; what it does of itself meanwhile is its outcome all the same."""
        executor, handler = run.executor, run.handler
        if (
            run.phase is not Phase.RUNNING
            or run.aborted
            or executor is None
            or handler is None
            or handler.done()
        ):
            return
        run.abort_asked = True
        if run.line is not None:
            run.line.stop()
        if not executor.interruptible:
            return
        run.aborted = True
        # One that has not had its first turn ends without a word.
        handler.add_done_callback(lambda _: _ended_unsaid(run))
        handler.cancel()
        asyncio.get_running_loop().call_later(CANCEL_GRACE_SECONDS, self._leave_behind, run)

    async def _open(self, run: Execution, admitted: Admitted, host: SlotHost) -> Verdict:
        """Started, and what follows from what is in the lane before it; never AGAIN."""
        while True:
            run.opened = True
            if run.executor is not None and not run.executor.remote:
                run.waiting.assignment.begin(run.position.offset)
            if self._gate is not None:
                self._gate.expect()
            await self._recorder.started(run, admitted)
            run.checked_at = asyncio.get_running_loop().time()
            if self._gate is None:
                return Verdict.RUN
            verdict = await self._pass(self._gate, run, admitted, host)
            if verdict is not Verdict.AGAIN:
                return verdict
            run.reopen()

    async def _pass(self, gate: CancelGate, run: Execution, admitted: Admitted, host: SlotHost) -> Verdict:
        """What the gate says; an execution that may run has its slot, and one that was looked up has waited without."""
        loop = asyncio.get_running_loop()
        submission = admitted.submission
        run.checked_at = loop.time()
        if await gate.named(submission.task_id):
            host.step_aside(run)
            verdict, run.checked_at = await gate.judge(run.id, submission)
            if verdict is not Verdict.RUN:
                return verdict
        await host.step_back(run)
        while loop.time() - run.checked_at > FRESH_SECONDS:
            # It had to wait for a slot. Asked again with the slot in hand, or it might wait so for ever; but not at any length.
            try:
                async with asyncio.timeout(FRESH_SECONDS):
                    verdict, run.checked_at = await gate.judge(run.id, submission)
            except TimeoutError:
                host.step_aside(run)
                verdict, run.checked_at = await gate.judge(run.id, submission)
            if verdict is not Verdict.RUN:
                return verdict
            await host.step_back(run)
        return Verdict.ABORT if gate.aborts(submission.task_id) else Verdict.RUN

    async def expire(self, run: Execution) -> None:
        """A task that is not worth starting any more: its end, done."""
        assert run.admitted is not None  # noqa: S101 - the engine's own doing
        await self._recorder.expired(run, run.admitted)
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
        run.limit_seconds = limit
        soft = task.conduct.soft_timeout
        now_ms = self._clock.now_ms()
        run.line = LoopLine(
            partial(self._recorder.progressed, run, admitted), pace=self._pace, now_ms=self._clock.now_ms
        )
        ctx = TaskContext(
            task_id=submission.task_id,
            root_id=submission.root_id,
            task_type=submission.task_type,
            attempt=admitted.attempt,
            tenant=submission.tenant,
            queue=submission.queue,
            priority=submission.priority,
            deadline_ms=now_ms + round(limit * _MS),
            # A task may ask for less time than its type: then the hard limit alone holds.
            soft_deadline_ms=None if soft is None or soft >= limit else now_ms + round(soft * _MS),
            traceparent=submission.traceparent,
            line=run.line,
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
            run.line.close()
            metrics.handler_seconds(task.name).observe(loop.time() - begun)

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
            "handler still runs although it was stopped; its task is counted as cancelled"
            if run.aborted
            else "handler still runs after its time limit; its task is counted as failed",
            interruptible=run.executor.interruptible,
            **run.facts(),
        )

    async def _settle(self, run: Execution, admitted: Admitted, host: SlotHost) -> None:
        result, run.result = run.result, None
        error, run.error = run.error, None
        name = admitted.task.name
        failure: Failure | None = None
        if run.aborted and (run.left_behind or isinstance(error, asyncio.CancelledError | ChildDied)):
            metrics.tasks(name, "cancelled").inc()
            await self._recorder.cancelled(run, admitted)
            return
        if _handed_back(error):
            if run.abort_asked:
                metrics.tasks(name, "cancelled").inc()
                await self._recorder.cancelled(run, admitted)
                return
            if run.leaving:
                # Its offset stays undone: whoever has the partition next begins it again.
                run.again = True
                await self._recorder.handed_back(run)
                return
        if run.left_behind or (run.timed_out and isinstance(error, asyncio.CancelledError | ChildDied)):
            # Whatever else a handler does when its time is up (return, or fail in its own way) is its outcome.
            failure = timed_out(run.limit_seconds)
        elif isinstance(error, ChildDied):
            # A suspect runs alone, whatever its executor says: else it could take others down without end.
            alone = error.alone or run.suspect
            metrics.DEATHS.labels(name, str(alone).lower()).inc()
            if not alone:
                await self._recorder.crashed_beside_others(run, admitted, error.cause)
                run.again = True
                return
            failure = crashed(error.cause)
        elif isinstance(error, HandlerFailed):
            failure = error.failure
        elif error is not None:
            failure = failure_of(error, admitted.task, now_ms=self._clock.now_ms())
        if failure is None:
            try:
                encoded = self._encoded(result)
            except InvalidResult as invalid:
                failure = failure_of(invalid, admitted.task)
            else:
                metrics.tasks(name, "succeeded").inc()
                await self._recorder.succeeded(run, admitted, encoded)
                return
        # What follows a failure begins something: only its owner may.
        await host.still_ours(run)
        metrics.tasks(name, _OUTCOMES.get(failure.category, "failed")).inc()
        await self._follow(run, admitted, failure)

    def _encoded(self, result: object) -> bytes | None:
        """The result's bytes; those from another process were made and measured there."""
        if isinstance(result, EncodedResult):
            return result.data
        return encode_result(result, self._max_result_bytes)

    async def _follow(self, run: Execution, admitted: Admitted, failure: Failure) -> None:
        submission = admitted.submission
        trail = self._recorder.trail(run, admitted.attempt, failure)
        decision = decide(
            failure,
            Spent(
                attempt=admitted.attempt,
                max_retries=submission.max_retries,
                start_by=submission.start_by,
                deaths=deaths_of(admitted, failure),
                server_errors=trail.server_errors,
            ),
            admitted.task.conduct.retry or self._policy,
            poison_deaths=self._poison_deaths,
            now_ms=self._clock.now_ms(),
            rng=self._rng,
        )
        match decision:
            case RetryAt():
                await self._recorder.retried(run, admitted, failure, trail, decision.due_ms)
            case Bury():
                await self._recorder.buried(run, admitted, failure, trail, decision.reason)
            case Expire():
                await self._recorder.expired(run, admitted, failure)


async def _guarded(run: Execution, admitted: Admitted, ctx: TaskContext) -> None:
    """The handler in an asyncio task of its own; whatever it raises ends here, SystemExit and KeyboardInterrupt too."""
    assert run.executor is not None and run.ended is not None  # noqa: S101, PT018 - set by the caller
    if run.checked_at is not None and asyncio.get_running_loop().time() - run.checked_at > FRESH_SECONDS:
        run.stale = True
        run.ended.set_result(None)
        return
    try:
        payload = admitted.value if run.executor.remote else admitted.payload
        run.result = await run.executor.run(admitted.task, payload, ctx)
    except BaseException as error:
        run.error = error
    finally:
        if not run.ended.done():
            run.ended.set_result(None)


def _handed_back(error: BaseException | None) -> bool:
    return isinstance(error, HandBack) or (isinstance(error, HandlerFailed) and error.failure.hand_back)


def _ended_unsaid(run: Execution) -> None:
    if run.ended is not None and not run.ended.done():
        run.error = asyncio.CancelledError()
        run.ended.set_result(None)
