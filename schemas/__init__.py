"""The contracts: Avro schemas, records, codecs, task types."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskline.schemas.catalogue import Outcome, Registration, TypeCatalogue
    from taskline.schemas.codec import Codec
    from taskline.schemas.confluent import codec_for
    from taskline.schemas.derive import schema_of, to_instance
    from taskline.schemas.events import Priority
    from taskline.schemas.payloads import PayloadSchema
    from taskline.schemas.types import TaskType

__all__ = [
    "Codec",
    "Outcome",
    "PayloadSchema",
    "Priority",
    "Registration",
    "TaskType",
    "TypeCatalogue",
    "codec_for",
    "schema_of",
    "to_instance",
]

# Where each name lives. Loaded on first use: whoever imports `taskline.schemas.events` needs no schema libraries.
_HOMES = {
    "taskline.schemas.catalogue": ("Outcome", "Registration", "TypeCatalogue"),
    "taskline.schemas.codec": ("Codec",),
    "taskline.schemas.confluent": ("codec_for",),
    "taskline.schemas.derive": ("schema_of", "to_instance"),
    "taskline.schemas.events": ("Priority",),
    "taskline.schemas.payloads": ("PayloadSchema",),
    "taskline.schemas.types": ("TaskType",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module's attribute
    if name not in _HOME_OF:
        raise AttributeError(f"module 'taskline.schemas' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
