"""Which buffered record a free slot takes next: the one place where that is decided.

Pure: records in, records out. The order here is strict (high before normal before low); a fairer dispatcher has the same
methods.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from taskline.schemas.events import Priority

T = TypeVar("T")


class StrictDispatcher(Generic[T]):
    """Buffers per priority; the most urgent first, and within a priority the oldest."""

    def __init__(self) -> None:
        """Begin empty."""
        self._buffers: dict[Priority, deque[T]] = {priority: deque() for priority in Priority}
        # Priority is declared most urgent first.
        self._in_order = tuple(self._buffers.values())
        self._count = 0

    def put(self, priority: Priority, item: T) -> None:
        """Add an item behind those of its priority."""
        self._buffers[priority].append(item)
        self._count += 1

    def take(self) -> T | None:
        """Remove the item that is next; None: there is none."""
        for buffer in self._in_order:
            if buffer:
                self._count -= 1
                return buffer.popleft()
        return None

    def urgency(self) -> int | None:
        """How urgent the next item is, 0 the most; None: there is none."""
        return next((rank for rank, buffer in enumerate(self._in_order) if buffer), None)

    def drop(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Remove and return every item for which `unwanted` holds; the others keep their order."""
        dropped: list[T] = []
        for buffer in self._in_order:
            kept: list[T] = []
            for item in buffer:
                (dropped if unwanted(item) else kept).append(item)
            if len(kept) < len(buffer):
                buffer.clear()
                buffer.extend(kept)
        self._count -= len(dropped)
        return dropped

    def __len__(self) -> int:
        return self._count
