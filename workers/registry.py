"""The tasks that a worker can run: handlers with a name, and the registry that a worker process is given.

    registry = Registry()

    @registry.task("geo.nearest", timeout=30)
    async def nearest(airport: Airport, ctx: TaskContext) -> dict[str, Any]: ...

The payload parameter's annotation decides: a dataclass or a pydantic model gives the task type its Avro schema, and the handler
gets an instance; any other annotation means JSON, passed as it is.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, Unpack

from taskline.errors import InvalidRegistry, InvalidTaskType, did_you_mean, nearest
from taskline.schemas.catalogue import TypeCatalogue
from taskline.schemas.derive import schema_of, to_instance
from taskline.schemas.events import Priority
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType
from taskline.workers.classify import Classifier
from taskline.workers.context import TaskContext
from taskline.workers.limits import UNLIMITED, TypeLimits
from taskline.workers.middleware import Middleware, layered, missing_hook
from taskline.workers.retry import RetryPolicy
from taskline.workers.signature import Signature, read_signature

Handler = Callable[..., Any]
# An Avro schema as its JSON text or document, parsed, or as the class to derive it from.
SchemaLike = PayloadSchema | str | Mapping[str, Any] | type

# Where a handler runs. Coroutines: on the worker's own loop, on the loop of a child process that many share, or in a child process of its own.
# Plain functions: in a child process of its own, or on a thread of the worker.
Isolation = Literal["inline", "child", "alone", "thread"]
# What is kept in order. "key": the tasks of one affinity key, in the order of their records, one after another.
Ordering = Literal["key"]
ConcurrencyKey = Callable[[Any], str | None]
_ISOLATIONS: dict[bool, tuple[str, ...]] = {True: ("inline", "child", "alone"), False: ("child", "thread")}

_DEFAULT_MAX_RETRIES = 3
_MS = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Conduct:
    """What only the workers must know of a task: how its attempts are run and judged."""

    # When another attempt follows; None: the worker's own policy.
    retry: RetryPolicy | None = None
    # Judges what the handler raised, before the worker does.
    classify: Classifier | None = None
    # When `SoftTimeout` is raised in the handler, in seconds after its start; None: it is not.
    soft_timeout: float | None = None
    # How much memory its child process may have more than at its birth, in MB; None: as the worker's settings say.
    memory_mb: int | None = None
    # How much processor time one execution may take, in seconds; None: any.
    cpu_seconds: float | None = None
    # Where it runs; None: as the worker's settings say.
    isolation: Isolation | None = None
    # How many may run at once or begin per second, in one worker process.
    limits: TypeLimits = UNLIMITED
    # What of a payload the limits per key count by.
    concurrency_key: ConcurrencyKey | None = None
    ordering: Ordering | None = None


_CONDUCT = frozenset(each.name for each in fields(Conduct))


class Task:
    """A task type with its handler. Calling it calls the handler, as if it had not been decorated."""

    def __init__(
        self, task_type: TaskType, handler: Handler, signature: Signature, conduct: Conduct | None = None
    ) -> None:
        """Made by `task`; `signature` is the handler's, as `read_signature` saw it."""
        self.type = task_type
        self.conduct = conduct or Conduct()
        self.handler = handler
        self._signature = signature
        self.is_async = signature.is_async
        self.__name__ = getattr(handler, "__name__", task_type.name)
        self.__doc__ = handler.__doc__
        self.__module__ = handler.__module__
        self.__wrapped__ = handler

    @property
    def name(self) -> str:
        """The task type's name."""
        return self.type.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the handler's own types
        """Call the handler with just these arguments."""
        return self.handler(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Task({self.name!r}, {self.__module__}.{self.__name__})"

    def instance(self, value: Any) -> Any:  # noqa: ANN401 - a payload
        """A decoded payload as the handler wants it.

        Raises:
            InvalidPayload: the annotated class's own validation refuses it.
        """
        payload_class = self._signature.payload_class
        return value if payload_class is None else to_instance(payload_class, value, task_type=self.name)

    def call(self, payload: Any, ctx: TaskContext) -> Any:  # noqa: ANN401 - the handler's own types
        """Call the handler with the arguments that it takes; of a coroutine function, the coroutine."""
        if self._signature.takes_context:
            return self.handler(payload, ctx)
        return self.handler(payload)


class _Layered(Task):
    """A task whose handler is called inside middleware."""

    def __init__(self, inner: Task, middleware: Sequence[Middleware]) -> None:
        super().__init__(inner.type, inner.handler, inner._signature, inner.conduct)
        # Instead of the method, so that a call costs nothing more than its layers.
        self.call = layered(inner.call, middleware, is_async=inner.is_async)  # type: ignore[assignment, method-assign]


class TaskOptions(TypedDict, total=False):
    """What `task` takes besides a name; each is explained there."""

    queue: str
    priority: Priority
    timeout: float | None
    max_retries: int
    schema: SchemaLike | None
    retry: RetryPolicy | None
    classify: Classifier | None
    soft_timeout: float | None
    memory_mb: int | None
    cpu_seconds: float | None
    isolation: Isolation | None
    limits: TypeLimits
    concurrency_key: ConcurrencyKey | None
    ordering: Ordering | None


def task(name: str, **options: Unpack[TaskOptions]) -> Callable[[Handler], Task]:
    """Make a task of an `async def` or `def` function `handler(payload)` or `handler(payload, ctx)`.

    Args:
        name: the task type's name, e.g. "geo.nearest"; submitters use it.
        options: see below; what is not given has its default.

    Options:
        queue: the worker capability that runs it.
        priority: of submissions that give none.
        timeout: the time limit of one execution in seconds; None: the worker's default.
        max_retries: how many attempts may follow the first.
        schema: the payload's Avro schema; None: from the annotation, or any JSON.
        retry: when another attempt follows; None: as the worker's settings say.
        classify: what kind of error an exception is: an `ErrorCategory`, a `Retry` or a `Permanent`; None: as Taskline judges it.
        soft_timeout: when `SoftTimeout` is raised in the handler, in seconds after its start; below `timeout`.
        memory_mb: how much memory the child process may have more than at its birth while the handler runs, in MB; None: as the worker's settings say
            (worker.child_memory_mb). Beyond it the handler gets MemoryError. As cpu_seconds only for what has a child process to itself: plain functions
            (not on a "thread"), and coroutines with isolation="alone".
        cpu_seconds: how much processor time one execution may take, user and system, all threads; None: any. Beyond it its child process is killed, and the
            attempt has failed as after `timeout`. The programs that it starts are not counted.
        isolation: where it runs. A coroutine: "inline" on the worker's own loop, "child" on a loop in a child process (usual), "alone" in a
            child process of its own. A plain function: "child" in a child process of its own (usual), or on a "thread" of the worker, which can
            not be stopped. None: as the worker's settings say.
        limits: how many run at once and begin per second in a worker process; settings can override them (worker.limits_file).
        concurrency_key: makes of a payload the key that the limits per key count by; None from it: counted under no key.
        ordering: "key": tasks of this type with one affinity key begin in the order in which they were submitted, each after the attempt before it has
            its outcome. A retry comes when it is due, behind what was submitted meanwhile.

    Raises:
        InvalidTaskType: the name, a default, the schema or the handler's shape can't be used.
    """

    def decorate(handler: Handler) -> Task:
        # Classes that are local to the function in which the handler is defined are found in its frame.
        return _made(name, handler, sys._getframe(1).f_locals, options)

    return decorate


def _made(name: str, handler: Handler, local_names: Mapping[str, Any], options: TaskOptions) -> Task:
    if unknown := sorted(options.keys() - TaskOptions.__annotations__.keys()):
        hint = did_you_mean(nearest(unknown[0], TaskOptions.__annotations__))
        raise InvalidTaskType(f"task {name!r}: there is no option {unknown[0]!r}{hint}")
    signature = read_signature(name, handler, local_names)
    priority, timeout = options.get("priority", Priority.NORMAL), options.get("timeout")
    kept: dict[str, Any] = {key: value for key, value in options.items() if key in _CONDUCT}
    conduct = Conduct(**kept)
    if priority not in tuple(Priority):
        raise InvalidTaskType(f"task {name!r}: {priority!r} is no priority: high, normal or low")
    if timeout is not None and not timeout > 0:
        raise InvalidTaskType(f"task {name!r}: a timeout of {timeout!r} s leaves no time to run")
    _check(name, conduct, timeout)
    allowed = _ISOLATIONS[signature.is_async]
    if conduct.isolation is not None and conduct.isolation not in allowed:
        kind = "an `async def`" if signature.is_async else "a plain"
        raise InvalidTaskType(
            f"task {name!r}: {kind} handler's isolation is {', '.join(allowed)} or None, not {conduct.isolation!r}"
        )
    if conduct.isolation != "alone" and (signature.is_async or conduct.isolation == "thread"):
        _check_shared(name, conduct)
    task_type = TaskType(
        name=name,
        queue=options.get("queue", "default"),
        schema=_schema(name, options.get("schema"), signature),
        priority=Priority(priority),
        timeout_ms=None if timeout is None else max(1, round(timeout * _MS)),
        max_retries=options.get("max_retries", _DEFAULT_MAX_RETRIES),
    )
    return Task(task_type, handler, signature, conduct)


def _check(name: str, conduct: Conduct, timeout: float | None) -> None:
    soft = conduct.soft_timeout
    if soft is not None and not soft > 0:
        raise InvalidTaskType(f"task {name!r}: a soft_timeout of {soft!r} s leaves no time to run")
    if soft is not None and timeout is not None and not soft < timeout:
        raise InvalidTaskType(
            f"task {name!r}: a soft_timeout of {soft:g} s is not below the timeout of {timeout:g} s"
        )
    for option, value in (("memory_mb", conduct.memory_mb), ("cpu_seconds", conduct.cpu_seconds)):
        if value is not None and not 0 < value < math.inf:
            raise InvalidTaskType(f"task {name!r}: {option} {value!r} leaves nothing to run with")
    if conduct.memory_mb is not None and not isinstance(conduct.memory_mb, int):
        raise InvalidTaskType(f"task {name!r}: memory_mb {conduct.memory_mb!r} is no whole number")
    if conduct.retry is not None and not isinstance(conduct.retry, RetryPolicy):
        raise InvalidTaskType(f"task {name!r}: {conduct.retry!r} is no RetryPolicy")
    if conduct.classify is not None and not callable(conduct.classify):
        raise InvalidTaskType(f"task {name!r}: {conduct.classify!r} can't be called with an exception")
    if not isinstance(conduct.limits, TypeLimits):
        raise InvalidTaskType(f"task {name!r}: {conduct.limits!r} is no TypeLimits")
    if conduct.concurrency_key is not None and not callable(conduct.concurrency_key):
        raise InvalidTaskType(f"task {name!r}: {conduct.concurrency_key!r} can't be called with a payload")
    if conduct.ordering not in (None, "key"):
        raise InvalidTaskType(f'task {name!r}: ordering is "key" or None, not {conduct.ordering!r}')


def _check_shared(name: str, conduct: Conduct) -> None:
    for option, value in (("memory_mb", conduct.memory_mb), ("cpu_seconds", conduct.cpu_seconds)):
        if value is not None:
            raise InvalidTaskType(
                f'task {name!r}: {option} needs a child process for the handler alone; a coroutine has one with isolation="alone", '
                "a plain function unless it runs on a thread"
            )


def _schema(name: str, schema: SchemaLike | None, signature: Signature) -> PayloadSchema | None:
    if schema is None:
        return None if signature.payload_class is None else schema_of(signature.payload_class)
    if isinstance(schema, PayloadSchema):
        return schema
    if isinstance(schema, type):
        return schema_of(schema)
    if isinstance(schema, str | Mapping):
        return PayloadSchema.parse(schema if isinstance(schema, str) else dict(schema))
    raise InvalidTaskType(f"task {name!r}: a schema is Avro's JSON or a class, not {schema!r}")


def _check_layers(task: Task, middleware: Iterable[Middleware]) -> None:
    for each in middleware:
        missing = missing_hook(each, is_async=task.is_async)
        if missing is not None:
            kind = "an `async def`" if task.is_async else "a plain"
            raise InvalidRegistry(
                f"{type(each).__qualname__} has no {missing}, so that {task.name!r}, {kind} handler, would run outside of it"
            )


class Registry:
    """Tasks by name; names are unique. Its middleware runs around the handlers of all of them."""

    def __init__(self, *tasks: Task, middleware: Iterable[Middleware] = ()) -> None:
        """Begin with `tasks` and `middleware`, the outermost first.

        Raises:
            InvalidRegistry: something else than a `Middleware` was given.
        """
        self._tasks: dict[str, Task] = {}
        self._middleware: tuple[Middleware, ...] = ()
        # The tasks inside the middleware, made as they are asked for.
        self._layered: dict[str, Task] = {}
        self.add(*tasks)
        self.use(*middleware)

    @property
    def middleware(self) -> tuple[Middleware, ...]:
        """What runs around the handlers, the outermost first."""
        return self._middleware

    def use(self, *middleware: Middleware) -> None:
        """Add middleware inside of what there is; before the worker starts.

        Raises:
            InvalidRegistry: something else than a `Middleware` was given, or it has nothing for some of the handlers.
        """
        for each in middleware:
            if not isinstance(each, Middleware):
                raise InvalidRegistry(
                    f"{each!r} is no middleware: derive its class from taskline.Middleware, and give an instance"
                )
        for task in self._tasks.values():
            _check_layers(task, middleware)
        self._middleware += middleware
        self._layered.clear()

    def task(self, name: str, **options: Unpack[TaskOptions]) -> Callable[[Handler], Task]:
        """As `task`, and add it."""

        def decorate(handler: Handler) -> Task:
            made = _made(name, handler, sys._getframe(1).f_locals, options)
            self.add(made)
            return made

        return decorate

    def add(self, *tasks: Task) -> None:
        """Add tasks.

        Raises:
            InvalidTaskType: a name is taken, or something else than a task was given.
            InvalidRegistry: the middleware has nothing for such a handler.
        """
        for each in tasks:
            if not isinstance(each, Task):
                raise InvalidTaskType(f"{each!r} is not a task: decorate it with @task(name)")
            known = self._tasks.get(each.name)
            if known is not None and known is not each:
                raise InvalidTaskType(f"two tasks are named {each.name!r}: {known!r} and {each!r}")
            _check_layers(each, self._middleware)
            self._tasks[each.name] = each

    def get(self, name: str) -> Task | None:
        """The task of that name as workers call it, inside the middleware; None when there is none."""
        plain = self._tasks.get(name)
        if plain is None or not self._middleware:
            return plain
        layers = self._layered.get(name)
        if layers is None:
            layers = self._layered[name] = _Layered(plain, self._middleware)
        return layers

    def for_queue(self, queue: str) -> Registry:
        """Only the tasks of one queue, with the middleware."""
        return Registry(*(each for each in self if each.type.queue == queue), middleware=self._middleware)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tasks, sorted."""
        return tuple(sorted(self._tasks))

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues of all tasks, sorted."""
        return tuple(sorted({each.type.queue for each in self}))

    @property
    def types(self) -> tuple[TaskType, ...]:
        """The task types, in the order in which they were added."""
        return tuple(each.type for each in self)

    def catalogue(self) -> TypeCatalogue:
        """The task types as a catalogue of their own, for producers and tests without a log."""
        return TypeCatalogue(self.types)

    def __iter__(self) -> Iterator[Task]:
        return iter(tuple(self._tasks.values()))

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, name: object) -> bool:
        return name in self._tasks


def load_registry(reference: str) -> Registry:
    """Import the registry that `module:attribute` names; the working directory is searched first.

    Raises:
        InvalidRegistry: no such module or attribute, or it is no registry.
    """
    module_name, separator, attribute = reference.partition(":")
    if not (module_name and separator and attribute):
        raise InvalidRegistry(f"{reference!r} is not of the form module:attribute, e.g. shop.tasks:registry")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise InvalidRegistry(f"importing {module_name!r} failed: {error}") from error
        raise InvalidRegistry(
            f"there is no module {missing!r} in {os.getcwd()} or on the Python path (of {reference!r})"
        ) from error
    except Exception as error:
        raise InvalidRegistry(f"importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if isinstance(found, Registry):
        return found
    registries = [key for key, value in vars(module).items() if isinstance(value, Registry)]
    candidate = nearest(attribute, registries) or (registries[0] if len(registries) == 1 else None)
    hint = did_you_mean(candidate)
    if found is None:
        raise InvalidRegistry(f"module {module_name!r} has no attribute {attribute!r}{hint}")
    raise InvalidRegistry(f"{reference!r} is of type {type(found).__name__}, not a taskline.Registry{hint}")
