"""What became of submitted tasks, in the numbers.

Invariant: each task of a request whose body could be read is counted once, by what its caller is told of it: `accepted`, `replayed` (its
idempotency key had come before), `duplicate` (its dedup window is another task's), or the problem's slug, such as `idempotency-conflict`,
`delivery-unknown` or `unknown-task-type`.
"""

from __future__ import annotations

from enum import Enum

from prometheus_client import Counter

from taskline.api.dedup import Duplicate
from taskline.api.errors import problem_of
from taskline.api.metrics import ApiMetrics
from taskline.api.problems import INTERNAL_ERROR, ProblemError
from taskline.api.submissions import Outcome

_ACCEPTED, _REPLAYED, _DUPLICATE = "accepted", "replayed", "duplicate"


class Via(Enum):
    """Which request a task came with; the label `via`."""

    SINGLE = "single"
    BATCH = "batch"


class SubmissionCounts:
    """Counts the tasks that came one way."""

    def __init__(self, metrics: ApiMetrics, via: Via) -> None:
        """Count in the app's metrics."""
        self._counter = metrics.submitted
        self._via = via.value
        # Looking a labelled child up costs more than counting with it.
        self._children: dict[str, Counter] = {}

    def count(self, result: Outcome | Exception) -> None:
        """Count one task."""
        outcome = _name(result)
        child = self._children.get(outcome)
        if child is None:
            child = self._children[outcome] = self._counter.labels(self._via, outcome)
        child.inc()


def _name(result: Outcome | Exception) -> str:
    if isinstance(result, Exception):
        return _slug(result)
    if isinstance(result, Duplicate):
        return _DUPLICATE
    return _REPLAYED if result.replayed else _ACCEPTED


def _slug(error: Exception) -> str:
    """The problem's name; whatever is no problem is answered as a fault of the server."""
    if isinstance(error, ProblemError):
        return error.kind.slug
    try:
        return problem_of(error).kind.slug
    except Exception:
        return INTERNAL_ERROR.slug
