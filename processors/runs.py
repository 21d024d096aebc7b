"""What lies between a reader of single records and a folder of runs of them: a bounded buffer with a linger."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Runs(Generic[T]):
    """Collects items into runs. One task adds, one takes; while a run is folded, the next one collects."""

    def __init__(self, *, max_items: int, max_bytes: int, linger_seconds: float) -> None:
        """Bound a run by items and bytes; hand out a smaller one when its first item has waited for the linger."""
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._linger = linger_seconds
        self._items: list[T] = []
        self._bytes = 0
        # The loop's time at which the run that collects is handed out whatever its size.
        self._due = 0.0
        self._closed = False
        # Set when the taker has something to look at: a first item, a full run, the end.
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._items)

    @property
    def full(self) -> bool:
        """True when `room` has to be awaited before the next `add`."""
        return len(self._items) >= self._max_items or self._bytes >= self._max_bytes

    def add(self, item: T, size_bytes: int) -> None:
        """Put an item behind the others."""
        if not self._items:
            self._due = asyncio.get_running_loop().time() + self._linger
            self._changed.set()
        self._items.append(item)
        self._bytes += size_bytes
        if self.full:
            self._room.clear()
            self._changed.set()

    async def room(self) -> None:
        """Wait until the run that collects is not full."""
        await self._room.wait()

    def close(self) -> None:
        """Nothing is added any more: hand out what is there, then empty runs."""
        self._closed = True
        self._changed.set()

    async def take(self) -> list[T]:
        """The next run, in the order of `add`; empty after `close` when nothing is left."""
        while not self._items and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        while not self.full and not self._closed:
            self._changed.clear()
            try:
                async with asyncio.timeout_at(self._due):
                    await self._changed.wait()
            except TimeoutError:
                break
        items, self._items, self._bytes = self._items, [], 0
        self._room.set()
        return items
