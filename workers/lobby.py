"""What an engine has been given and has not begun, in all the ways in which it can wait.

In the buffer: for a slot, behind the gates of its executor and its limits (`dispatch`). Deferred: for its payload's schema to become known. As
a copy: for the end of the same attempt, which is in flight from another place in the log.

Invariant: a record is in one of these, or it has been taken; all but an execution that is run once more (a suspect) count among
what its feed has buffered, and so against worker.prefetch. Nothing of an assignment stays when it leaves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence

import structlog

from taskline.schemas.events import Priority
from taskline.workers import metrics
from taskline.workers.admission import Admitted, NotYet, admit
from taskline.workers.choice import executor_for
from taskline.workers.dispatch import ALL, Dispatcher, Gate
from taskline.workers.duplicates import Duplicates, Verdict, key_of
from taskline.workers.execution import Execution
from taskline.workers.executor import Executor
from taskline.workers.feed import Assignment, Waiting
from taskline.workers.ports import WorkerPorts
from taskline.workers.registry import Registry

log = structlog.get_logger(__name__)

# A submitter registers its type before it submits, but this process may hear of the one after the other.
SCHEMA_PATIENCE_SECONDS = 10.0
_SCHEMA_PAUSE_SECONDS = 0.25


class Lobby:
    """Hands out what can begin, the most urgent first."""

    def __init__(
        self,
        registry: Registry,
        ports: WorkerPorts,
        *,
        dispatcher: Dispatcher[Execution],
        gates: Callable[[Executor, Admitted, Priority], tuple[Gate, ...]],
        changed: Callable[[], None],
    ) -> None:
        """Begin empty.

        Args:
            registry: the tasks to serve.
            ports: the codec, the schemas of payloads, and the executors.
            dispatcher: the buffer, empty.
            gates: what a task stands behind.
            changed: called when something that waited by itself can be taken.
        """
        self._registry = registry
        self._ports = ports
        self._gates = gates
        self._changed = changed
        self._buffer = dispatcher
        # What needs no slot, since it is not run.
        self._refused: deque[Execution] = deque()
        self._deferred: set[Waiting] = set()
        self._duplicates: Duplicates[Assignment, Waiting] = Duplicates()

    def __len__(self) -> int:
        """How many wait for a slot, or to be refused."""
        return len(self._buffer) + len(self._refused)

    def offer(self, waiting: Sequence[Waiting]) -> None:
        """Take in records; copies of what has ended are done."""
        for each in waiting:
            self._take_in(each)

    def refused(self) -> Execution | None:
        """Take what is refused; None: there is none."""
        return self._left(self._refused.popleft()) if self._refused else None

    def next(self, is_open: Callable[[Gate], bool], among: Collection[Priority] = ALL) -> Execution | None:
        """Take what comes next of these priorities; None: nothing can begin."""
        run = self._buffer.take(is_open, among)
        return None if run is None else self._left(run)

    def opened(self, gate: Gate) -> None:
        """A gate may have opened."""
        self._buffer.opened(gate)

    def run_alone(self, run: Execution) -> None:
        """Run a record again whose process died of something beside it: the same attempt, as a suspect."""
        assert run.admitted is not None  # noqa: S101 - it was begun
        executor = executor_for(run.admitted.task, self._ports, suspect=True)
        following = Execution(run.waiting, run.admitted, executor, suspect=True)
        following.key = run.key
        self._put(following)

    def over(self, run: Execution, *, ended: bool) -> None:
        """Resolve the copies of what was taken: done with it if it has ended, else (it was handed back) to be run in its place."""
        if run.key is None:
            return
        if ended:
            for copy in self._duplicates.ended(run.key):
                _drop(copy)
        else:
            for copy in self._duplicates.handed_back(run.key):
                self._take_in(copy)

    def leave(self, leaving: Collection[Assignment]) -> None:
        """Drop what waits of these assignments."""

        def goes(waiting: Waiting) -> bool:
            return waiting.assignment in leaving

        # First: what is handed back below must not bring them in.
        dropped = self._duplicates.leave(leaving, goes)
        for run in self._buffer.drop(lambda run: goes(run.waiting)):
            self.over(run, ended=False)
            if run.buffered:
                dropped.append(run.waiting)
        kept = [run for run in self._refused if not goes(run.waiting)]
        dropped += [run.waiting for run in self._refused if goes(run.waiting)]
        self._refused = deque(kept)
        dropped += [waiting for waiting in self._deferred if goes(waiting)]
        self._deferred.difference_update(dropped)
        for waiting in dropped:
            waiting.assignment.feed.left_buffer(1)

    def _left(self, run: Execution) -> Execution:
        if run.buffered:
            run.buffered = False
            run.waiting.assignment.feed.left_buffer(1)
        return run

    def _take_in(self, waiting: Waiting) -> None:
        admission = admit(waiting.record, self._registry, self._ports.codec, self._ports.types)
        if isinstance(admission, Admitted):
            self._admitted(waiting, admission)
            return
        if isinstance(admission, NotYet):
            waiting.tries += 1
            waited = waiting.tries * _SCHEMA_PAUSE_SECONDS
            if admission.rejection is None or waited <= SCHEMA_PATIENCE_SECONDS:
                self._deferred.add(waiting)
                asyncio.get_running_loop().call_later(_SCHEMA_PAUSE_SECONDS, self._again, waiting)
                return
            admission = admission.rejection
        run = Execution(waiting, None, None, refused=admission)
        run.buffered = True
        self._refused.append(run)

    def _admitted(self, waiting: Waiting, admitted: Admitted) -> None:
        key = key_of(admitted.submission.task_id, admitted.attempt)
        verdict = self._duplicates.take(key, waiting.assignment, waiting)
        if verdict is not Verdict.RUN:
            if verdict is Verdict.DONE:
                _drop(waiting)
            return
        suspect = admitted.deaths > 0 or waiting.suspect
        executor = executor_for(admitted.task, self._ports, suspect=suspect)
        run = Execution(waiting, admitted, executor, suspect=suspect)
        run.key, run.buffered = key, True
        self._put(run)

    def _put(self, run: Execution) -> None:
        assert run.admitted is not None  # noqa: S101 - what is refused waits elsewhere
        assert run.executor is not None  # noqa: S101
        priority = run.waiting.priority
        run.gates = self._gates(run.executor, run.admitted, priority)
        self._buffer.put(priority, run.admitted.submission.tenant, run.gates, run)

    def _again(self, waiting: Waiting) -> None:
        if waiting in self._deferred:
            self._deferred.discard(waiting)
            self._take_in(waiting)
            self._changed()


def _drop(copy: Waiting) -> None:
    """A copy of an attempt that has ended here is done."""
    place = copy.record.position
    metrics.DUPLICATES.inc()
    log.info(
        "duplicate of an attempt that has ended here; not run",
        topic=place.topic,
        partition=place.partition,
        offset=place.offset,
    )
    copy.assignment.feed.left_buffer(1)
    copy.assignment.complete(place.offset)
