"""The tasks that a worker can run: handlers with a name, and the registry that a worker process is given.

    registry = Registry()

    @registry.task("geo.nearest", timeout=30)
    async def nearest(airport: Airport, ctx: TaskContext) -> dict[str, Any]: ...

The payload parameter's annotation decides: a dataclass or a pydantic model gives the task type its Avro schema, and the handler
gets an instance; any other annotation means JSON, passed as it is.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from taskline.errors import InvalidRegistry, InvalidTaskType, did_you_mean, nearest
from taskline.schemas.catalogue import TypeCatalogue
from taskline.schemas.derive import schema_of, to_instance
from taskline.schemas.events import Priority
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType
from taskline.workers.classify import Classifier
from taskline.workers.context import TaskContext
from taskline.workers.retry import RetryPolicy
from taskline.workers.signature import Signature, read_signature

Handler = Callable[..., Any]
# An Avro schema as its JSON text or document, parsed, or as the class to derive it from.
SchemaLike = PayloadSchema | str | Mapping[str, Any] | type

# Where a handler runs. Coroutines: on the worker's own loop, on the loop of a child process that many share, or in a child process of its own.
# Plain functions: in a child process of its own, or on a thread of the worker.
Isolation = Literal["inline", "child", "alone", "thread"]
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
    # Where it runs; None: as the worker's settings say.
    isolation: Isolation | None = None


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


def task(
    name: str,
    *,
    queue: str = "default",
    priority: Priority = Priority.NORMAL,
    timeout: float | None = None,
    max_retries: int = _DEFAULT_MAX_RETRIES,
    schema: SchemaLike | None = None,
    retry: RetryPolicy | None = None,
    classify: Classifier | None = None,
    soft_timeout: float | None = None,
    isolation: Isolation | None = None,
) -> Callable[[Handler], Task]:
    """Make a task of an `async def` or `def` function `handler(payload)` or `handler(payload, ctx)`.

    Args:
        name: the task type's name, e.g. "geo.nearest"; submitters use it.
        queue: the worker capability that runs it.
        priority: of submissions that give none.
        timeout: the time limit of one execution in seconds; None: the worker's default.
        max_retries: how many attempts may follow the first.
        schema: the payload's Avro schema; None: from the annotation, or any JSON.
        retry: when another attempt follows; None: as the worker's settings say.
        classify: what kind of error an exception is: an `ErrorCategory`, a `Retry` or a `Permanent`; None: as Taskline judges it.
        soft_timeout: when `SoftTimeout` is raised in the handler, in seconds after its start; below `timeout`.
        isolation: where it runs. A coroutine: "inline" on the worker's own loop, "child" on a loop in a child process (usual), "alone" in a
            child process of its own. A plain function: "child" in a child process of its own (usual), or on a "thread" of the worker, which can
            not be stopped. None: as the worker's settings say.

    Raises:
        InvalidTaskType: the name, a default, the schema or the handler's shape can't be used.
    """

    def decorate(handler: Handler) -> Task:
        # Classes that are local to the function in which the handler is defined are found in its frame.
        signature = read_signature(name, handler, sys._getframe(1).f_locals)
        return _make(
            name,
            handler,
            signature,
            queue=queue,
            priority=priority,
            timeout=timeout,
            max_retries=max_retries,
            schema=schema,
            conduct=Conduct(retry=retry, classify=classify, soft_timeout=soft_timeout, isolation=isolation),
        )

    return decorate


def _make(
    name: str,
    handler: Handler,
    signature: Signature,
    *,
    queue: str,
    priority: Priority,
    timeout: float | None,
    max_retries: int,
    schema: SchemaLike | None,
    conduct: Conduct,
) -> Task:
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
    task_type = TaskType(
        name=name,
        queue=queue,
        schema=_schema(name, schema, signature),
        priority=Priority(priority),
        timeout_ms=None if timeout is None else max(1, round(timeout * _MS)),
        max_retries=max_retries,
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
    if conduct.retry is not None and not isinstance(conduct.retry, RetryPolicy):
        raise InvalidTaskType(f"task {name!r}: {conduct.retry!r} is no RetryPolicy")
    if conduct.classify is not None and not callable(conduct.classify):
        raise InvalidTaskType(f"task {name!r}: {conduct.classify!r} can't be called with an exception")


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


class Registry:
    """Tasks by name; names are unique."""

    def __init__(self, *tasks: Task) -> None:
        """Begin with `tasks`."""
        self._tasks: dict[str, Task] = {}
        self.add(*tasks)

    def task(
        self,
        name: str,
        *,
        queue: str = "default",
        priority: Priority = Priority.NORMAL,
        timeout: float | None = None,
        max_retries: int = _DEFAULT_MAX_RETRIES,
        schema: SchemaLike | None = None,
        retry: RetryPolicy | None = None,
        classify: Classifier | None = None,
        soft_timeout: float | None = None,
        isolation: Isolation | None = None,
    ) -> Callable[[Handler], Task]:
        """As `task`, and add it."""

        def decorate(handler: Handler) -> Task:
            signature = read_signature(name, handler, sys._getframe(1).f_locals)
            made = _make(
                name,
                handler,
                signature,
                queue=queue,
                priority=priority,
                timeout=timeout,
                max_retries=max_retries,
                schema=schema,
                conduct=Conduct(
                    retry=retry, classify=classify, soft_timeout=soft_timeout, isolation=isolation
                ),
            )
            self.add(made)
            return made

        return decorate

    def add(self, *tasks: Task) -> None:
        """Add tasks.

        Raises:
            InvalidTaskType: a name is taken, or something else than a task was given.
        """
        for each in tasks:
            if not isinstance(each, Task):
                raise InvalidTaskType(f"{each!r} is not a task: decorate it with @task(name)")
            known = self._tasks.get(each.name)
            if known is not None and known is not each:
                raise InvalidTaskType(f"two tasks are named {each.name!r}: {known!r} and {each!r}")
            self._tasks[each.name] = each

    def get(self, name: str) -> Task | None:
        """The task of that name, None when there is none."""
        return self._tasks.get(name)

    def for_queue(self, queue: str) -> Registry:
        """Only the tasks of one queue."""
        return Registry(*(each for each in self if each.type.queue == queue))

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
