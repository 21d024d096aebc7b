"""Which attempts this process has brought to an end, or has in its hands, so that it runs none of them twice. Pure.

A record can stand in the log twice: a submitter or a delay role did not learn of its acknowledgement and appended it again. The copy
is dropped only when the attempt's outcome is acknowledged; while the attempt is still in flight at another offset its copy waits,
and it runs after all if that one is handed back.

Invariant: what is known of an attempt belongs to the assignment under which it was learned, and goes with it. After a move another worker
may know better, and what a later owner reads from here on must be run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from enum import Enum, auto
from typing import Final, Generic, TypeVar

from taskline.schemas.ids import TaskId

# Copies come within seconds of one another (a delivery time-out, a restart of the delay role): at thousands of tasks a second this
# is seconds' worth, at 200 bytes each.
MAX_ENDED: Final = 10_000

# The number of the id, whose hash is a number's, and the attempt.
Key = tuple[int, int]
H = TypeVar("H", bound=Hashable)
W = TypeVar("W")


def key_of(task_id: TaskId, attempt: int) -> Key:
    """How an attempt is named here."""
    return task_id.int, attempt


class Verdict(Enum):
    """What to do with a record."""

    # Run it; it is in flight from now on.
    RUN = auto()
    # Its outcome is acknowledged: it is done.
    DONE = auto()
    # It is in flight at another offset, and kept until that has ended.
    WAIT = auto()


class _InFlight(Generic[H, W]):
    __slots__ = ("copies", "holder", "leaving")

    def __init__(self, holder: H) -> None:
        self.holder = holder
        # True: its assignment is over, so its outcome is not kept.
        self.leaving = False
        self.copies: list[W] | None = None


class Duplicates(Generic[H, W]):
    """Attempts in flight and ended; `H` is an assignment, `W` a record that waits."""

    def __init__(self, max_ended: int = MAX_ENDED) -> None:
        """Remember at most `max_ended` that have ended, the newest."""
        self._max_ended = max_ended
        self._in_flight: dict[Key, _InFlight[H, W]] = {}
        self._ended: OrderedDict[Key, H] = OrderedDict()

    def __len__(self) -> int:
        """How many attempts it knows."""
        return len(self._in_flight) + len(self._ended)

    def take(self, key: Key, holder: H, record: W) -> Verdict:
        """A record of this attempt is about to be run under the assignment `holder`."""
        if key in self._ended:
            return Verdict.DONE
        other = self._in_flight.get(key)
        if other is None:
            self._in_flight[key] = _InFlight(holder)
            return Verdict.RUN
        if other.copies is None:
            other.copies = []
        other.copies.append(record)
        return Verdict.WAIT

    def ended(self, key: Key) -> list[W]:
        """Its outcome is acknowledged; returns the copies that are done with it."""
        flight = self._in_flight.pop(key)
        if not flight.leaving:
            self._ended[key] = flight.holder
            if len(self._ended) > self._max_ended:
                self._ended.popitem(last=False)
        return flight.copies or []

    def handed_back(self, key: Key) -> list[W]:
        """It was not brought to an end; returns the copies, which are to be taken again."""
        return self._in_flight.pop(key).copies or []

    def leave(self, holders: Collection[H], goes: Callable[[W], bool]) -> list[W]:
        """Forget what was learned under these assignments; returns the waiting copies of which `goes` is true.

        What is in flight stays known until it ends or is handed back, since copies elsewhere wait for it.
        """
        for key in [key for key, holder in self._ended.items() if holder in holders]:
            del self._ended[key]
        gone: list[W] = []
        for flight in self._in_flight.values():
            flight.leaving = flight.leaving or flight.holder in holders
            if flight.copies:
                gone += [copy for copy in flight.copies if goes(copy)]
                flight.copies = [copy for copy in flight.copies if not goes(copy)]
        return gone
