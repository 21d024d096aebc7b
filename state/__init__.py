"""The view: what is known of each task, as the pure fold of its log.

`taskline.state.cassandra` and `taskline.state.migrations` need the `view` extra and are imported by their full names.
"""

from __future__ import annotations

from taskline.state.fold import Attempt, LaneEvent, Outcome, TaskHistory, fold, history
from taskline.state.status import END_STATES, TRANSITIONS, TaskError, TaskState, TaskStatus
from taskline.state.store import EventsWrite, StoredTask, SubmissionWrite, ViewStore, Write

__all__ = [
    "END_STATES",
    "TRANSITIONS",
    "Attempt",
    "EventsWrite",
    "LaneEvent",
    "Outcome",
    "StoredTask",
    "SubmissionWrite",
    "TaskError",
    "TaskHistory",
    "TaskState",
    "TaskStatus",
    "ViewStore",
    "Write",
    "fold",
    "history",
]
