"""Middleware around handlers: its order, what it may do, and where it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from child_kit import Children, context

from taskline import HandlerOutcome, Middleware, Registry, TaskContext
from taskline.errors import InvalidRegistry
from taskline.testing import InMemoryTaskline
from taskline.workers.executor import InlineExecutor, ThreadExecutor

seen: list[str] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    seen.clear()


class Notes(Middleware):
    """Writes down what it sees."""

    def __init__(self, name: str) -> None:
        self.name = name

    def before(self, ctx: TaskContext) -> None:
        seen.append(f"{self.name} before {ctx.task_type}")

    def after(self, ctx: TaskContext, outcome: HandlerOutcome) -> None:
        end = outcome.result if outcome.ok else type(outcome.error).__name__
        seen.append(f"{self.name} after: {end}")


class Around(Middleware):
    """Changes what goes in and comes out."""

    def around(self, call_next: Callable[..., Any], payload: Any, ctx: TaskContext) -> Any:
        return ("around", call_next(payload + 1, ctx))

    async def around_async(self, call_next: Callable[..., Any], payload: Any, ctx: TaskContext) -> Any:
        return ("around", await call_next(payload + 1, ctx))


class Refuses(Middleware):
    def before(self, ctx: TaskContext) -> None:
        raise PermissionError("not today")


class Spoils(Middleware):
    def after(self, ctx: TaskContext, outcome: HandlerOutcome) -> None:
        raise LookupError("afterwards")


def made(*middleware: Middleware) -> Registry:
    registry = Registry(middleware=middleware)

    @registry.task("plain")
    def plain(payload: Any) -> Any:
        seen.append(f"handler {payload}")
        if payload == "fail":
            raise ValueError(payload)
        return payload

    @registry.task("coroutine")
    async def coroutine(payload: Any, ctx: TaskContext) -> Any:
        await asyncio.sleep(0)
        return plain(payload)

    return registry


def run(registry: Registry, name: str, payload: Any, executor: Any = None) -> Any:
    task = registry.get(name)
    assert task is not None

    async def scenario() -> Any:
        return await (executor or InlineExecutor()).run(task, payload, context(task_type=name))

    return asyncio.run(scenario())


@pytest.mark.parametrize("name", ["plain", "coroutine"])
def test_the_first_is_the_outermost(name: str) -> None:
    assert run(made(Notes("a"), Notes("b")), name, 1) == 1
    assert seen == [f"a before {name}", f"b before {name}", "handler 1", "b after: 1", "a after: 1"]


@pytest.mark.parametrize("name", ["plain", "coroutine"])
def test_what_is_added_later_is_further_in_and_may_change_everything(name: str) -> None:
    registry = made(Notes("a"))
    run(registry, name, 1)
    registry.use(Around(), Notes("b"))
    seen.clear()
    assert run(registry, name, 1) == ("around", 2)
    assert seen == [
        f"a before {name}",
        f"b before {name}",
        "handler 2",
        "b after: 2",
        "a after: ('around', 2)",
    ]
    assert [type(each).__name__ for each in registry.middleware] == ["Notes", "Around", "Notes"]


@pytest.mark.parametrize("name", ["plain", "coroutine"])
def test_a_failure_passes_through_all_of_them(name: str) -> None:
    with pytest.raises(ValueError, match="fail"):
        run(made(Notes("a"), Notes("b")), name, "fail")
    assert seen[2:] == ["handler fail", "b after: ValueError", "a after: ValueError"]


@pytest.mark.parametrize("name", ["plain", "coroutine"])
def test_what_middleware_raises_is_the_task_s_failure(name: str) -> None:
    with pytest.raises(PermissionError, match="not today"):
        run(made(Notes("a"), Refuses(), Notes("b")), name, 1)
    assert seen == [f"a before {name}", "a after: PermissionError"]
    seen.clear()
    with pytest.raises(LookupError, match="afterwards"):
        run(made(Notes("a"), Spoils()), name, 1)
    assert seen[-1] == "a after: LookupError"


def test_a_coroutine_that_is_cancelled_is_seen() -> None:
    registry = Registry(middleware=[Notes("a")])

    @registry.task("sleeps")
    async def sleeps(payload: Any) -> None:
        await asyncio.sleep(60)

    async def scenario() -> None:
        running = asyncio.ensure_future(InlineExecutor().run(registry.get("sleeps"), 1, context()))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    assert seen[-1] == "a after: CancelledError"


def test_threads_run_it_too() -> None:
    assert run(made(Notes("a")), "plain", 1, ThreadExecutor(1)) == 1
    assert seen == ["a before plain", "handler 1", "a after: 1"]


def test_without_middleware_nothing_stands_between() -> None:
    registry = made()
    plain = registry.get("plain")
    assert plain is next(iter(registry))
    with_some = made(Notes("a"))
    assert with_some.get("plain") is with_some.get("plain")
    assert with_some.get("nobody") is None


def test_a_task_of_two_registries_has_the_middleware_of_each() -> None:
    first = made(Notes("a"))
    second = Registry(*first, middleware=[Notes("b")])
    run(second, "plain", 1)
    assert seen == ["b before plain", "handler 1", "b after: 1"]
    seen.clear()
    run(second.for_queue("default"), "plain", 2)
    assert seen == ["b before plain", "handler 2", "b after: 2"]
    seen.clear()
    # Calling a task calls its handler and nothing else.
    assert second.get("plain")(3) == 3  # type: ignore[misc]
    assert seen == ["handler 3"]


class OnlyPlain(Middleware):
    def around(self, call_next: Callable[..., Any], payload: Any, ctx: TaskContext) -> Any:
        return call_next(payload, ctx)


class OnlyAsync(Middleware):
    async def around_async(self, call_next: Callable[..., Any], payload: Any, ctx: TaskContext) -> Any:
        return await call_next(payload, ctx)


def test_middleware_that_would_leave_a_handler_out_is_refused() -> None:
    with pytest.raises(InvalidRegistry, match="around_async, so that 'coroutine'"):
        made(OnlyPlain())
    with pytest.raises(InvalidRegistry, match="no around, so that 'plain'"):
        made(OnlyAsync())
    with pytest.raises(InvalidRegistry, match="no around, so that 'plain'"):
        made().use(OnlyAsync())
    registry = Registry(middleware=[OnlyAsync()])
    registry.add(next(each for each in made() if each.is_async))


@pytest.mark.parametrize("wrong", [Notes, print, None])
def test_what_is_no_middleware_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRegistry, match="is no middleware"):
        Registry(middleware=[wrong])


def test_the_whole_of_taskline_runs_it() -> None:
    with InMemoryTaskline(made(Notes("a"), Spoils())) as tl:
        task = tl.submit("plain", 1, max_retries=0)
        tl.run_until_idle()
        error = tl.status(task.task_id).last_error
        assert error is not None
        assert (error.error_class, error.message) == ("LookupError", "afterwards")
    assert seen == ["a before plain", "handler 1", "a after: LookupError"]


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children("asyncio", reference="middleware_tasks:registry").open() as made:
        yield made


@pytest.mark.parametrize("kind", ["plain", "alone", "loop"])
def test_children_run_it_where_the_handler_runs(children: Children, kind: str) -> None:
    from middleware_tasks import registry

    from taskline.workers.children import ProcessExecutor
    from taskline.workers.children_loop import LoopExecutor

    task = registry.get("where" if kind == "plain" else "where.async")
    assert task is not None

    async def scenario() -> bytes | None:
        executor: Any = (
            LoopExecutor(children.server, 1, 30) if kind == "loop" else ProcessExecutor(children.server, 1)
        )
        with contextlib.closing(executor):
            result = await executor.run(task, None, context(soft_seconds=30))
            return bytes(result.data)

    assert children.run(scenario()) == b'{"handler":true,"same_process":true,"child":true}'
