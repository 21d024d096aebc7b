"""The fields of dataclasses and pydantic models, seen alike: name, resolved annotation, and a default that every process shares."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, time
from typing import Annotated, Any
from uuid import UUID

from pydantic import BaseModel

from taskline.errors import InvalidTaskType

# Stands for "has no default"; None is one.
NO_DEFAULT: Any = object()
# What a factory of such values gives depends on when and where it is called.
_MOMENTARY = (date, time, UUID)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassField:
    """One field of a payload class."""

    name: str
    annotation: Any
    value: Any = NO_DEFAULT
    factory: Callable[[], Any] | None = None

    def default(self) -> Any:  # noqa: ANN401
        """The default, or `NO_DEFAULT`.

        Raises:
            InvalidTaskType: a factory that does not give the same value each time.
        """
        if self.factory is None:
            return self.value
        value = self.factory()
        # Compared by repr as well: a NaN or an object without equality would never agree with itself.
        again = self.factory()
        if isinstance(value, _MOMENTARY) or (value != again and repr(value) != repr(again)):
            raise InvalidTaskType(
                "its default factory gives different values, and a schema has one default: make it required or None"
            )
        return value


def is_payload_class(python_type: object) -> bool:
    """Whether a schema can be derived from it: a dataclass or a pydantic model (the class, not an instance)."""
    return isinstance(python_type, type) and (
        dataclasses.is_dataclass(python_type) or issubclass(python_type, BaseModel)
    )


def fields_of(python_type: type) -> Iterator[ClassField]:
    """The fields that a payload carries, in order of definition.

    Raises:
        InvalidTaskType: annotations that can't be resolved.
    """
    # Pydantic's own dataclasses have it too.
    if hasattr(python_type, "__pydantic_fields__"):
        yield from _pydantic_fields(python_type)
    else:
        yield from _dataclass_fields(python_type)


def _dataclass_fields(python_type: type) -> Iterator[ClassField]:
    try:
        hints = typing.get_type_hints(python_type, include_extras=True)
    except (NameError, TypeError) as error:
        raise InvalidTaskType(
            f"the annotations of {python_type.__name__} can't be resolved ({error}): define what they name at module level"
        ) from error
    for field in dataclasses.fields(python_type):
        if field.init:
            has_factory = field.default_factory is not dataclasses.MISSING
            yield ClassField(
                name=field.name,
                annotation=hints[field.name],
                value=NO_DEFAULT if field.default is dataclasses.MISSING else field.default,
                factory=field.default_factory if has_factory else None,  # type: ignore[arg-type]
            )


def _pydantic_fields(python_type: Any) -> Iterator[ClassField]:  # noqa: ANN401
    if not python_type.__pydantic_complete__:
        raise InvalidTaskType(
            f"the annotations of {python_type.__name__} can't be resolved: define what they name at module level"
        )
    for name, field in python_type.__pydantic_fields__.items():
        if getattr(field, "init", None) is False:
            continue
        annotation = field.annotation
        for metadata in field.metadata:
            annotation = Annotated[annotation, metadata]
        if field.default_factory_takes_validated_data:
            raise InvalidTaskType(f"{python_type.__name__}.{name}: its default depends on other fields")
        yield ClassField(
            name=name,
            annotation=annotation,
            value=NO_DEFAULT if field.is_required() or field.default_factory else field.default,
            factory=field.default_factory,
        )
