"""Which executor runs a task. Pure."""

from __future__ import annotations

from taskline.workers.executor import Executor
from taskline.workers.ports import WorkerPorts
from taskline.workers.registry import Task


def executor_for(task: Task, ports: WorkerPorts, *, suspect: bool) -> Executor:
    """The executor for an execution of `task`.

    Args:
        task: says what its handler is, and where it asks to run.
        ports: the executors there are.
        suspect: it was in a process that died, so that it must not take anything with it this time.
    """
    usual = ports.coroutines if task.is_async else ports.functions
    if suspect:
        return ports.alone or usual
    match task.conduct.isolation:
        case "inline":
            return ports.inline or usual
        case "thread":
            return ports.threads or usual
        case "alone":
            return ports.alone or usual
        case "child":
            # Plain functions have their child processes as `functions`.
            return (ports.loops or usual) if task.is_async else usual
        case None:
            return usual
