"""How many handlers may run: a process's slots, and within them what each executor can take. Pure.

A share of the slots, and of each executor's places, is reserved for high priority: however many long tasks of other priorities run, one of high
priority finds a place. Fewer than four are not divided, and at least one is left for the others.
"""

from __future__ import annotations

import math

from taskline.workers.dispatch import Gate
from taskline.workers.executor import Executor

# Of fewer places a reserved one would be too dear.
_LEAST_DIVIDED = 4


class Slots:
    """Counts slots; one is held from the append of Started until the handler has ended."""

    def __init__(self, total: int, *, reserved: float = 0.0) -> None:
        """`total` handlers at once, whatever executors they use; the share `reserved` (0 to 1) for high priority alone."""
        self.total = total
        self._reserved = reserved
        self._general = self._general_part(total)
        self._used = 0
        self._by_executor: dict[int, int] = {}
        self._executors: dict[int, Executor] = {}

    @property
    def used(self) -> int:
        """Slots that are held."""
        return self._used

    @property
    def free(self) -> bool:
        """Whether a slot is free, if only for high priority."""
        return self._used < self.total

    @property
    def general(self) -> bool:
        """Whether a slot is free for any priority."""
        return self._used < self._general

    def gate(self, executor: Executor, *, high: bool) -> Gate:
        """What is open while the executor can take one more handler."""
        self._executors[id(executor)] = executor
        return "executor", id(executor), high

    def gates(self, executor: Executor) -> tuple[Gate, Gate]:
        """All gates of an executor."""
        return self.gate(executor, high=True), self.gate(executor, high=False)

    def is_open(self, gate: Gate) -> bool:
        """Whether a gate that `gate` gave is open."""
        assert isinstance(gate, tuple)  # noqa: S101 - made by `gate`
        return self.room(self._executors[gate[1]], high=gate[2])

    def room(self, executor: Executor, *, high: bool = False) -> bool:
        """Whether the executor can take one more handler, of high priority or not."""
        capacity = executor.capacity
        if capacity is None:
            return True
        return self._by_executor.get(id(executor), 0) < (capacity if high else self._general_part(capacity))

    def take(self, executor: Executor) -> None:
        """Hold a slot."""
        self._used += 1
        self._by_executor[id(executor)] = self._by_executor.get(id(executor), 0) + 1

    def give(self, executor: Executor) -> None:
        """Let one go.

        Raises:
            ValueError: none is held.
        """
        if self._by_executor.get(id(executor), 0) < 1:
            raise ValueError("a slot was given back that nobody held")
        self._used -= 1
        self._by_executor[id(executor)] -= 1

    def _general_part(self, total: int) -> int:
        return total if total < _LEAST_DIVIDED else max(1, total - math.ceil(total * self._reserved))
