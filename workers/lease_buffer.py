"""Records that wait for a fetch, by priority and task type. Pure.

Invariants:
- Within one priority and type, records leave in the order in which they came.
- High first, with a share for the others: while several priorities have what is asked for, they are served SHARES to one another, so
  that an endless flood of one does not starve the rest.
- A type that nobody asks for costs others nothing but the room that it takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from taskline.infra.log import InRecord
from taskline.schemas.events import Priority, TaskSubmitted
from taskline.workers.lease_feed import LeaseAssignment

# Of tasks handed out while all priorities have some.
SHARES: dict[Priority, int] = {Priority.HIGH: 12, Priority.NORMAL: 3, Priority.LOW: 1}


@dataclass(eq=False, kw_only=True, slots=True)
class Entry:
    """A record that can be lent."""

    record: InRecord
    assignment: LeaseAssignment
    submission: TaskSubmitted
    attempt: int
    # How often it was handed on since nobody fetched its type.
    unfetched: int
    # When it came, by the loop's clock.
    since: float
    # In which order.
    number: int = 0


class LeaseBuffer:
    """The records of one gateway."""

    def __init__(self) -> None:
        self._queues: dict[tuple[Priority, str], deque[Entry]] = {}
        self._credit = dict(SHARES)
        self._numbers = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, entry: Entry) -> None:
        """Take a record behind all others of its kind."""
        self._numbers += 1
        entry.number = self._numbers
        self._queue(entry).append(entry)
        self._count += 1

    def give_back(self, entry: Entry) -> None:
        """Take a record back, before all others of its kind."""
        self._queue(entry).appendleft(entry)
        self._count += 1

    def take(self, task_types: Collection[str], limit: int) -> list[Entry]:
        """At most so many records of these types."""
        taken: list[Entry] = []
        while len(taken) < limit:
            heads = self._heads(task_types)
            if not heads:
                break
            entry = heads[self._next(heads)]
            self._queue(entry).popleft()
            taken.append(entry)
        self._count -= len(taken)
        self._forget_empty()
        return taken

    def drop(self, unwanted: Callable[[Entry], bool]) -> list[Entry]:
        """Take out every record that is `unwanted`, oldest first."""
        dropped: list[Entry] = []
        for key, queue in self._queues.items():
            out = [entry for entry in queue if unwanted(entry)]
            if out:
                gone = set(map(id, out))
                self._queues[key] = deque(entry for entry in queue if id(entry) not in gone)
                dropped += out
        self._count -= len(dropped)
        self._forget_empty()
        return sorted(dropped, key=lambda entry: entry.number)

    def __iter__(self) -> Iterator[Entry]:
        for queue in self._queues.values():
            yield from queue

    def _heads(self, task_types: Collection[str]) -> dict[Priority, Entry]:
        """For each priority the oldest record of these types."""
        heads: dict[Priority, Entry] = {}
        for (priority, task_type), queue in self._queues.items():
            if queue and task_type in task_types:
                known = heads.get(priority)
                if known is None or queue[0].number < known.number:
                    heads[priority] = queue[0]
        return heads

    def _next(self, heads: Collection[Priority]) -> Priority:
        if not any(self._credit[priority] > 0 for priority in heads):
            self._credit = dict(SHARES)
        chosen = next(priority for priority in Priority if priority in heads and self._credit[priority] > 0)
        if len(heads) > 1:
            self._credit[chosen] -= 1
        return chosen

    def _queue(self, entry: Entry) -> deque[Entry]:
        key = (entry.assignment.priority, entry.submission.task_type)
        return self._queues.setdefault(key, deque())

    def _forget_empty(self) -> None:
        for key in [key for key, queue in self._queues.items() if not queue]:
            del self._queues[key]
