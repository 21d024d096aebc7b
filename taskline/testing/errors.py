"""What goes wrong in a test itself, as opposed to in the tasks that it drives."""

from __future__ import annotations

from collections.abc import Iterable

from taskline.errors import TasklineError


class Deadlock(TasklineError):
    """Nothing is ready, no timer is set and nothing outside will wake the loop: the wait would be for ever."""

    def __init__(self, waiting: Iterable[str], *, reason: str) -> None:
        """List the tasks that wait, each with the place where it does."""
        self.waiting = tuple(waiting)
        places = "\n  ".join(self.waiting) or "(no task at all)"
        super().__init__(f"deadlock: {reason}; waiting:\n  {places}")


class NeverIdle(TasklineError):
    """Work was still outstanding when the virtual time that the test allowed was over."""

    def __init__(self, outstanding: Iterable[str], *, limit_seconds: float) -> None:
        """List what was outstanding, in words."""
        self.outstanding = tuple(outstanding)
        super().__init__(
            f"not idle after {limit_seconds:g} virtual seconds: {'; '.join(self.outstanding) or 'unknown'}"
        )


class FencedCommit(TasklineError):
    """A commit came from a member that does not own the partition (any more)."""


class BackgroundError(TasklineError):
    """Something failed that nobody waited for: a role that ended by itself, a callback, a forgotten task."""
