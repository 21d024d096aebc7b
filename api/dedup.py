"""Dedup windows: of the tasks of one type with one dedup key, one in a while.

The name that a window holds is the task type's and the dedup key's. A second task inside the window is not accepted, and the caller is told of
the first; in the mode `replace` the second takes the place of a first that still waits (`taskline.api.replacing`).
"""

from __future__ import annotations

from dataclasses import dataclass

from taskline.api.models import TaskSubmission
from taskline.errors import InvalidOption
from taskline.schemas.ids import TaskId
from taskline.state.claims import ClaimKey, ClaimKind
from taskline.state.status import TaskState

# The mode in which a second task takes the place of one that waits.
REPLACE = "replace"
# Between task type and dedup key; no task type has it in its name.
_SEPARATOR = " "


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicate:
    """Not accepted, since another task stands for it."""

    task_id: TaskId
    task_type: str
    # Of that task; None: the view does not have it yet, or does not answer.
    state: TaskState | None


def window_of(submission: TaskSubmission) -> float | None:
    """The window in seconds; None: the submission asks for none.

    Raises:
        InvalidOption: one of the fields is there without the others that it needs.
    """
    key, seconds = submission.dedup_key, submission.dedup_window_seconds
    if key is None:
        for name in ("dedup_window_seconds", "dedup_mode"):
            if getattr(submission, name) is not None:
                raise InvalidOption(name, "goes with a dedup_key, and there is none")
        return None
    if seconds is None:
        raise InvalidOption("dedup_window_seconds", "says for how long the dedup_key holds, and is missing")
    return seconds


def window_name(submission: TaskSubmission, tenant: str) -> ClaimKey:
    """What the window holds."""
    name = f"{submission.task_type}{_SEPARATOR}{submission.dedup_key}"
    return ClaimKey(tenant=tenant, kind=ClaimKind.DEDUP, name=name)
