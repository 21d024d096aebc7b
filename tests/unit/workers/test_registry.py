from __future__ import annotations

import functools
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import pytest
from pydantic import BaseModel

from taskline.errors import IncompatibleSchema, InvalidRegistry, InvalidTaskType, TasklineError
from taskline.schemas.events import Priority
from taskline.schemas.payloads import PayloadSchema
from taskline.workers import Registry, TaskContext, load_registry, task


@dataclass
class Point:
    x: int


class Order(BaseModel):
    number: int


class Loose(TypedDict):
    x: int


class Opaque:
    pass


AVSC = {"type": "record", "name": "Thing", "fields": [{"name": "x", "type": "long"}]}


def test_defaults_and_options_of_a_task() -> None:
    @task("plain")
    def plain(payload: dict[str, Any]) -> int:
        """Says what it does."""
        return 1

    @task("full", queue="gpu", priority=Priority.HIGH, timeout=1.5, max_retries=0)
    async def full(payload: Any) -> None: ...

    assert (plain.name, plain.type.queue, plain.type.priority) == ("plain", "default", Priority.NORMAL)
    assert (plain.type.schema, plain.type.timeout_ms, plain.type.max_retries) == (None, None, 3)
    assert (full.type.queue, full.type.priority) == ("gpu", Priority.HIGH)
    assert (full.type.timeout_ms, full.type.max_retries) == (1_500, 0)
    assert (plain.is_async, full.is_async) == (False, True)
    assert plain({}) == 1
    assert (plain.__name__, plain.__doc__) == ("plain", "Says what it does.")
    assert "plain" in repr(plain)


def test_the_annotation_gives_the_schema_and_instances() -> None:
    @task("point")
    def point(payload: Point) -> None: ...

    @task("order")
    async def order(payload: Order, ctx: TaskContext) -> None: ...

    assert point.type.schema is not None
    assert point.instance({"x": 1}) == Point(x=1)
    assert order.instance({"number": 1}) == Order(number=1)


def test_a_class_that_is_local_to_a_function_can_be_annotated() -> None:
    @dataclass
    class Local:
        y: str

    registry = Registry()

    @registry.task("local")
    def local(payload: Local) -> None: ...

    @task("local2")
    def local2(payload: Local) -> NoSuchClass: ...  # noqa: F821 - results need no annotation that can be resolved

    assert local.instance({"y": "a"}) == Local(y="a")
    assert local2.type.schema == local.type.schema


@pytest.mark.parametrize(
    "hint", [dict, list, str, int, Any, object, dict[str, int], Loose, Mapping, int | None, None]
)
def test_other_annotations_mean_json(hint: Any) -> None:
    def handler(payload): ...

    handler.__annotations__["payload"] = hint
    made = task("json")(handler)
    assert made.type.schema is None
    assert made.instance({"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    "schema",
    [
        AVSC,
        PayloadSchema.parse(AVSC),
        '{"type": "record", "name": "Thing", "fields": [{"name": "x", "type": "long"}]}',
        Point,
    ],
)
def test_an_explicit_schema(schema: Any) -> None:
    @task("explicit", schema=schema)
    def explicit(payload: dict[str, Any]) -> None: ...

    data, fingerprint = explicit.type.encode({"x": 3})
    assert data == b"\x06"
    assert fingerprint is not None
    assert explicit.instance({"x": 3}) == {"x": 3}


def ctx_first(ctx): ...
def nothing(): ...
def two(a, b): ...
def three(a, ctx, c): ...
def star(*args): ...
def stars(payload, **kwargs): ...
def keyword(payload, *, other): ...
def only_keyword(*, payload): ...
def generator(payload) -> Iterator[int]:
    yield 1


async def async_generator(payload) -> AsyncIterator[int]:
    yield 1


def opaque(payload: Opaque) -> None: ...
def unresolved(payload: Nowhere) -> None: ...  # noqa: F821
def context_as_payload(payload: TaskContext) -> None: ...


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (ctx_first, "first parameter must be the payload"),
        (context_as_payload, "first parameter must be the payload"),
        (nothing, "first parameter must be the payload"),
        (only_keyword, "keyword-only"),
        (two, "nobody passes parameter 'b'"),
        (three, "nobody passes parameter 'c'"),
        (star, r"\*args"),
        (stars, r"\*\*kwargs"),
        (keyword, "keyword-only"),
        (generator, "generator"),
        (async_generator, "generator"),
        (opaque, "can't be of class Opaque"),
        (unresolved, "Nowhere"),
        (Point, "function"),
        ("text", "function"),
    ],
)
def test_handlers_of_a_wrong_shape_are_refused_at_once(handler: Any, reason: str) -> None:
    with pytest.raises(InvalidTaskType, match=reason) as refused:
        task("wrong")(handler)
    assert "'wrong'" in str(refused.value)


def test_shapes_that_are_fine() -> None:
    def with_default(payload, extra=1): ...
    def positional(payload, ctx, /): ...
    def annotated(payload, context: TaskContext): ...
    def keyword_default(payload, *, flag=False): ...

    class Callable:
        async def __call__(self, payload: Point, ctx: TaskContext) -> None: ...

        def method(self, payload: dict[str, Any]) -> None: ...

    for handler in (with_default, positional, annotated, keyword_default, Callable().method):
        assert not task("fine")(handler).is_async
    assert task("fine")(Callable()).is_async
    assert task("fine")(Callable()).type.schema is not None
    assert task("fine")(functools.wraps(annotated)(lambda payload, ctx: None)).type.schema is None


@pytest.mark.parametrize(
    "options",
    [
        {"name": ""},
        {"name": "has space"},
        {"name": "a", "queue": "Not A Queue"},
        {"name": "a", "timeout": 0},
        {"name": "a", "timeout": -1},
        {"name": "a", "timeout": float("nan")},
        {"name": "a", "max_retries": -1},
        {"name": "a", "schema": 3},
        {"name": "a", "schema": "{not json"},
        {"name": "a", "priority": "urgent"},
    ],
)
def test_bad_definitions_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidTaskType):
        task(**options)(lambda payload: None)


def test_names_are_unique_and_only_tasks_can_be_added() -> None:
    registry = Registry()

    @registry.task("one")
    def one(payload): ...

    registry.add(one)
    with pytest.raises(InvalidTaskType, match="two tasks are named 'one'"):
        registry.task("one")(lambda payload: None)
    with pytest.raises(InvalidTaskType, match="is not a task"):
        registry.add(lambda payload: None)  # type: ignore[arg-type]
    assert len(registry) == 1


def test_a_registry_by_queue_and_as_a_catalogue() -> None:
    registry = Registry()

    @registry.task("a")
    def a(payload): ...

    @registry.task("b", queue="gpu")
    def b(payload: Point): ...

    assert registry.names == ("a", "b")
    assert registry.queues == ("default", "gpu")
    assert registry.for_queue("gpu").names == ("b",)
    assert len(registry.for_queue("none")) == 0
    assert registry.get("a") is a
    assert registry.get("c") is None
    assert "b" in registry
    assert list(registry) == [a, b]
    catalogue = registry.catalogue()
    assert catalogue.get("b") == b.type
    assert b.type.schema is not None
    assert catalogue.writer_schema(b.type.schema.fingerprint) == b.type.schema


def test_types_that_contradict_each_other_are_no_catalogue() -> None:
    assert issubclass(IncompatibleSchema, TasklineError)
    assert Registry().catalogue().names() == ()


MODULE = """
from taskline.workers import Registry
registry = Registry()
other = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_registry_is_found_in_the_working_directory(module: Path) -> None:
    (module / "shop_tasks.py").write_text(MODULE)
    assert load_registry("shop_tasks:registry").names == ()


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("shop_tasks", "module:attribute"),
        (":registry", "module:attribute"),
        ("shop_tasks:", "module:attribute"),
        ("shop_taks:registry", "no module 'shop_taks'"),
        ("shop_tasks.sub:registry", "no module 'shop_tasks.sub'"),
        ("shop_tasks:registri", "has no attribute 'registri'; did you mean 'registry'"),
        ("shop_tasks:zzz", "did you mean 'registry'"),
        ("shop_tasks:other", "is of type int, not a taskline.Registry; did you mean 'registry'"),
        ("broken_import:registry", "No module named 'nowhere_at_all'"),
        ("broken_code:registry", "ZeroDivisionError"),
    ],
)
def test_a_reference_that_leads_nowhere_says_where_it_ended(
    module: Path, reference: str, message: str
) -> None:
    (module / "shop_tasks.py").write_text(MODULE)
    (module / "broken_import.py").write_text("import nowhere_at_all\n")
    (module / "broken_code.py").write_text("1 / 0\n")
    with pytest.raises(InvalidRegistry) as refused:
        load_registry(reference)
    assert message in str(refused.value)
