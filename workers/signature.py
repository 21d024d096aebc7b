"""What a handler's signature says: is it a coroutine function, which class is its payload, does it take the context."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from taskline.errors import InvalidTaskType
from taskline.schemas.class_fields import is_payload_class
from taskline.workers.context import TaskContext

_CONTEXT_NAME = "ctx"
_MOST_PARAMETERS = 2
# Classes whose instances JSON gives; a handler annotated with any other plain class would wait for one in vain.
_JSON_CLASSES = (dict, list, str, int, float, bool, type(None), object)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """A handler's shape."""

    is_async: bool
    takes_context: bool
    # The annotated dataclass or pydantic model; None: JSON.
    payload_class: type | None


def read_signature(name: str, handler: Callable[..., Any], local_names: Mapping[str, Any]) -> Signature:
    """Look at a handler.

    Args:
        name: of the task, for messages.
        handler: the decorated function.
        local_names: what its annotations may refer to besides its module's globals.

    Raises:
        InvalidTaskType: it is not `handler(payload)` or `handler(payload, ctx)`, or its payload can't be had from a record.
    """

    def refuse(why: str) -> InvalidTaskType:
        return InvalidTaskType(
            f"handler of task {name!r} ({getattr(handler, '__qualname__', repr(handler))}): {why}"
        )

    if not callable(handler) or inspect.isclass(handler):
        raise refuse("a handler is an `async def` or `def` function")
    called = handler if inspect.isroutine(handler) else type(handler).__call__
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise refuse("a generator returns no result; return a value instead")
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError) as error:
        raise refuse(f"its signature can't be read: {error}") from error
    required = [each for each in parameters if each.default is each.empty]
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters):
        raise refuse("takes a payload and perhaps a context, not *args or **kwargs")
    if any(each.kind is each.KEYWORD_ONLY for each in required):
        raise refuse("nobody passes it keyword-only arguments")
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise refuse("its first parameter must be the payload")
    hints = _hints(called, local_names, refuse)
    takes_context = len(parameters) > 1 and _is_context(parameters[1], hints)
    if _is_context(parameters[0], hints):
        raise refuse("its first parameter must be the payload; the context is the second")
    if len([each for each in required if each.kind in _POSITIONAL]) > 1 + takes_context:
        extra = parameters[_MOST_PARAMETERS if takes_context else 1].name
        raise refuse(f"nobody passes parameter {extra!r}: a handler takes (payload) or (payload, ctx)")
    return Signature(
        is_async=inspect.iscoroutinefunction(called),
        takes_context=takes_context,
        payload_class=_payload_class(hints.get(parameters[0].name), refuse),
    )


def _is_context(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> bool:
    if parameter.kind not in _POSITIONAL:
        return False
    return hints.get(parameter.name) is TaskContext or parameter.name == _CONTEXT_NAME


def _hints(
    called: Callable[..., Any], local_names: Mapping[str, Any], refuse: Callable[[str], InvalidTaskType]
) -> Mapping[str, Any]:
    function = inspect.unwrap(called)
    # Only the parameters: a return annotation that can't be resolved here is no obstacle.
    annotations = {
        key: value for key, value in getattr(function, "__annotations__", {}).items() if key != "return"
    }
    holder = type("_Annotated", (), {"__annotations__": annotations, "__module__": function.__module__})
    names = getattr(function, "__globals__", {})
    try:
        return typing.get_type_hints(holder, globalns=dict(names), localns=dict(local_names))
    except NameError as error:
        raise refuse(
            f"an annotation can't be resolved ({error}); define its class at the module's top"
        ) from error


def _payload_class(hint: Any, refuse: Callable[[str], InvalidTaskType]) -> type | None:  # noqa: ANN401 - an annotation
    if not isinstance(hint, type) or typing.get_origin(hint) is not None or typing.is_typeddict(hint):
        return None
    if is_payload_class(hint):
        return hint
    if hint in _JSON_CLASSES or hint.__module__ in ("collections.abc", "typing"):
        return None
    raise refuse(
        f"its payload can't be of class {hint.__qualname__}: annotate a dataclass, a pydantic model, or what JSON gives"
    )
