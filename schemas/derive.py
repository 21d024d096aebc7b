"""From Python classes to payload schemas, and from decoded payloads back to instances.

`py_avro_schema` says which Avro type a Python type is. The walk through classes is our own, for three reasons: it resolves postponed
annotations (`from __future__ import annotations`), which that library takes for names of types; a schema must depend on the
class's shape alone, not on its module or docstring; and defaults must be the same in every process, since they are part of the
schema. Records and enums have the class's name without a namespace, so a class can move.
"""

from __future__ import annotations

import collections.abc
import json
import re
import types
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, NewType, TypeVar, Union, get_args, get_origin
from uuid import UUID

import py_avro_schema
from pydantic import PydanticUserError, TypeAdapter, ValidationError

from taskline.errors import InvalidPayload, InvalidTaskType
from taskline.schemas.class_fields import NO_DEFAULT, fields_of, is_payload_class
from taskline.schemas.conforming import compile_check
from taskline.schemas.defaults import json_default, named_types, native_default
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.refusal import Refused

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# What py_avro_schema is asked about; anything else it would take for a record of its constructor's arguments.
_LEAVES = (bool, int, float, str, bytes, Decimal, UUID, date, time, NoneType)
_OPTIONS = py_avro_schema.Option.NO_DOC | py_avro_schema.Option.NO_AUTO_NAMESPACE


@cache
def schema_of(python_type: type) -> PayloadSchema:
    """The Avro schema of a dataclass or a pydantic model.

    Raises:
        InvalidTaskType: no schema can be derived; the message names the field.
    """
    if not is_payload_class(python_type):
        name = getattr(python_type, "__name__", str(python_type))
        raise InvalidTaskType(f"{name} is neither a dataclass nor a pydantic model: give its schema")
    walk = _Walk()
    document = walk.record(python_type)
    walk.settle_defaults(document)
    try:
        # What workers will need, so that it fails here if it must.
        _adapter(python_type)
    except PydanticUserError as error:
        reason = str(error).partition("\n")[0]
        raise InvalidTaskType(f"no instance of {python_type.__name__} could be made: {reason}") from error
    return PayloadSchema.parse(document)


def to_instance(python_type: type[T], value: Any, *, task_type: str = "") -> T:  # noqa: ANN401
    """An instance of a payload class from a decoded payload, by pydantic's rules.

    Raises:
        InvalidPayload: the class's own validation refuses it; `pointer` leads to the field.
    """
    try:
        adapter = _adapter(python_type)  # type: ignore[arg-type]  # classes are hashable
        instance: T = adapter.validate_python(value, by_name=True, by_alias=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        refused = Refused(first["msg"])
        refused.path.extend(reversed(first["loc"]))
        raise InvalidPayload(task_type, refused.pointer, refused.reason) from error
    return instance


@cache
def _adapter(python_type: type) -> TypeAdapter[Any]:
    return TypeAdapter(python_type)


class _Walk:
    """The derivation of one schema."""

    def __init__(self) -> None:
        # Named types so far: name → the class that has it.
        self._named: dict[str, type] = {}
        # (record, member, default) whose JSON form waits until all types are known.
        self._defaults: list[tuple[str, dict[str, Any], Any]] = []

    def record(self, python_type: type) -> Any:  # noqa: ANN401 - JSON
        """The definition of a class, or its name where it is already defined."""
        name = python_type.__name__
        if self._is_defined(name, python_type):
            return name
        members = []
        for field in fields_of(python_type):
            try:
                member = {"name": field.name, "type": self._node(field.annotation)}
                default = field.default()
            except InvalidTaskType as error:
                raise InvalidTaskType(f"{name}.{field.name}: {error}") from error
            if default is not NO_DEFAULT:
                self._defaults.append((name, member, default))
            members.append(member)
        return {"type": "record", "name": name, "fields": members}

    def settle_defaults(self, document: Any) -> None:  # noqa: ANN401 - JSON
        """Put the defaults into a document that is otherwise complete."""
        names = named_types(document)
        for record, member, default in self._defaults:
            branches = member["type"] if isinstance(member["type"], list) else [member["type"]]
            for branch in branches:
                try:
                    native = compile_check(branch, names)(default)
                except Refused as refused:
                    reason = refused.reason
                    continue
                if isinstance(member["type"], list):
                    # A union's default is one of its first branch.
                    member["type"] = [branch, *(other for other in branches if other is not branch)]
                member["default"] = json_default(native)
                if native_default(branch, member["default"], names) == native:
                    break
                reason = "an inner value has no form as a default"
            else:
                raise InvalidTaskType(f"{record}.{member['name']}: the default {reason}")

    def _node(self, annotation: Any) -> Any:  # noqa: ANN401, PLR0911 - one return per kind of type
        annotation = _plain(annotation)
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin in (Union, types.UnionType):
            return self._union(arguments)
        if origin in (list, collections.abc.Sequence) or (origin is tuple and arguments[1:] == (...,)):
            return {"type": "array", "items": self._node(arguments[0])}
        if origin in (dict, collections.abc.Mapping) and arguments[1] is not Any:
            if arguments[0] is not str:
                raise InvalidTaskType("the keys of a map are strings")
            return {"type": "map", "values": self._node(arguments[1])}
        if is_payload_class(annotation):
            return self.record(annotation)
        if isinstance(annotation, type) and issubclass(annotation, Enum):
            return self._enum(annotation)
        if annotation is timedelta:
            name = timedelta.__name__
            defined = self._is_defined(name, timedelta)
            return name if defined else {"type": "fixed", "name": name, "size": 12, "logicalType": "duration"}
        return _leaf(annotation)

    def _union(self, arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401 - JSON
        branches: list[Any] = []
        for branch in map(self._node, arguments):
            if branch not in branches:
                branches.append(branch)
        return branches if len(branches) > 1 else branches[0]

    def _enum(self, python_type: type[Enum]) -> Any:  # noqa: ANN401 - JSON
        name = python_type.__name__
        if self._is_defined(name, python_type):
            return name
        symbols = [member.value for member in python_type]
        if not all(isinstance(symbol, str) and _NAME.fullmatch(symbol) for symbol in symbols):
            raise InvalidTaskType(
                f"the values of {name} can't be Avro symbols (letters, digits, underscores): use Literal or str"
            )
        # No default symbol: a reader that lacks a symbol must not take another one for it.
        return {"type": "enum", "name": name, "symbols": symbols}

    def _is_defined(self, name: str, python_type: type) -> bool:
        if not _NAME.fullmatch(name):
            raise InvalidTaskType(f"{name!r} can't name an Avro type: use a class with a plain name")
        known = self._named.get(name)
        if known is not None and known is not python_type:
            raise InvalidTaskType(f"two different classes are called {name}")
        self._named[name] = python_type
        return known is not None


def _plain(annotation: Any) -> Any:  # noqa: ANN401
    """An annotation without what Avro does not know; a decimal keeps its precision."""
    while True:
        if isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        elif get_origin(annotation) is Annotated and get_args(annotation)[0] is not Decimal:
            annotation = get_args(annotation)[0]
        else:
            return annotation


def _leaf(annotation: Any) -> Any:  # noqa: ANN401 - JSON
    """What py_avro_schema says of a type without parts."""
    if isinstance(annotation, type):
        if issubclass(annotation, str):
            return "string"
        if not issubclass(annotation, _LEAVES):
            raise InvalidTaskType(_unsupported(annotation))
    elif get_origin(annotation) not in (Annotated, Literal, dict, collections.abc.Mapping):
        raise InvalidTaskType(_unsupported(annotation))
    if annotation is Decimal:
        raise InvalidTaskType(
            "a Decimal needs its precision: Annotated[Decimal, py_avro_schema.DecimalMeta(precision=…, scale=…)]"
        )
    try:
        return json.loads(py_avro_schema.generate(annotation, options=_OPTIONS))
    except (TypeError, ValueError) as error:
        raise InvalidTaskType(_unsupported(annotation)) from error


def _unsupported(annotation: Any) -> str:  # noqa: ANN401
    words = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return f"{words} has no Avro type that can be derived: use a supported type, or write the schema"
