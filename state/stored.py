"""From what a store keeps of a task to its folded state."""

from __future__ import annotations

import structlog

from taskline.errors import UndecodableRecord, UnknownSchema
from taskline.schemas.codec import Codec
from taskline.schemas.events import LifecycleEvent, TaskSubmitted
from taskline.schemas.ids import TaskId
from taskline.state.fold import LaneEvent, fold
from taskline.state.status import TaskState
from taskline.state.store import StoredTask

log = structlog.get_logger(__name__)


def events_of(codec: Codec, stored: StoredTask) -> list[LaneEvent]:
    """The task's events, in lane order.

    Raises:
        UnknownSchema: a newer Taskline wrote one of them.
        UndecodableRecord: one is broken.
    """
    return [
        LaneEvent.at_sequence(sequence, codec.decode(data, LifecycleEvent))
        for sequence, data in sorted(stored.events.items())
    ]


def decoded(codec: Codec, task_id: TaskId, submission: bytes) -> TaskSubmitted | None:
    """The submission; None, and a warning, when it can't be read."""
    try:
        return codec.decode(submission, TaskSubmitted)
    except (UnknownSchema, UndecodableRecord) as error:
        log.warning("submission is unreadable", task_id=str(task_id), error=str(error))
        return None


def readable(codec: Codec, submission: TaskSubmitted, stored: StoredTask) -> TaskState | None:
    """The task's state; None, and a warning, when an event can't be read: one such task must not hide the others of a list."""
    try:
        return state_of(codec, submission, stored)
    except (UnknownSchema, UndecodableRecord) as error:
        log.warning("task is unreadable", task_id=str(submission.task_id), error=str(error))
        return None


def state_of(codec: Codec, submission: TaskSubmitted, stored: StoredTask) -> TaskState:
    """The task's state; raises as `events_of`."""
    events = stored.events
    in_order = (codec.decode(events[sequence], LifecycleEvent) for sequence in sorted(events))
    return fold(submission, in_order, stored.marks)
