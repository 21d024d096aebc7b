"""Tasks and events for tests of reads over HTTP, at the kit's time."""

from __future__ import annotations

from typing import Any

from api_kit import NOW_MS

from taskline.schemas.events import Priority, Started, TaskSubmitted
from taskline.schemas.ids import TaskId, new_task_id


def submitted(**changes: Any) -> TaskSubmitted:
    task_id = new_task_id(NOW_MS - 60_000)
    values: dict[str, Any] = {
        "task_id": task_id,
        "tenant": "default",
        "task_type": "geo.nearest",
        "queue": "geo",
        "priority": Priority.NORMAL,
        "payload": b"",
        "retain_until": NOW_MS + 86_400_000,
        "max_retries": 3,
        "root_id": task_id,
    }
    return TaskSubmitted(**values | changes)


def event(kind: type, task: TaskSubmitted, **values: Any) -> Any:
    common = {
        "task_id": task.task_id,
        "tenant": task.tenant,
        "attempt": 1,
        "worker": "w-1",
        "at": NOW_MS - 50_000,
        "retain_until": task.retain_until,
    }
    return kind(**common | values)


def started(task: TaskSubmitted, execution: TaskId, **values: Any) -> Started:
    source = {"source_topic": "tasks.normal", "source_partition": 0, "source_offset": 1}
    return event(Started, task, execution=execution, **source | values)
