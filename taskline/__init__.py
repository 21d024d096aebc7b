"""Taskline: a distributed task queue whose truth is a Kafka log.

```python
from taskline import Registry, TaskContext, TaskProducer
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskline.errors import HandBack, Permanent, Retry, SoftTimeout, TasklineError
    from taskline.producers import AsyncTaskProducer, Submission, TaskFailure, TaskHandle, TaskProducer
    from taskline.schemas.events import ErrorCategory, Priority
    from taskline.settings import Settings, load_settings
    from taskline.workers import (
        HandlerOutcome,
        Middleware,
        Registry,
        RetryPolicy,
        Task,
        TaskContext,
        TypeLimits,
        task,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncTaskProducer",
    "ErrorCategory",
    "HandBack",
    "HandlerOutcome",
    "Middleware",
    "Permanent",
    "Priority",
    "Registry",
    "Retry",
    "RetryPolicy",
    "Settings",
    "SoftTimeout",
    "Submission",
    "Task",
    "TaskContext",
    "TaskFailure",
    "TaskHandle",
    "TaskProducer",
    "TasklineError",
    "TypeLimits",
    "load_settings",
    "task",
]

# Where each name lives. Loaded on first use: `import taskline.errors` must not pull in Kafka clients.
_HOMES = {
    "taskline.errors": ("HandBack", "Permanent", "Retry", "SoftTimeout", "TasklineError"),
    "taskline.producers": ("AsyncTaskProducer", "Submission", "TaskFailure", "TaskHandle", "TaskProducer"),
    "taskline.schemas.events": ("ErrorCategory", "Priority"),
    "taskline.settings": ("Settings", "load_settings"),
    "taskline.workers": (
        "HandlerOutcome",
        "Middleware",
        "Registry",
        "RetryPolicy",
        "Task",
        "TaskContext",
        "TypeLimits",
        "task",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module's attribute
    if name not in _HOME_OF:
        raise AttributeError(f"module 'taskline' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
