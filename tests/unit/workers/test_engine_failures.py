"""What the engine does after an attempt that failed: retries, expiry, poison, and copies of what it has done."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from taskline import Permanent, Retry, RetryPolicy, SoftTimeout
from taskline.errors import DeliveryFailed, DeliveryUnknown
from taskline.infra.holes import decode_holes
from taskline.infra.log import (
    HEADER_ATTEMPT,
    HEADER_CAUSE,
    HEADER_DEATHS,
    HEADER_DUE,
    HEADER_TARGET,
    HEADER_TASK_ID,
    HEADER_TRAIL,
    InRecord,
    OutRecord,
)
from taskline.schemas.events import (
    Crashed,
    DeadLetter,
    DeadLettered,
    ErrorCategory,
    Expired,
    Failed,
    LifecycleBatch,
    Priority,
    RetryScheduled,
    Started,
    Succeeded,
    TaskSubmitted,
)
from taskline.workers.context import TaskContext
from taskline.workers.executor import ChildDied, EncodedResult, HandlerFailed
from taskline.workers.failure import Failure
from taskline.workers.outcome import ErrorInfo
from taskline.workers.registry import Registry, Task
from taskline.workers.trail import decode_trail


class Doomed:
    """Handlers that fail as they are told."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.seen: list[TaskContext] = []
        self.error: BaseException | None = ValueError("no")

        @self.registry.task("fail")
        async def fail(payload: Any, ctx: TaskContext) -> str:
            self.seen.append(ctx)
            if self.error is not None:
                raise self.error
            return "mended"

        @self.registry.task("sleep")
        async def sleep(payload: float, ctx: TaskContext) -> None:
            self.seen.append(ctx)
            await asyncio.sleep(payload)


@pytest.fixture
def doomed() -> Doomed:
    return Doomed()


def of(b: Any, kind: type[Any]) -> list[Any]:
    return [event for event in b.log.events() if isinstance(event, kind)]


def letters(b: Any) -> list[DeadLetter]:
    return [b.codec.decode(record.value, DeadLetter) for record in b.log.dlq()]


# ---- retries -----------------------------------------------------------------------------------------------------


def test_a_failed_attempt_is_followed_by_the_same_record_in_a_tier(bench, virtually, doomed) -> None:
    async def scenario() -> None:
        async with bench(doomed.registry) as b:
            b.assign(0)
            task = b.submission("fail", {"x": 1})
            b.receive([b.record(b.codec.encode(task), x_theirs=b"kept out")])
            await asyncio.sleep(2)
            started, failed, scheduled = b.log.events()
            assert isinstance(started, Started)
            assert isinstance(failed, Failed)
            assert isinstance(scheduled, RetryScheduled)
            assert (failed.execution, failed.attempt, failed.retryable, failed.category) == (
                started.execution,
                1,
                True,
                ErrorCategory.UNKNOWN,
            )
            assert (scheduled.attempt, scheduled.task_id, scheduled.worker) == (1, task.task_id, "w1")
            assert 5_000 <= scheduled.due - failed.at <= 15_000
            (waiting,) = b.log.waiting()
            assert waiting.topic in ("tasks.delay.5s", "tasks.delay.10s")
            assert (waiting.key, waiting.value) == (b"key", b.codec.encode(task))
            headers = dict(waiting.headers)
            (told,) = decode_trail(headers.pop(HEADER_TRAIL)).errors
            assert headers == {
                HEADER_TASK_ID: task.task_id.bytes,
                HEADER_ATTEMPT: b"2",
                HEADER_DUE: b"%d" % scheduled.due,
                HEADER_TARGET: b"tasks.normal",
            }
            assert (told.attempt, told.worker, told.error_class, told.message) == (
                1,
                "w1",
                "ValueError",
                "no",
            )
            # Failed and RetryScheduled in one batch.
            assert len([record for record in b.log.records if record.topic == "tasks.lifecycle"]) == 2
            assert b.log.dlq() == []
            assert b.committed().offset == 1

    virtually(scenario())


@pytest.mark.parametrize("max_retries", [0, 1, 3])
def test_a_task_that_always_fails_runs_once_and_max_retries_times_and_is_buried_with_every_error(
    bench, virtually, doomed, max_retries
) -> None:
    async def scenario() -> None:
        async with bench(doomed.registry) as b:
            b.assign(0)
            task = b.submission("fail", max_retries=max_retries)
            b.push(task)
            for _ in range(max_retries):
                await asyncio.sleep(1)
                await b.forward()
            await asyncio.sleep(60)
            assert [ctx.attempt for ctx in doomed.seen] == list(range(1, max_retries + 2))
            assert b.log.kinds() == ["Started", "Failed", "RetryScheduled"] * max_retries + [
                "Started",
                "Failed",
                "DeadLettered",
            ]
            for number, (failed, scheduled) in enumerate(
                zip(of(b, Failed), of(b, RetryScheduled), strict=False)
            ):
                nominal = min(3_600, 10 * 10**number)
                assert 0.5 * nominal <= (scheduled.due - failed.at) / 1_000 <= 1.5 * nominal + 0.01
            # Never early.
            for scheduled, started in zip(of(b, RetryScheduled), of(b, Started)[1:], strict=True):
                assert started.at >= scheduled.due
            (letter,) = letters(b)
            assert (letter.reason, letter.attempt) == ("exhausted", max_retries + 1)
            assert [error.attempt for error in letter.errors] == list(range(1, max_retries + 2))
            assert letter.submission == b.codec.encode(task)
            assert of(b, DeadLettered)[0].reason == "exhausted"
            assert b.committed().offset == max_retries + 1

    virtually(scenario())


def test_a_task_may_succeed_in_the_end(bench, virtually, doomed) -> None:
    async def scenario() -> None:
        async with bench(doomed.registry) as b:
            b.assign(0)
            b.push(b.submission("fail"))
            await asyncio.sleep(1)
            doomed.error = None
            await b.forward()
            await asyncio.sleep(1)
            (succeeded,) = of(b, Succeeded)
            assert (succeeded.attempt, succeeded.result) == (2, b'"mended"')
            assert b.log.dlq() == []

    virtually(scenario())


@pytest.mark.parametrize("missing", ["next attempt", "events"])
def test_nothing_is_done_before_the_next_attempt_and_its_events_are_both_acknowledged(
    bench, virtually, doomed, missing
) -> None:
    async def scenario() -> None:
        async with bench(doomed.registry) as b:
            b.assign(0)

            def verdict(record: OutRecord) -> str | None:
                if missing == "next attempt":
                    return "hang" if record.topic.startswith("tasks.delay.") else None
                if record.topic != "tasks.lifecycle":
                    return None
                batch = b.codec.decode(record.value, LifecycleBatch)
                return "hang" if Failed in [b.codec.kind_of(entry.event) for entry in batch.events] else None

            b.log.verdict = verdict
            b.push(b.submission("fail"))
            await asyncio.sleep(60)
            # They went at the same time; the one that is acknowledged waits for the other.
            if missing == "next attempt":
                assert b.log.kinds() == ["Started", "Failed", "RetryScheduled"]
            else:
                assert len(b.log.waiting()) == 1
            assert b.progress() == (0, ())

    virtually(scenario())


@pytest.mark.parametrize("error", [DeliveryFailed("away"), DeliveryUnknown("who knows")])
def test_while_the_log_is_away_a_retry_waits_here_and_goes_straight_back_when_it_is_overdue(
    bench, virtually, doomed, error
) -> None:
    async def scenario() -> None:
        async with bench(doomed.registry) as b:
            b.assign(0)
            b.push(b.submission("fail"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert b.log.kinds() == ["Started"]
            b.log.verdict = lambda record: error
            await asyncio.sleep(60)
            assert len(doomed.seen) == 1
            assert b.progress() == (0, ())
            before = len(b.log.records)
            b.log.verdict = lambda record: None
            await asyncio.sleep(10)
            added = b.log.records[before:]
            (again,) = [record for record in added if record.topic == "tasks.normal"]
            assert again.headers[HEADER_ATTEMPT] == b"2"
            assert HEADER_DUE not in again.headers
            assert b.committed().offset == 1
            assert len(doomed.seen) == 1

    virtually(scenario())


def test_a_move_in_the_middle_of_a_retry_leaves_the_attempt_to_the_next_owner(
    bench, virtually, doomed
) -> None:
    async def scenario() -> None:
        async with bench(doomed.registry, grace_seconds=5) as b:
            b.assign(0)
            b.log.verdict = lambda record: "hang" if record.topic.startswith("tasks.delay.") else None
            task = b.submission("fail")
            b.push(task)
            await asyncio.sleep(1)
            commits = await b.intakes[task.priority].revoke(b.name(0))
            assert commits[b.name(0)].offset == 0
            b.log.verdict = lambda record: None
            b.assign(0)
            b.push(task)
            await asyncio.sleep(2)
            # It is not taken for a copy of what was handed back.
            assert [ctx.attempt for ctx in doomed.seen] == [1, 1]
            assert len(b.log.waiting()) == 1
            assert b.committed().offset == 1

    virtually(scenario())


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (Retry(after=42), 42.0),
        (Retry(after=timedelta(minutes=2), reason="busy"), 120.0),
        (Retry(after=0), 0.0),
    ],
)
def test_what_a_handler_asks_for_is_kept_to(bench, virtually, doomed, error, seconds) -> None:
    doomed.error = error

    async def scenario() -> None:
        async with bench(doomed.registry) as b:
            b.assign(0)
            b.push(b.submission("fail"), b.submission("fail", max_retries=0))
            await asyncio.sleep(2)
            (scheduled,) = of(b, RetryScheduled)
            failed = next(event for event in of(b, Failed) if event.task_id == scheduled.task_id)
            assert scheduled.due - failed.at == pytest.approx(seconds * 1_000, abs=2)
            assert failed.message == (error.reason or "the handler asked for another attempt")
            # Without a retry left it is a dead letter like any other.
            assert [letter.reason for letter in letters(b)] == ["exhausted"]
            if seconds == 0:
                assert [record.topic for record in b.log.records].count("tasks.normal") == 1

    virtually(scenario())


def test_a_permanent_failure_is_buried_at_once(bench, virtually, doomed) -> None:
    doomed.error = Permanent("no such airport")

    async def scenario() -> None:
        async with bench(doomed.registry) as b:
            b.assign(0)
            b.push(b.submission("fail", max_retries=50))
            await asyncio.sleep(2)
            assert b.log.kinds() == ["Started", "Failed", "DeadLettered"]
            (failed,), (letter,) = of(b, Failed), letters(b)
            assert (failed.retryable, failed.category) == (False, ErrorCategory.PERMANENT)
            assert (letter.reason, letter.category, letter.message) == (
                "permanent",
                ErrorCategory.PERMANENT,
                "no such airport",
            )

    virtually(scenario())


def test_a_task_type_has_its_own_policy_and_classifier(bench, virtually) -> None:
    registry = Registry()

    def judge(error: BaseException) -> ErrorCategory | None:
        return ErrorCategory.PERMANENT if isinstance(error, KeyError) else None

    @registry.task("own", retry=RetryPolicy(base_seconds=100, multiplier=1), classify=judge)
    async def own(payload: str) -> None:
        raise KeyError(payload) if payload == "key" else ValueError(payload)

    async def scenario() -> None:
        async with bench(registry, retry_base_seconds=1) as b:
            b.assign(0)
            b.push(b.submission("own", "key"), b.submission("own", "value"))
            await asyncio.sleep(2)
            assert [letter.reason for letter in letters(b)] == ["permanent"]
            (scheduled,) = of(b, RetryScheduled)
            assert 50_000 <= scheduled.due - scheduled.at <= 150_001

    virtually(scenario())


def test_server_errors_in_a_row_are_limited_through_the_trail(bench, virtually) -> None:
    registry = Registry()

    @registry.task(
        "server",
        retry=RetryPolicy(base_seconds=1, multiplier=1, server_max_retries=2),
        classify=lambda error: ErrorCategory.SERVER,
    )
    async def server(payload: Any) -> None:
        raise ValueError("502")

    async def scenario() -> None:
        async with bench(registry) as b:
            b.assign(0)
            b.push(b.submission("server", max_retries=50))
            for _ in range(2):
                await asyncio.sleep(1)
                await b.forward()
            await asyncio.sleep(5)
            assert [event.attempt for event in of(b, Started)] == [1, 2, 3]
            assert [letter.reason for letter in letters(b)] == ["exhausted"]

    virtually(scenario())


def test_the_time_limit_is_a_timeout_and_a_handlers_own_time_out_is_transient(
    bench, virtually, doomed
) -> None:
    doomed.error = TimeoutError("what it called")

    async def scenario() -> None:
        async with bench(doomed.registry) as b:
            b.assign(0)
            b.push(b.submission("sleep", 100, timeout_ms=1_000), b.submission("fail"))
            await asyncio.sleep(5)
            assert {event.category: event.error_class for event in of(b, Failed)} == {
                ErrorCategory.TIMEOUT: "TimeoutError",
                ErrorCategory.TRANSIENT: "TimeoutError",
            }
            assert b.log.kinds().count("RetryScheduled") == 2

    virtually(scenario())


def test_a_handler_knows_its_soft_limit_unless_its_hard_one_comes_first(bench, virtually) -> None:
    registry = Registry()
    seen: list[TaskContext] = []

    @registry.task("soft", timeout=60, soft_timeout=20)
    async def soft(payload: Any, ctx: TaskContext) -> None:
        seen.append(ctx)
        raise SoftTimeout

    async def scenario() -> None:
        async with bench(registry) as b:
            b.assign(0)
            b.push(b.submission("soft"))
            b.push(b.submission("soft", timeout_ms=20_000))
            await asyncio.sleep(5)
            first, second = seen
            assert first.soft_deadline_ms == first.deadline_ms - 40_000
            assert second.soft_deadline_ms is None
            assert {event.category for event in of(b, Failed)} == {ErrorCategory.TIMEOUT}

    virtually(scenario())


def test_headers_that_are_rubbish_neither_stop_a_task_nor_the_worker(bench, virtually, doomed) -> None:
    async def scenario() -> None:
        async with bench(doomed.registry) as b:
            b.assign(0)
            value = b.codec.encode(b.submission("fail"))
            b.receive([b.record(value, taskline_attempt=b"2", taskline_trail=b"\xff" * 3_000)])
            await asyncio.sleep(2)
            (waiting,) = b.log.waiting()
            assert [error.attempt for error in decode_trail(waiting.headers[HEADER_TRAIL]).errors] == [2]
            for bad in (b"", b"-1", b"x", b"9" * 5_000):
                b.receive([b.record(value, taskline_deaths=bad), b.record(value, taskline_attempt=bad)])
            b.receive([b.record(value, taskline_attempt=b"0")])
            await asyncio.sleep(2)
            causes = [record.headers[HEADER_CAUSE].decode() for record in b.log.dlq()]
            assert [HEADER_DEATHS in cause for cause in causes] == [True, False] * 4 + [False]
            assert [HEADER_ATTEMPT in cause for cause in causes] == [False, True] * 4 + [True]
            assert len(doomed.seen) == 1
            assert b.committed().offset == 10

    virtually(scenario())


# ---- expiry ------------------------------------------------------------------------------------------------------


def test_a_task_that_comes_too_late_for_its_slot_expires_without_being_started(
    bench, virtually, doomed
) -> None:
    async def scenario() -> None:
        async with bench(doomed.registry, concurrency=1) as b:
            b.assign(0)
            now = b.clock.now_ms()
            late = b.submission("sleep", 0, start_by=now + 9_000)
            in_time = b.submission("sleep", 0, start_by=now + 11_000)
            # Both wait for the one slot while it is taken.
            b.push(b.submission("sleep", 10), late, in_time)
            await asyncio.sleep(12)
            (expired,) = of(b, Expired)
            assert (expired.task_id, expired.attempt) == (late.task_id, 1)
            assert b.log.kinds(late.task_id) == ["Expired"]
            assert b.log.kinds(in_time.task_id) == ["Started", "Succeeded"]
            assert b.log.dlq() == []
            assert b.committed().offset == 3

    virtually(scenario())


def test_an_expiry_is_acknowledged_before_its_record_is_done(bench, virtually, doomed) -> None:
    async def scenario() -> None:
        async with bench(doomed.registry) as b:
            b.assign(0)
            b.log.verdict = lambda record: DeliveryFailed("away")
            b.push(b.submission("sleep", 0, start_by=b.clock.now_ms() - 1))
            await asyncio.sleep(60)
            assert b.progress() == (0, ())
            b.log.verdict = lambda record: None
            await asyncio.sleep(10)
            assert b.log.kinds() == ["Expired"]
            assert b.committed().offset == 1

    virtually(scenario())


def test_a_retry_that_would_come_too_late_expires_the_task(bench, virtually, doomed) -> None:
    async def scenario() -> None:
        async with bench(doomed.registry) as b:
            b.assign(0)
            b.push(b.submission("fail", start_by=b.clock.now_ms() + 4_000))
            await asyncio.sleep(2)
            assert b.log.kinds() == ["Started", "Failed", "Expired"]
            assert b.log.waiting() == []
            assert b.log.dlq() == []
            assert b.committed().offset == 1

    virtually(scenario())


# ---- deaths ------------------------------------------------------------------------------------------------------


class Processes:
    """An executor of processes that die as `fate` says: None (lives), or whether the handler was alone."""

    interruptible = True
    remote = True

    def __init__(self, fate: Callable[[TaskContext], bool | None], capacity: int | None = None) -> None:
        self.fate = fate
        self.capacity = capacity
        self.ran: list[TaskContext] = []
        self.running = 0
        self.most = 0

    async def run(self, task: Task, payload: Any, ctx: TaskContext) -> Any:
        self.ran.append(ctx)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.5)
        finally:
            self.running -= 1
        alone = self.fate(ctx)
        if alone is not None:
            raise ChildDied("killed by signal 11", alone=alone)
        return EncodedResult(b'"lived"')

    def close(self) -> None: ...


@pytest.fixture
def plain() -> Registry:
    registry = Registry()

    @registry.task("plain")
    def handler(payload: Any) -> None:
        raise AssertionError("it runs in another process")

    return registry


def test_a_task_that_kills_its_process_each_time_is_poison_whatever_its_retries(
    bench, virtually, plain
) -> None:
    async def scenario() -> None:
        usual, alone = Processes(lambda ctx: True), Processes(lambda ctx: True)
        async with bench(plain, functions=usual, alone=alone) as b:
            b.assign(0)
            b.push(b.submission("plain", max_retries=50))
            await asyncio.sleep(2)
            first = await b.forward()
            assert (first.headers[HEADER_ATTEMPT], first.headers[HEADER_DEATHS]) == (b"2", b"1")
            await asyncio.sleep(2)
            second = await b.forward()
            assert (second.headers[HEADER_ATTEMPT], second.headers[HEADER_DEATHS]) == (b"3", b"2")
            await asyncio.sleep(2)
            assert b.log.kinds() == ["Started", "Crashed", "RetryScheduled"] * 2 + [
                "Started",
                "Crashed",
                "DeadLettered",
            ]
            crashes, starts = of(b, Crashed), of(b, Started)
            assert [(crash.execution, crash.attempt) for crash in crashes] == [
                (start.execution, start.attempt) for start in starts
            ]
            assert all(crash.alone and crash.cause == "killed by signal 11" for crash in crashes)
            (letter,) = letters(b)
            assert (letter.reason, letter.attempt, letter.category) == ("poison", 3, ErrorCategory.CRASH)
            assert [error.category for error in letter.errors] == [ErrorCategory.CRASH] * 3
            assert (letter.error_class, letter.message) == ("ProcessDied", "killed by signal 11")
            # After the first death it is a suspect.
            assert [ctx.attempt for ctx in usual.ran] == [1]
            assert [ctx.attempt for ctx in alone.ran] == [2, 3]
            assert b.committed().offset == 3

    virtually(scenario())


def test_bystanders_of_a_death_spend_no_attempt_and_are_never_convicted(bench, virtually, plain) -> None:
    async def scenario() -> None:
        culprits: set[Any] = set()
        usual = Processes(lambda ctx: False)
        alone = Processes(lambda ctx: True if ctx.task_id in culprits else None, capacity=1)
        async with bench(plain, functions=usual, alone=alone) as b:
            b.assign(0)
            tasks = [b.submission("plain", number, max_retries=0) for number in range(5)]
            culprits.add(tasks[2].task_id)
            b.push(*tasks)
            await asyncio.sleep(0.7)
            # Nothing is done that has not ended.
            assert b.log.kinds() == ["Started"] * 5 + ["Crashed"] * 5 + ["Started"]
            await asyncio.sleep(5)
            for task in tasks:
                kinds = b.log.kinds(task.task_id)
                if task.task_id in culprits:
                    assert kinds == ["Started", "Crashed", "Started", "Crashed", "DeadLettered"]
                else:
                    assert kinds == ["Started", "Crashed", "Started", "Succeeded"]
                own = [event for event in b.log.events() if event.task_id == task.task_id]
                assert {event.attempt for event in own} == {1}
                first, second = [event.execution for event in own if isinstance(event, Started)]
                assert first != second
                assert own[1].execution == first
                assert not own[1].alone
            assert alone.most == 1
            assert [letter.reason for letter in letters(b)] == ["poison"]
            assert b.log.waiting() == []
            assert b.committed().offset == 5

    virtually(scenario())


def test_a_bystander_is_not_done_before_it_has_run_again_and_goes_with_its_partition(
    bench, virtually, plain
) -> None:
    async def scenario() -> None:
        usual = Processes(lambda ctx: False)
        alone = Processes(lambda ctx: None, capacity=1)
        async with bench(plain, functions=usual, alone=alone, concurrency=2, grace_seconds=5) as b:
            b.assign(0)
            b.push(b.submission("plain", 1), b.submission("plain", 2))
            await asyncio.sleep(0.75)
            assert len(alone.ran) == 1
            assert b.progress() == (0, ())
            # What waits for the one process is handed back with its partition; what runs in it may finish.
            commits = await b.intakes[b.submission("plain").priority].revoke(b.name(0))
            commit = commits[b.name(0)]
            assert (commit.offset, decode_holes(commit.offset, commit.metadata)) in [(1, ()), (0, ((1, 2),))]
            await asyncio.sleep(5)
            assert len(alone.ran) == 1
            assert b.log.kinds().count("Succeeded") == 1

    virtually(scenario())


def test_a_bystander_of_a_death_during_a_move_is_left_to_the_next_owner(bench, virtually, plain) -> None:
    async def scenario() -> None:
        usual, alone = Processes(lambda ctx: False), Processes(lambda ctx: None)
        async with bench(plain, functions=usual, alone=alone, grace_seconds=5) as b:
            b.assign(0, 1)
            task = b.submission("plain")
            b.push(task)
            await asyncio.sleep(0.2)
            commits = await b.intakes[task.priority].revoke(b.name(0))
            assert commits[b.name(0)].offset == 0
            await asyncio.sleep(5)
            assert b.log.kinds() == ["Started", "Crashed"]
            assert alone.ran == []
            # A copy of it that is ours is free to run.
            b.push(task, partition=1)
            await asyncio.sleep(0.2)
            assert len(usual.ran) == 2

    virtually(scenario())


def test_a_suspect_whose_executor_does_not_run_it_alone_can_not_go_round_for_ever(
    bench, virtually, plain
) -> None:
    async def scenario() -> None:
        usual = Processes(lambda ctx: False)
        async with bench(plain, functions=usual) as b:
            b.assign(0)
            b.push(b.submission("plain", max_retries=0))
            await asyncio.sleep(60)
            assert len(usual.ran) == 2
            assert [letter.reason for letter in letters(b)] == ["poison"]

    virtually(scenario())


def test_a_death_at_the_time_limit_is_a_timeout_and_nobodys_death(bench, virtually, plain) -> None:
    class Killed(Processes):
        async def run(self, task: Task, payload: Any, ctx: TaskContext) -> Any:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                raise ChildDied("killed by signal 9", alone=True) from None

    async def scenario() -> None:
        async with bench(plain, functions=Killed(lambda ctx: None)) as b:
            b.assign(0)
            b.push(b.submission("plain", timeout_ms=1_000))
            await asyncio.sleep(3)
            assert b.log.kinds() == ["Started", "Failed", "RetryScheduled"]
            assert of(b, Failed)[0].category is ErrorCategory.TIMEOUT
            (waiting,) = b.log.waiting()
            assert HEADER_DEATHS not in waiting.headers

    virtually(scenario())


def test_what_another_process_says_of_a_failure_is_believed(bench, virtually, plain) -> None:
    class Remote(Processes):
        async def run(self, task: Task, payload: Any, ctx: TaskContext) -> Any:
            info = ErrorInfo(error_class="shop.Gone", message="gone", traceback="there")
            raise HandlerFailed(Failure(info=info, category=ErrorCategory.PERMANENT, retryable=False))

    async def scenario() -> None:
        async with bench(plain, functions=Remote(lambda ctx: None)) as b:
            b.assign(0)
            b.push(b.submission("plain"))
            await asyncio.sleep(2)
            (letter,) = letters(b)
            assert (letter.reason, letter.error_class, letter.message, letter.traceback) == (
                "permanent",
                "shop.Gone",
                "gone",
                "there",
            )

    virtually(scenario())


# ---- copies ------------------------------------------------------------------------------------------------------


def again(b: Any, record: InRecord, partition: int = 0) -> InRecord:
    """The same record at another place."""
    copy = b.record(record.value, partition)
    return dataclasses.replace(copy, headers=record.headers)


def test_a_copy_of_what_has_ended_is_done_without_being_run(bench, virtually, doomed) -> None:
    async def scenario() -> None:
        async with bench(doomed.registry) as b:
            b.assign(0, 1)
            record = b.record(b.codec.encode(b.submission("sleep", 0)))
            failing = b.record(b.codec.encode(b.submission("fail")))
            b.receive([record, failing])
            await asyncio.sleep(1)
            b.receive([again(b, record), again(b, record, 1), again(b, failing)])
            await asyncio.sleep(1)
            assert len(doomed.seen) == 2
            assert b.log.kinds().count("Started") == 2
            assert (b.committed(0).offset, b.committed(1).offset) == (4, 1)
            # Another attempt of it is no copy.
            await b.forward()
            await asyncio.sleep(1)
            assert [ctx.attempt for ctx in doomed.seen] == [1, 1, 2]

    virtually(scenario())


def test_a_copy_of_what_is_in_flight_waits_for_its_outcome(bench, virtually, doomed) -> None:
    async def scenario() -> None:
        async with bench(doomed.registry) as b:
            b.assign(0, 1)
            record = b.record(b.codec.encode(b.submission("sleep", 10)))
            b.receive([record])
            b.receive([again(b, record, 1)])
            await asyncio.sleep(5)
            assert len(doomed.seen) == 1
            assert b.committed(1) is None
            await asyncio.sleep(7)
            assert len(doomed.seen) == 1
            assert (b.committed(0).offset, b.committed(1).offset) == (1, 1)

    virtually(scenario())


def test_a_copy_of_what_is_handed_back_runs_in_its_place(bench, virtually, doomed) -> None:
    async def scenario() -> None:
        async with bench(doomed.registry, grace_seconds=1) as b:
            b.assign(0, 1)
            task = b.submission("sleep", 10)
            record = b.record(b.codec.encode(task))
            b.receive([record])
            b.receive([again(b, record, 1)])
            await asyncio.sleep(2)
            await b.intakes[task.priority].revoke(b.name(0))
            await asyncio.sleep(12)
            assert b.log.kinds() == ["Started", "Released", "Started", "Succeeded"]
            assert b.committed(0).offset == 0
            assert b.committed(1).offset == 1

    virtually(scenario())


@pytest.mark.parametrize("way", ["revoke", "lose"])
def test_what_ended_under_an_earlier_assignment_is_not_remembered(bench, virtually, doomed, way) -> None:
    async def scenario() -> None:
        async with bench(doomed.registry) as b:
            b.assign(0)
            task = b.submission("sleep", 0)
            b.push(task)
            await asyncio.sleep(1)
            intake = b.intakes[task.priority]
            if way == "revoke":
                await intake.revoke(b.name(0))
            else:
                intake.lose(b.name(0))
            b.assign(0)
            b.push(task)
            await asyncio.sleep(1)
            assert len(doomed.seen) == 2

    virtually(scenario())


def test_a_copy_that_waits_goes_with_its_partition(bench, virtually, doomed) -> None:
    async def scenario() -> None:
        async with bench(doomed.registry, prefetch=1) as b:
            b.assign(0, 1)
            task = b.submission("sleep", 10)
            record = b.record(b.codec.encode(task))
            b.receive([record])
            await asyncio.sleep(1)
            b.receive([again(b, record, 1)])
            intake = b.intakes[task.priority]
            await asyncio.sleep(1)
            assert intake.paused
            commits = await intake.revoke(b.name(1))
            assert commits[b.name(1)].offset == 0
            await asyncio.sleep(0.1)
            assert not intake.paused
            await asyncio.sleep(12)
            assert b.committed(0).offset == 1
            assert len(doomed.seen) == 1

    virtually(scenario())


# ---- all at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_failures_faults_and_moves_end_every_task_once_within_its_attempts(
    bench, virtually, seed, faults
) -> None:
    rng = random.Random(seed)
    registry = Registry()
    runs: Counter[tuple[Any, int]] = Counter()
    deadly: set[Any] = set()

    @registry.task("work", retry=RetryPolicy(base_seconds=0.5, multiplier=2, cap_seconds=4))
    def work(payload: Any) -> None:
        raise AssertionError("it runs in another process")

    class Pool(Processes):
        """Processes that run several handlers at once, and die of the deadly ones with all that runs in them."""

        def __init__(self, capacity: int) -> None:
            super().__init__(lambda ctx: None, capacity)
            self.deaths: dict[Any, asyncio.Event] = {}

        async def run(self, task: Task, payload: Any, ctx: TaskContext) -> Any:
            death = self.deaths.setdefault(ctx.task_id, asyncio.Event())
            try:
                if ctx.task_id in deadly:
                    for other in self.deaths.values():
                        other.set()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(death.wait(), rng.choice([0.001, 0.05, 1, 4]))
                if death.is_set():
                    raise ChildDied("killed by signal 9", alone=self.capacity == 1)
            finally:
                self.deaths.pop(ctx.task_id, None)
            runs[ctx.task_id, ctx.attempt] += 1
            if rng.random() < 0.4:
                raise rng.choice([ValueError("no"), ConnectionError("no"), Retry(after=0.3), Permanent("no")])
            return EncodedResult(None)

    async def scenario() -> None:
        async with bench(
            registry, Pool(6), Pool(1), concurrency=8, prefetch=16, window=64, grace_seconds=1.5005
        ) as b:
            if faults:
                b.log.verdict = lambda record: (
                    DeliveryUnknown("lost ack")
                    if rng.random() < 0.05
                    else DeliveryFailed("no")
                    if rng.random() < 0.05
                    else None
                )
            else:
                # So that no outcome is on its way when the grace ends.
                b.log.ack_seconds = 0
            intake = b.intakes[Priority.NORMAL]
            tasks = [b.submission("work", number, max_retries=rng.randrange(4)) for number in range(80)]
            deadly.update(task.task_id for task in rng.sample(tasks, 4))
            # Partition 0 of the dispatch topic; every seventh record stands in it twice.
            topic = [(b.codec.encode(task), {}) for task in tasks]
            topic[:0] = topic[::7]
            seen, offset, metadata = 0, 0, ""
            waiting: list[OutRecord] = []

            def deliver_due() -> bool:
                """As the delay role, and for what goes straight back, the broker; False: nothing is on its way."""
                nonlocal seen
                waiting.extend(
                    record
                    for record in b.log.records[seen:]
                    if record.topic.startswith(("tasks.delay.", "tasks.normal"))
                )
                seen = len(b.log.records)
                for record in tuple(waiting):
                    headers = dict(record.headers)
                    if int(headers.get(HEADER_DUE, b"0")) <= b.clock.now_ms():
                        headers.pop(HEADER_TARGET, None)
                        topic.append((record.value, headers))
                        waiting.remove(record)
                return bool(waiting)

            while deliver_due() or offset < len(topic):
                b.assign(0, offset=offset, metadata=metadata)
                read = offset
                for _ in range(rng.randrange(5, 60)):
                    deliver_due()
                    if not intake.paused and not intake.held and read < len(topic):
                        batch = topic[read : read + rng.randrange(1, 20)]
                        b.receive(
                            [
                                dataclasses.replace(b.record(value), headers=headers)
                                for value, headers in batch
                            ]
                        )
                        read += len(batch)
                    await asyncio.sleep(rng.choice([0, 0.01, 0.3]))
                if faults and rng.random() < 0.3:
                    intake.lose(b.name(0))
                else:
                    await intake.revoke(b.name(0))
                commit = b.committed()
                if commit is not None:
                    offset, metadata = commit.offset, commit.metadata
        buried, events = {letter.task_id: letter for letter in letters(b)}, b.log.events()
        for task in tasks:
            own = [event for event in events if event.task_id == task.task_id]
            ends = {type(event) for event in own if type(event).ends}
            assert ends
            assert {event.attempt for event in own} <= set(range(1, task.max_retries + 2))
            assert (DeadLettered in ends) == (task.task_id in buried)
            if task.task_id in deadly:
                assert buried[task.task_id].reason == "poison"
            elif task.task_id in buried:
                assert buried[task.task_id].reason in ("exhausted", "permanent")
            if DeadLettered not in ends or task.task_id not in deadly:
                crashes = [event for event in own if isinstance(event, Crashed)]
                assert not any(crash.alone for crash in crashes)
        # What is handed over in good order is run to its end once, by as many owners as it has.
        if not faults:
            copies = Counter(
                (b.codec.decode(value, TaskSubmitted).task_id, int(headers.get(HEADER_ATTEMPT, b"1")))
                for value, headers in topic
            )
            assert runs <= copies
            # Of copies that an owner reads one after the other, one is run.
            assert runs.total() < copies.total()

    virtually(scenario())
