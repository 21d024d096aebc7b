"""Executions that wait for room in their executor, while slots are free. Pure.

Invariant: each waits for its own executor only; one that is full (a child that runs suspects one at a time) holds up no other.
"""

from __future__ import annotations

from collections.abc import Callable

from taskline.workers.dispatch import StrictDispatcher
from taskline.workers.execution import Execution
from taskline.workers.executor import Executor


class Parking:
    """Per executor, the most urgent first, and within a priority the oldest."""

    def __init__(self) -> None:
        """Begin empty."""
        self._places: dict[int, tuple[Executor, StrictDispatcher[Execution]]] = {}

    def put(self, run: Execution) -> None:
        """Let an execution wait for its executor."""
        executor = run.executor
        assert executor is not None  # noqa: S101 - what has none is not run
        place = self._places.setdefault(id(executor), (executor, StrictDispatcher()))
        place[1].put(run.waiting.priority, run)

    def take(self, room: Callable[[Executor], bool], rival: int | None) -> Execution | None:
        """Remove the most urgent that has room; None: there is none, or the `rival` urgency (0 the most) is more urgent."""
        best: StrictDispatcher[Execution] | None = None
        for executor, waiting in self._places.values():
            urgency = waiting.urgency()
            if urgency is not None and (rival is None or urgency <= rival) and room(executor):
                best, rival = waiting, urgency
        return None if best is None else best.take()

    def drop(self, unwanted: Callable[[Execution], bool]) -> list[Execution]:
        """Remove and return every one for which `unwanted` holds."""
        return [run for _, waiting in self._places.values() for run in waiting.drop(unwanted)]

    def __len__(self) -> int:
        return sum(len(waiting) for _, waiting in self._places.values())
