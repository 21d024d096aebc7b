"""Plain functions on threads, alone and under the engine. Real threads, so real (short) time."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from taskline.errors import InvalidTaskType, SoftTimeout
from taskline.schemas.events import Failed, Priority, Succeeded
from taskline.schemas.ids import new_task_id
from taskline.testing.clock import VirtualClock
from taskline.workers import Registry, TaskContext, task
from taskline.workers.choice import executor_for
from taskline.workers.executor import HandlerAbandoned, InlineExecutor, ThreadExecutor
from taskline.workers.ports import WorkerPorts
from taskline.workers.progress import LoopLine
from taskline.workers.slots import Slots


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - threads and the engine set no event for a test
            await asyncio.sleep(0.01)


@pytest.fixture
def ctx() -> TaskContext:
    task_id = new_task_id(1_900_000_000_000)
    return TaskContext(
        task_id=task_id,
        root_id=task_id,
        task_type="t",
        attempt=1,
        tenant="acme",
        queue="default",
        priority=Priority.NORMAL,
        deadline_ms=0,
    )


def run(handler: Any, ctx: TaskContext, executor: Any = None) -> Any:
    made = Registry().task("t")(handler)

    async def scenario() -> Any:
        used = executor or ThreadExecutor(2)
        try:
            return await used.run(made, "payload", ctx)
        finally:
            used.close()

    return asyncio.run(scenario())


def test_a_plain_function_runs_on_another_thread_and_sees_the_context_variables(ctx: TaskContext) -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    seen = []

    def handler(payload: Any, ctx: TaskContext) -> str:
        seen.append((threading.current_thread(), variable.get(), ctx.attempt))
        return f"did {payload}"

    made = Registry().task("t")(handler)

    async def scenario() -> str:
        variable.set("set")
        executor = ThreadExecutor(1)
        result = await executor.run(made, "payload", ctx)
        executor.close()
        return result

    assert asyncio.run(scenario()) == "did payload"
    assert seen[0][0] is not threading.main_thread()
    assert seen[0][1:] == ("set", 1)


@pytest.mark.parametrize("error", [ValueError("x"), StopIteration("x"), SystemExit(1), KeyboardInterrupt()])
def test_whatever_it_raises_arrives(ctx: TaskContext, error: BaseException) -> None:
    def handler(payload: Any) -> None:
        raise error

    made = Registry().task("t")(handler)

    async def scenario() -> BaseException | None:
        executor = ThreadExecutor(1)

        async def guarded() -> BaseException | None:
            try:
                await executor.run(made, 1, ctx)
            except BaseException as raised:
                # A coroutine can't raise StopIteration; Python wraps it.
                return raised if raised is error else raised.__cause__
            return None

        raised = await guarded()
        # The thread goes on to serve.
        again = await guarded()
        executor.close()
        return raised if raised is again else None

    assert asyncio.run(scenario()) is error


def test_a_plain_function_that_returns_a_coroutine_is_told_to_be_async(ctx: TaskContext) -> None:
    async def inner() -> None: ...

    with pytest.raises(TypeError, match="async def"):
        run(lambda payload: inner(), ctx)


def test_no_more_threads_than_allowed_and_no_more_than_needed(ctx: TaskContext) -> None:
    names: set[str] = set()
    both = threading.Barrier(2)

    def handler(payload: Any) -> None:
        names.add(threading.current_thread().name)
        both.wait(10)

    made = Registry().task("t")(handler)

    async def scenario() -> None:
        executor = ThreadExecutor(2)
        await asyncio.gather(*(executor.run(made, 1, ctx) for _ in range(6)))
        executor.close()

    asyncio.run(scenario())
    assert len(names) == 2


def test_a_cancellation_waits_for_the_handler_and_closing_does_not(ctx: TaskContext) -> None:
    go_on = threading.Event()

    def handler(payload: Any) -> None:
        assert go_on.wait(10)

    made = Registry().task("t")(handler)

    async def scenario() -> None:
        executor = ThreadExecutor(2)
        first = asyncio.ensure_future(executor.run(made, 1, ctx))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.01)
        assert not first.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        go_on.clear()
        second = asyncio.ensure_future(executor.run(made, 1, ctx))
        await asyncio.sleep(0.01)
        executor.close()
        with pytest.raises(HandlerAbandoned):
            await second
        go_on.set()

    asyncio.run(scenario())


def test_inline_runs_both_kinds(ctx: TaskContext) -> None:
    async def coroutine(payload: Any) -> str:
        return f"{payload} async"

    assert run(coroutine, ctx, InlineExecutor()) == "payload async"
    assert run(lambda payload: f"{payload} plain", ctx, InlineExecutor()) == "payload plain"


def test_a_plain_function_past_its_limit_is_failed_but_keeps_its_slot_until_it_ends(bench) -> None:
    registry = Registry()
    go_on = threading.Event()
    begun: list[str] = []

    @registry.task("stuck", timeout=0.05)
    def stuck(payload: Any) -> str:
        begun.append("stuck")
        assert go_on.wait(10)
        return "too late"

    @registry.task("quick")
    async def quick(payload: Any) -> None:
        begun.append("quick")

    async def scenario() -> None:
        async with bench(registry, ThreadExecutor(4), concurrency=1, commit_interval_seconds=0.01) as b:
            b.assign(0)
            b.push(b.submission("stuck", max_retries=0), b.submission("quick"))
            await until(lambda: "DeadLettered" in b.log.kinds())
            failed = next(event for event in b.log.events() if isinstance(event, Failed))
            assert failed.error_class == "TimeoutError"
            await until(lambda: b.committed() is not None and b.committed().offset == 1)
            assert begun == ["stuck"]
            go_on.set()
            await until(lambda: b.committed().offset == 2)
            assert begun == ["stuck", "quick"]
            assert not any(isinstance(event, Succeeded) and event.result for event in b.log.events())

    asyncio.run(scenario())


def test_plain_functions_beyond_the_threads_wait_without_a_slot_or_a_start(bench) -> None:
    registry = Registry()
    go_on = threading.Event()
    ran: list[Any] = []

    @registry.task("plain")
    def plain(payload: Any) -> None:
        assert go_on.wait(10)
        ran.append(payload)

    @registry.task("async")
    async def coroutine(payload: Any) -> None:
        ran.append(payload)

    async def scenario() -> None:
        async with bench(registry, ThreadExecutor(2), concurrency=8, commit_interval_seconds=0.01) as b:
            b.assign(0)
            b.push(*(b.submission("plain", n) for n in range(5)), b.submission("async", "a"))
            await until(lambda: "a" in ran)
            assert b.log.kinds().count("Started") == 3
            go_on.set()
            await until(lambda: b.committed() is not None and b.committed().offset == 6)
            assert sorted(map(str, ran)) == ["0", "1", "2", "3", "4", "a"]

    asyncio.run(scenario())


def test_a_stop_does_not_wait_for_a_thread_beyond_the_grace(bench) -> None:
    registry = Registry()
    go_on = threading.Event()

    @registry.task("stuck")
    def stuck(payload: Any) -> None:
        go_on.wait(30)

    async def scenario() -> None:
        async with bench(registry, ThreadExecutor(1), grace_seconds=0.05) as b:
            b.assign(0)
            b.push(b.submission("stuck"))
            await until(lambda: "Started" in b.log.kinds())
        assert b.log.kinds() == ["Started", "Released"]
        assert b.committed().offset == 0

    asyncio.run(asyncio.wait_for(scenario(), 20))
    go_on.set()


def test_slots_are_counted_and_giving_back_too_many_is_loud() -> None:
    slots, executor = Slots(2), ThreadExecutor(1)
    inline = InlineExecutor()
    slots.take(executor)
    assert not slots.room(executor)
    assert slots.room(inline)
    slots.take(inline)
    assert (slots.free, slots.used) == (False, 2)
    slots.give(executor)
    assert slots.free
    with pytest.raises(ValueError, match="nobody held"):
        slots.give(executor)


def test_inline_keeps_the_soft_limit_of_a_coroutine_by_the_clock_it_is_given(virtually, ctx) -> None:
    async def handler(payload: Any) -> str:
        try:
            await asyncio.sleep(payload)
        except SoftTimeout:
            return "in time"
        return "no limit"

    made = Registry().task("t")(handler)

    async def scenario() -> None:
        clock = VirtualClock(asyncio.get_running_loop())
        executor = InlineExecutor(clock)
        limited = replace(ctx, soft_deadline_ms=clock.now_ms() + 1_000)
        assert await executor.run(made, 10, limited) == "in time"
        assert await executor.run(made, 10, ctx) == "no limit"

    virtually(scenario())


@pytest.mark.parametrize(
    ("is_async", "isolation", "suspect", "expected"),
    [
        (True, None, False, "coroutines"),
        (True, "inline", False, "inline"),
        (True, "child", False, "loops"),
        (True, "alone", False, "alone"),
        (False, None, False, "functions"),
        (False, "child", False, "functions"),
        (False, "thread", False, "threads"),
        (True, None, True, "alone"),
        (True, "inline", True, "alone"),
        (False, "thread", True, "alone"),
    ],
)
def test_a_task_runs_where_it_asks_to_and_a_suspect_alone(
    is_async: bool, isolation: Any, suspect: bool, expected: str
) -> None:
    async def coroutine(payload: Any) -> None: ...

    def plain(payload: Any) -> None: ...

    made = Registry().task("t", isolation=isolation)(coroutine if is_async else plain)
    names = ("coroutines", "functions", "alone", "loops", "inline", "threads")
    executors = {name: InlineExecutor() for name in names}
    ports = ports_of(**executors)
    assert executor_for(made, ports, suspect=suspect) is executors[expected]
    assert set(map(id, ports.executors)) == set(map(id, executors.values()))
    # Where there is only one place for each kind, it is that.
    few = ports_of(coroutines=executors["coroutines"], functions=executors["functions"])
    usual = executors["coroutines" if is_async else "functions"]
    assert executor_for(made, few, suspect=suspect) is usual
    assert len(few.executors) == 2


def ports_of(**executors: Any) -> WorkerPorts:
    unused: Any = None
    return WorkerPorts(
        intakes={}, log=unused, lifecycle=unused, codec=unused, types=unused, clock=unused, **executors
    )


@pytest.mark.parametrize("isolation", ["thread", "somewhere"])
def test_a_coroutine_cannot_ask_for_a_place_where_it_does_not_run(isolation: Any) -> None:
    async def coroutine(payload: Any) -> None: ...

    with pytest.raises(InvalidTaskType, match=r"inline, child, alone or None"):
        Registry().task("t", isolation=isolation)(coroutine)
    with pytest.raises(InvalidTaskType, match=r"inline, child, alone or None"):
        task("t", isolation=isolation)(coroutine)


@pytest.mark.parametrize("isolation", ["inline", "alone"])
def test_a_plain_function_cannot_ask_for_a_place_where_it_does_not_run(isolation: Any) -> None:
    with pytest.raises(InvalidTaskType, match=r"child, thread or None"):
        Registry().task("t", isolation=isolation)(lambda payload: None)


def test_a_thread_says_how_far_it_is_and_hears_that_it_is_to_stop(ctx: TaskContext) -> None:
    heard: list[float | None] = []

    def handler(payload: Any, ctx: TaskContext) -> str:
        ctx.progress(0.5)
        while not ctx.should_stop:
            time.sleep(0.001)
        return "stopped"

    made = Registry().task("t")(handler)

    async def scenario() -> str:
        line = LoopLine(lambda fraction, _: heard.append(fraction), pace=lambda _: 0.0, now_ms=lambda: 0)
        executor = ThreadExecutor(1)
        running = asyncio.ensure_future(executor.run(made, None, replace(ctx, line=line, deadline_ms=1)))
        await asyncio.sleep(0.05)
        line.stop()
        stopped = await running
        executor.close()
        return str(stopped)

    assert asyncio.run(scenario()) == "stopped"
    assert heard == [0.5]
