"""For tests of the view: events and records by the handful, and a store in memory that takes writes as Cassandra does."""

from __future__ import annotations

import uuid
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from taskline.infra.log import HEADER_TASK_ID, InRecord, OutRecord, Position
from taskline.schemas.codec import Codec
from taskline.schemas.events import (
    DeadLettered,
    Failed,
    LifecycleBatch,
    LifecycleEntry,
    LifecycleEvent,
    Priority,
    Released,
    Started,
    Succeeded,
    TaskSubmitted,
)
from taskline.schemas.ids import TaskId, bucket_of, lane_of, new_task_id
from taskline.state.fold import fold
from taskline.state.status import TaskState
from taskline.state.store import StoredTask, SubmissionWrite, Write

CODEC = Codec()
DAY_MS = 86_400_000

T = TypeVar("T")


def task_id_of(ms: int, tail: int) -> TaskId:
    """A UUIDv7 of this time whose lane is `tail` modulo the lanes."""
    return uuid.UUID(int=(ms << 80) | (7 << 76) | (2 << 62) | tail)


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, without the cost of a loop."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("it waits")


def submission(now_ms: int, **changes: Any) -> TaskSubmitted:
    task_id = changes.pop("task_id", None) or new_task_id(now_ms)
    values: dict[str, Any] = {
        "tenant": "acme",
        "task_type": "geo.nearest",
        "queue": "default",
        "priority": Priority.NORMAL,
        "payload": b"{}",
        "retain_until": now_ms + DAY_MS,
        "max_retries": 3,
        "root_id": task_id,
    }
    return TaskSubmitted(task_id=task_id, **(values | changes))


def event(kind: type[LifecycleEvent], task: TaskSubmitted, at: int, **changes: Any) -> LifecycleEvent:
    values: dict[str, Any] = {
        "task_id": task.task_id,
        "tenant": task.tenant,
        "attempt": 1,
        "worker": "w1",
        "at": at,
        "retain_until": task.retain_until,
    }
    execution = changes.pop("execution", uuid.UUID(int=1))
    own: dict[type[LifecycleEvent], dict[str, Any]] = {
        Started: {
            "execution": execution,
            "source_topic": "tasks.normal",
            "source_partition": 0,
            "source_offset": 0,
        },
        Released: {"execution": execution, "reason": "shutdown"},
        Succeeded: {"execution": execution, "result": b"1"},
        Failed: {"execution": execution, "error_class": "E", "message": "m", "retryable": True},
        DeadLettered: {"reason": "failed"},
    }
    return kind(**(values | own[kind] | changes))


def batch(events: Sequence[LifecycleEvent | LifecycleEntry]) -> bytes:
    entries = tuple(
        each
        if isinstance(each, LifecycleEntry)
        else LifecycleEntry(task_id=each.task_id, retain_until=each.retain_until, event=CODEC.encode(each))
        for each in events
    )
    return CODEC.encode(LifecycleBatch(events=entries))


def in_record(
    topic: str,
    partition: int,
    offset: int,
    value: bytes | None,
    *,
    now_ms: int,
    headers: Mapping[str, bytes] | None = None,
    key: bytes | None = None,
) -> InRecord:
    return InRecord(
        position=Position(topic=topic, partition=partition, offset=offset),
        value=value,
        key=key,
        headers=headers or {},
        timestamp_ms=now_ms,
    )


def dispatch(topic: str, partition: int, offset: int, task: TaskSubmitted, *, now_ms: int) -> InRecord:
    return in_record(
        topic,
        partition,
        offset,
        CODEC.encode(task),
        now_ms=now_ms,
        headers={HEADER_TASK_ID: task.task_id.bytes},
        key=task.task_id.bytes,
    )


class ModelStore:
    """Rows as Cassandra keeps them: a cell goes to the newest write timestamp, then to the larger value."""

    def __init__(self, lanes: int, bucket_ms: int) -> None:
        self._lanes = lanes
        self._bucket_ms = bucket_ms
        self.rows: dict[TaskId, dict[Any, tuple[int, Any]]] = {}

    async def apply(self, writes: Sequence[Write]) -> None:
        for write in writes:
            assert write.lane == lane_of(write.task_id, self._lanes)
            assert write.bucket == bucket_of(write.task_id, self._bucket_ms)
            assert write.ttl_seconds > 0
            cells: dict[Any, Any] = {"status": write.status.value}
            if isinstance(write, SubmissionWrite):
                cells |= {"submission": write.submission, "task_type": write.task_type}
            else:
                assert write.events
                cells |= write.events
            row = self.rows.setdefault(write.task_id, {})
            for name, value in cells.items():
                row[name] = max(row.get(name, (-1, value)), (write.timestamp_us, value))

    async def read(self, task_id: TaskId) -> StoredTask | None:
        row = self.rows.get(task_id)
        if row is None:
            return None
        stored = row.get("submission")
        return StoredTask(
            submission=None if stored is None else stored[1],
            events={name: value for name, (_, value) in row.items() if isinstance(name, int)},
        )

    def contents(self) -> dict[TaskId, dict[Any, Any]]:
        """Values without their timestamps."""
        return {
            task_id: {name: value for name, (_, value) in row.items()} for task_id, row in self.rows.items()
        }


def folded(stored: StoredTask) -> TaskState:
    assert stored.submission is not None
    return fold(
        CODEC.decode(stored.submission, TaskSubmitted),
        [CODEC.decode(data, LifecycleEvent) for _, data in sorted(stored.events.items())],
    )


class ListLog:
    """An `AsyncLog` that keeps what is appended, after so many refusals."""

    def __init__(self, failures: Sequence[Exception] = ()) -> None:
        self.records: list[OutRecord] = []
        self._failures = list(failures)

    def append(self, record: OutRecord) -> Any:
        import asyncio

        future: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        if self._failures:
            future.set_exception(self._failures.pop(0))
        else:
            self.records.append(record)
            future.set_result(Position(topic=record.topic, partition=0, offset=len(self.records)))
        return future
