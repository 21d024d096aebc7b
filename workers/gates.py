"""What an engine's executions stand behind, in one place: executors that are full, limits that are used up, orders that are kept.

Invariant: an execution enters all its gates when it takes its slot; it leaves its limits when its handler is over, and its place in an order only when its record is done
or handed back. Whoever closes a gate says when it opens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from taskline.schemas.events import Priority
from taskline.workers.admission import Admitted
from taskline.workers.dispatch import Gate
from taskline.workers.execution import Execution
from taskline.workers.executor import Executor
from taskline.workers.limits import FOREVER, UNLIMITED, Limits, TypeLimits
from taskline.workers.registry import Registry
from taskline.workers.slots import Slots

_EXECUTOR, _ORDER = "executor", "order"


class Gates:
    """The gates of one engine, on its event loop."""

    def __init__(self, registry: Registry, slots: Slots, *, opened: Callable[[Gate], None]) -> None:
        """The limits are those of `registry`'s tasks; `opened` is called with each gate that may have opened, but for executors."""
        own = {task.name: task.conduct.limits for task in registry if task.conduct.limits != UNLIMITED}
        self._limits = Limits(own)
        self._slots = slots
        self._opened = opened
        # Orders in which something runs.
        self._ordered: set[Gate] = set()
        # Limits of a rate that will open by themselves.
        self._timers: dict[Gate, asyncio.TimerHandle] = {}

    def of(self, executor: Executor, admitted: Admitted, priority: Priority) -> tuple[Gate, ...]:
        """What an execution stands behind that was read from a topic of `priority`."""
        gates: tuple[Gate, ...] = (self._slots.gate(executor, high=priority is Priority.HIGH),)
        gates += self._limits.gates(admitted.task.name, admitted.concurrency_key)
        key = admitted.submission.affinity_key
        if key is not None and admitted.task.conduct.ordering == "key":
            gates += ((_ORDER, admitted.task.name, key),)
        return gates

    def configure(self, overrides: Mapping[str, TypeLimits]) -> None:
        """Let other limits apply, to what is read from now on; see `Limits.configure`."""
        self._limits.configure(overrides)
        # What waits may go now; a gate that is closed still is found to be so.
        for gate in list(self._timers):
            self._timers.pop(gate).cancel()
            self._opened(gate)
        for gate in self._limits.known():
            self._opened(gate)

    def is_open(self, gate: Gate) -> bool:
        """Whether one may go through; of a rate's gate that is closed, when it opens is seen to."""
        assert isinstance(gate, tuple)  # noqa: S101 - made by `of`
        kind = gate[0]
        if kind == _EXECUTOR:
            return self._slots.is_open(gate)
        if kind == _ORDER:
            return gate not in self._ordered
        loop = asyncio.get_running_loop()
        until = self._limits.closed_until(gate, loop.time())
        if until is None:
            return True
        if until != FOREVER and gate not in self._timers:
            self._timers[gate] = loop.call_at(until, self._due, gate)
        return False

    def enter(self, run: Execution) -> None:
        """Its slot is taken."""
        if len(run.gates) > 1:
            run.entered = run.gates[1:]
            self._limits.enter(_limits(run), asyncio.get_running_loop().time())
            self._ordered.update(gate for gate in run.entered if _kind(gate) == _ORDER)

    def leave(self, run: Execution) -> None:
        """Its handler is over, or is not run; once is enough."""
        if run.entered and (limits := _limits(run)):
            run.entered = tuple(gate for gate in run.entered if gate not in limits)
            self._limits.leave(limits)
            for gate in limits:
                self._opened(gate)

    def over(self, run: Execution) -> None:
        """Its record is done, or handed back; its handler is over."""
        for gate in run.entered:
            if _kind(gate) == _ORDER:
                self._ordered.discard(gate)
                self._opened(gate)
        run.entered = _limits(run)

    def _due(self, gate: Gate) -> None:
        self._timers.pop(gate, None)
        self._opened(gate)


def _kind(gate: Gate) -> object:
    assert isinstance(gate, tuple)  # noqa: S101 - made by `Gates.of`
    return gate[0]


def _limits(run: Execution) -> tuple[Gate, ...]:
    """The limits that it has entered and not left."""
    return tuple(gate for gate in run.entered if _kind(gate) != _ORDER)
