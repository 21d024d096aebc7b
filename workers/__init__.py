"""All that runs handlers: tasks and their registry, and the engine that a worker process is made of."""

from __future__ import annotations

from taskline.workers.context import TaskContext
from taskline.workers.limits import TypeLimits
from taskline.workers.middleware import HandlerOutcome, Middleware
from taskline.workers.registry import Registry, Task, load_registry, task
from taskline.workers.retry import RetryPolicy

__all__ = [
    "HandlerOutcome",
    "Middleware",
    "Registry",
    "RetryPolicy",
    "Task",
    "TaskContext",
    "TypeLimits",
    "load_registry",
    "task",
]
