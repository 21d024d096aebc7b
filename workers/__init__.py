"""All that runs handlers: tasks and their registry, and the engine that a worker process is made of."""

from __future__ import annotations

from taskline.workers.context import TaskContext
from taskline.workers.registry import Registry, Task, load_registry, task

__all__ = ["Registry", "Task", "TaskContext", "load_registry", "task"]
