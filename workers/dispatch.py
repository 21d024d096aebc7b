"""Which buffered execution a free slot takes next: the one place where that is decided. Pure: items in, items out.

Among priorities by weight (or, without weights, strictly the most urgent), inside a priority one tenant after another, inside a tenant one
*lane* after another. A lane is first in, first out, and stands behind gates: an executor that is full, a limit that is used up. Lanes behind a closed gate
are out of the round until it opens.

Invariants: with weights, each priority that always has something to take gets at least its weight's share of what is taken, and what a priority did not use while it had
nothing is not made up for. An item waits behind its own gates only. The cost of each call is independent of how much waits.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Generic, TypeVar

from taskline.schemas.events import Priority

T = TypeVar("T")

# What must be open for an item to be taken; equal gates are one gate.
Gate = Hashable
_Lane = tuple[Gate, ...]
ALL = frozenset(Priority)


class _Level(Generic[T]):
    """One priority's items."""

    def __init__(self, priority: Priority) -> None:
        self.priority = priority
        self.credit = 0
        # Tenants and their lanes in the order of their turns; lanes behind closed gates are not among them.
        self._turns: OrderedDict[str, OrderedDict[_Lane, deque[T]]] = OrderedDict()
        self._shut: dict[str, dict[_Lane, deque[T]]] = {}

    def put(self, tenant: str, lane: _Lane, item: T) -> None:
        shut = self._shut.get(tenant)
        if shut is not None and lane in shut:
            shut[lane].append(item)
            return
        lanes = self._turns.setdefault(tenant, OrderedDict())
        if lane in lanes:
            lanes[lane].append(item)
        else:
            lanes[lane] = deque((item,))

    def closed(self, is_open: Callable[[Gate], bool]) -> tuple[str, _Lane, Gate] | None:
        """Take a lane whose turn it is out of the round since a gate is closed; None: there is none, the next item can be taken."""
        if not self._turns:
            return None
        tenant, lanes = next(iter(self._turns.items()))
        lane = next(iter(lanes))
        for gate in lane:
            if not is_open(gate):
                self._shut.setdefault(tenant, {})[lane] = lanes.pop(lane)
                if not lanes:
                    del self._turns[tenant]
                return tenant, lane, gate
        return None

    def open(self, tenant: str, lane: _Lane) -> None:
        """Let a lane take part in the round again."""
        shut = self._shut.get(tenant)
        items = None if shut is None else shut.pop(lane, None)
        if shut is not None and not shut:
            del self._shut[tenant]
        if items:
            self._turns.setdefault(tenant, OrderedDict())[lane] = items

    def take(self) -> T:
        tenant, lanes = next(iter(self._turns.items()))
        lane, items = next(iter(lanes.items()))
        item = items.popleft()
        if items:
            lanes.move_to_end(lane)
        else:
            del lanes[lane]
        if lanes:
            self._turns.move_to_end(tenant)
        else:
            del self._turns[tenant]
        return item

    def drop(self, unwanted: Callable[[T], bool]) -> list[T]:
        dropped: list[T] = []
        for places in (self._turns, self._shut):
            for tenant, lanes in list(places.items()):
                for lane, items in list(lanes.items()):
                    kept = deque(item for item in items if not unwanted(item))
                    if len(kept) < len(items):
                        dropped += (item for item in items if unwanted(item))
                        lanes[lane] = kept
                    if not kept:
                        del lanes[lane]
                if not lanes:
                    del places[tenant]
        return dropped

    def __bool__(self) -> bool:
        return bool(self._turns)


class Dispatcher(Generic[T]):
    """Buffers items and hands them out."""

    def __init__(self, weights: Mapping[Priority, int] | None = None) -> None:
        """`weights`: shares of the priorities; None: the most urgent first, whatever becomes of the others."""
        self._weights = weights
        # Priority is declared most urgent first.
        self._levels = {priority: _Level[T](priority) for priority in Priority}
        # The lanes that each closed gate keeps out.
        self._behind: dict[Gate, list[tuple[Priority, str, _Lane]]] = {}
        self._count = 0

    def put(self, priority: Priority, tenant: str, gates: _Lane, item: T) -> None:
        """Add an item, behind what is of the same priority, tenant and gates."""
        self._levels[priority].put(tenant, gates, item)
        self._count += 1

    def take(self, is_open: Callable[[Gate], bool], among: Collection[Priority] = ALL) -> T | None:
        """Remove the item that is next of these priorities; None: none can be taken."""
        able: list[_Level[T]] = []
        for level in self._levels.values():
            if level.priority not in among:
                continue
            while (found := level.closed(is_open)) is not None:
                tenant, lane, gate = found
                self._behind.setdefault(gate, []).append((level.priority, tenant, lane))
            if level:
                able.append(level)
            else:
                level.credit = 0
        if not able:
            return None
        self._count -= 1
        return self._chosen(able).take()

    def opened(self, gate: Gate) -> None:
        """A gate may have opened: what it kept out is looked at again."""
        for priority, tenant, lane in self._behind.pop(gate, ()):
            self._levels[priority].open(tenant, lane)

    def drop(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Remove and return every item for which `unwanted` holds; the others keep their order."""
        dropped = [item for level in self._levels.values() for item in level.drop(unwanted)]
        self._count -= len(dropped)
        return dropped

    def __len__(self) -> int:
        return self._count

    def _chosen(self, able: list[_Level[T]]) -> _Level[T]:
        weights = self._weights
        if weights is None or len(able) == 1:
            return able[0]
        # Smooth weighted round robin: shares without bursts, and the most urgent first where all begin alike.
        for level in able:
            level.credit += weights[level.priority]
        chosen = max(able, key=lambda level: level.credit)
        chosen.credit -= sum(weights[level.priority] for level in able)
        return chosen
