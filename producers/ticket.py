"""What a thread holds while its record is on the way: cheaper than a future, since millions are made."""

from __future__ import annotations

import threading

from taskline.errors import DeliveryError
from taskline.infra.log import Position
from taskline.schemas.ids import TaskId


class Ticket:
    """The outcome of one append, set once by the publisher's thread, waited for by at most one other."""

    __slots__ = ("_wake", "index", "outcome", "task_id")

    def __init__(self, task_id: TaskId, index: int) -> None:
        """Begin without an outcome.

        Args:
            task_id: the task that was sent.
            index: its place among the items of a `submit_many`, else 0.
        """
        self.task_id = task_id
        self.index = index
        self.outcome: Position | DeliveryError | None = None
        self._wake: threading.Lock | None = None

    def resolve(self, outcome: Position | DeliveryError) -> None:
        """Set the outcome and wake the waiter."""
        # First the outcome, then the look for a waiter; `wait` does it the other way round, so that one of the two sees.
        self.outcome = outcome
        if self._wake is not None:
            self._wake.release()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for the outcome; False: none in time."""
        if self.outcome is None:
            wake = threading.Lock()
            wake.acquire()
            self._wake = wake
            if self.outcome is None:
                wake.acquire(timeout=timeout_seconds)
        return self.outcome is not None
