"""The leases that one process has given, as far as it knows: how many there are, and which attempts they are of. Pure.

It decides nothing about a lease (the task's lane does): it bounds what the process lends, and drops a second copy of a dispatch record
while the first is lent.
"""

from __future__ import annotations

import heapq

from taskline.schemas.ids import TaskId

Attempt = tuple[TaskId, int]


class LeaseBook:
    """Leases by execution."""

    def __init__(self, most: int) -> None:
        """Hold at most so many."""
        self._most = most
        # Execution → (its task's attempt, the end of the lease).
        self._leases: dict[TaskId, tuple[Attempt, int]] = {}
        self._attempts: dict[Attempt, TaskId] = {}
        self._ends: list[tuple[int, TaskId]] = []

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def room(self) -> int:
        """How many more may be given."""
        return max(0, self._most - len(self._leases))

    def lends(self, task_id: TaskId, attempt: int) -> bool:
        """Whether that attempt is lent."""
        return (task_id, attempt) in self._attempts

    def add(self, execution: TaskId, task_id: TaskId, attempt: int, ends_ms: int) -> None:
        """A lease is about to be given."""
        self._leases[execution] = ((task_id, attempt), ends_ms)
        self._attempts[task_id, attempt] = execution
        heapq.heappush(self._ends, (ends_ms, execution))

    def extend(self, execution: TaskId, ends_ms: int) -> None:
        """A lease ends later."""
        known = self._leases.get(execution)
        if known is not None and ends_ms > known[1]:
            self._leases[execution] = (known[0], ends_ms)
            heapq.heappush(self._ends, (ends_ms, execution))

    def remove(self, execution: TaskId) -> None:
        """A lease is over."""
        known = self._leases.pop(execution, None)
        if known is not None and self._attempts.get(known[0]) == execution:
            del self._attempts[known[0]]

    def expire(self, now_ms: int) -> None:
        """Forget the leases that have ended."""
        while self._ends and self._ends[0][0] <= now_ms:
            ends_ms, execution = heapq.heappop(self._ends)
            known = self._leases.get(execution)
            if known is not None and known[1] == ends_ms:
                self.remove(execution)
