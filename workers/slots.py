"""How many handlers may run: a process's slots, and within them what each executor can take. Pure."""

from __future__ import annotations

from taskline.workers.executor import Executor


class Slots:
    """Counts slots; one is held from the append of Started until the handler has ended."""

    def __init__(self, total: int) -> None:
        """`total` handlers at once, whatever executors they use."""
        self.total = total
        self._used = 0
        self._by_executor: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Slots that are held."""
        return self._used

    @property
    def free(self) -> bool:
        """Whether a slot is free."""
        return self._used < self.total

    def room(self, executor: Executor) -> bool:
        """Whether the executor can take one more handler."""
        return executor.capacity is None or self._by_executor.get(id(executor), 0) < executor.capacity

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
