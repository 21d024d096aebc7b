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


class _Places:
    """What is held of some places."""

    __slots__ = ("others", "used")

    def __init__(self) -> None:
        self.used = 0
        # Those that are not of high priority; what is reserved is what these can't have, wherever the high ones are.
        self.others = 0


class Slots:
    """Counts slots; one is held from the append of Started until the handler has ended."""

    def __init__(self, total: int, *, reserved: float = 0.0) -> None:
        """`total` handlers at once, whatever executors they use; the share `reserved` (0 to 1) for high priority alone."""
        self.total = total
        self._reserved = reserved
        self._all = _Places()
        self._by_executor: dict[int, _Places] = {}
        self._executors: dict[int, Executor] = {}

    @property
    def used(self) -> int:
        """Slots that are held."""
        return self._all.used

    @property
    def free(self) -> bool:
        """Whether a slot is free, if only for high priority."""
        return self._fits(self._all, self.total, high=True)

    @property
    def general(self) -> bool:
        """Whether a slot is free for any priority."""
        return self._fits(self._all, self.total, high=False)

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
        held = self._by_executor.get(id(executor))
        return capacity is None or held is None or self._fits(held, capacity, high=high)

    def take(self, executor: Executor, *, high: bool = False) -> None:
        """Hold a slot for a handler of high priority, or of another."""
        for places in (self._all, self._by_executor.setdefault(id(executor), _Places())):
            places.used += 1
            places.others += not high

    def give(self, executor: Executor, *, high: bool = False) -> None:
        """Let one go.

        Raises:
            ValueError: none of that kind is held.
        """
        held = self._by_executor.get(id(executor))
        if held is None or (held.used - held.others if high else held.others) < 1:
            raise ValueError("a slot was given back that nobody held")
        for places in (self._all, held):
            places.used -= 1
            places.others -= not high

    def _fits(self, places: _Places, total: int, *, high: bool) -> bool:
        return places.used < total and (high or places.others < self._general_part(total))

    def _general_part(self, total: int) -> int:
        return total if total < _LEAST_DIVIDED else max(1, total - math.ceil(total * self._reserved))
