"""Answers about ended tasks, kept in the process: a task that has ended for good is read from the view once.

Invariant: nothing is kept that could still change. An end state never does, except that a dead task may be replayed, which it then says; so dead
ones are not kept. What is kept belongs to a tenant, is given to no other, and is dropped when the task's retention is over.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from taskline.api.etag import Rendered
from taskline.schemas.ids import TaskId
from taskline.state.status import TaskStatus

UNCHANGING = frozenset({TaskStatus.COMPLETED, TaskStatus.CANCELLED, TaskStatus.EXPIRED})
# Of an entry besides its body: key, tag, objects.
_OVERHEAD_BYTES = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """An answer and whose it is."""

    tenant: str
    rendered: Rendered
    # ms since the epoch.
    retain_until: int

    @property
    def size_bytes(self) -> int:
        """About what it takes."""
        return len(self.rendered.body) + _OVERHEAD_BYTES


class EndedCache:
    """The answers asked for most recently, up to a size."""

    def __init__(self, max_bytes: int) -> None:
        """Keep so much; 0: nothing."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[TaskId, Kept] = OrderedDict()

    def get(self, task_id: TaskId, *, tenant: str, now_ms: int) -> Rendered | None:
        """The tenant's answer; None: it is not kept."""
        kept = self._kept.get(task_id)
        if kept is None or kept.tenant != tenant:
            return None
        if kept.retain_until <= now_ms:
            self._drop(task_id)
            return None
        self._kept.move_to_end(task_id)
        return kept.rendered

    def put(self, task_id: TaskId, kept: Kept) -> None:
        """Keep an answer; the longest unused ones make room."""
        if kept.size_bytes > self._max_bytes:
            return
        if task_id in self._kept:
            self._drop(task_id)
        self._kept[task_id] = kept
        self._bytes += kept.size_bytes
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def __len__(self) -> int:
        """How many answers are kept."""
        return len(self._kept)

    def _drop(self, task_id: TaskId) -> None:
        self._bytes -= self._kept.pop(task_id).size_bytes
