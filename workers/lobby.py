"""What an engine has been given and has not begun, in all the ways in which it can wait.

In the buffer: for a slot. Deferred: for its payload's schema to become known. Parked: for an executor that is full while slots are
free. As a copy: for the end of the same attempt, which is in flight from another place in the log.

Invariant: a record is in one of these, or it has been taken; all but an execution that is run once more (a suspect) count among
what its feed has buffered, and so against worker.prefetch. Nothing of an assignment stays when it leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

import structlog

from taskline.schemas.events import Priority
from taskline.workers import metrics
from taskline.workers.admission import Admitted, NotYet, admit
from taskline.workers.choice import executor_for
from taskline.workers.dispatch import StrictDispatcher
from taskline.workers.duplicates import Duplicates, Verdict, key_of
from taskline.workers.execution import Execution
from taskline.workers.executor import Executor
from taskline.workers.feed import Assignment, Waiting
from taskline.workers.parking import Parking
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
        room: Callable[[Executor], bool],
        changed: Callable[[], None],
    ) -> None:
        """Begin empty.

        Args:
            registry: the tasks to serve.
            ports: the codec, the schemas of payloads, and the executors.
            room: whether an executor can take one more.
            changed: called when something that waited by itself can be taken.
        """
        self._registry = registry
        self._ports = ports
        self._room = room
        self._changed = changed
        self._buffer: StrictDispatcher[Waiting] = StrictDispatcher()
        self._deferred: set[Waiting] = set()
        self._parked = Parking()
        self._duplicates: Duplicates[Assignment, Waiting] = Duplicates()

    def __len__(self) -> int:
        """How many wait in the buffer."""
        return len(self._buffer)

    def offer(self, waiting: Sequence[Waiting], priority: Priority) -> None:
        """Take in records of one priority."""
        for each in waiting:
            self._buffer.put(priority, each)

    def next(self) -> Execution | None:
        """Take what comes next: an execution whose executor has room, or one that is refused; None: nothing can begin.

        On the way, what can't begin yet is parked or deferred, and copies of what has ended are done.
        """
        run = self._parked.take(self._room, self._buffer.urgency()) if len(self._parked) else None
        while run is None and (waiting := self._buffer.take()) is not None:
            run = self._admit(waiting)
        if run is not None and run.buffered:
            run.buffered = False
            run.waiting.assignment.feed.left_buffer(1)
        return run

    def run_alone(self, run: Execution) -> None:
        """Run a record again whose process died of something beside it: the same attempt, as a suspect."""
        assert run.admitted is not None  # noqa: S101 - it was begun
        executor = executor_for(run.admitted.task, self._ports, suspect=True)
        following = Execution(run.waiting, run.admitted, executor, suspect=True)
        following.key = run.key
        self._parked.put(following)

    def over(self, run: Execution, *, ended: bool) -> None:
        """Resolve the copies of what was taken: done with it if it has ended, else (it was handed back) to be run in its place."""
        if run.key is None:
            return
        if ended:
            for copy in self._duplicates.ended(run.key):
                _drop(copy)
        else:
            for copy in self._duplicates.handed_back(run.key):
                self._buffer.put(copy.priority, copy)

    def leave(self, leaving: Collection[Assignment]) -> None:
        """Drop what waits of these assignments."""

        def goes(waiting: Waiting) -> bool:
            return waiting.assignment in leaving

        dropped = self._buffer.drop(goes)
        dropped += self._duplicates.leave(leaving, goes)
        for run in self._parked.drop(lambda run: goes(run.waiting)):
            self.over(run, ended=False)
            if run.buffered:
                dropped.append(run.waiting)
        dropped += [waiting for waiting in self._deferred if goes(waiting)]
        self._deferred.difference_update(dropped)
        for waiting in dropped:
            waiting.assignment.feed.left_buffer(1)

    def _admit(self, waiting: Waiting) -> Execution | None:
        admission = admit(waiting.record, self._registry, self._ports.codec, self._ports.types)
        if isinstance(admission, Admitted):
            return self._admitted(waiting, admission)
        if isinstance(admission, NotYet):
            waiting.tries += 1
            waited = waiting.tries * _SCHEMA_PAUSE_SECONDS
            if admission.rejection is None or waited <= SCHEMA_PATIENCE_SECONDS:
                self._deferred.add(waiting)
                asyncio.get_running_loop().call_later(_SCHEMA_PAUSE_SECONDS, self._again, waiting)
                return None
            admission = admission.rejection
        run = Execution(waiting, None, None, refused=admission)
        run.buffered = True
        return run

    def _admitted(self, waiting: Waiting, admitted: Admitted) -> Execution | None:
        key = key_of(admitted.submission.task_id, admitted.attempt)
        verdict = self._duplicates.take(key, waiting.assignment, waiting)
        if verdict is not Verdict.RUN:
            if verdict is Verdict.DONE:
                _drop(waiting)
            return None
        suspect = admitted.deaths > 0
        executor = executor_for(admitted.task, self._ports, suspect=suspect)
        run = Execution(waiting, admitted, executor, suspect=suspect)
        run.key, run.buffered = key, True
        if self._room(executor):
            return run
        self._parked.put(run)
        return None

    def _again(self, waiting: Waiting) -> None:
        if waiting in self._deferred:
            self._deferred.discard(waiting)
            self._buffer.put(waiting.priority, waiting)
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
