"""A virtual loop on which processes take turns at random, and can stand still.

Invariant: callbacks of one process run in the order in which they became ready, as asyncio promises; between processes, which share
nothing but the network, every order is possible. So what a seed shuffles is never an order that code may rely on.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

from taskline.testing.loop import VirtualLoop
from taskline.testing.process import VirtualProcess, current_process, process_of

_numbers = itertools.count()


class NumberedFuture(asyncio.Future):
    """Hashed by its number: sets of futures keep their order from run to run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._number = next(_numbers)

    def __hash__(self) -> int:
        return self._number


class NumberedTask(asyncio.Task):
    """As `NumberedFuture`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # asyncio puts a task into a set while it is made.
        self._number = next(_numbers)
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._number


class SimulatedLoop(VirtualLoop):
    """`VirtualLoop` with an interleaving drawn from `rng`."""

    def __init__(self, rng: random.Random) -> None:
        global _numbers  # noqa: PLW0603 - one run at a time
        _numbers = itertools.count()
        self._rng = rng
        # Shares of ready processes that are kept waiting for another round.
        self.hold_back = 0.0
        self._held: list[Any] = []
        self._frozen: dict[VirtualProcess, list[Any]] = {}
        super().__init__()
        self.set_task_factory(_make_task)

    def create_future(self) -> asyncio.Future[Any]:
        return NumberedFuture(loop=self)

    def freeze(self, process: VirtualProcess) -> None:
        """Nothing of a process runs until `thaw`, as after SIGSTOP."""
        self._frozen.setdefault(process, [])

    def thaw(self, process: VirtualProcess) -> None:
        """What became ready meanwhile runs in its order."""
        self._held += self._frozen.pop(process, [])

    def thaw_all(self) -> None:
        """As `thaw`, of every process."""
        for process in tuple(self._frozen):
            self.thaw(process)

    def _run_once(self) -> None:
        if self._ready or self._held:
            self._mix()
        super()._run_once()  # type: ignore[misc]

    def _mix(self) -> None:
        queues: dict[VirtualProcess | None, list[Any]] = {}
        for handle in (*self._held, *self._ready):
            process = process_of(handle._context)
            if process in self._frozen and not process.dead:
                self._frozen[process].append(handle)
            else:
                queues.setdefault(process, []).append(handle)
        self._held = []
        self._ready.clear()
        if len(queues) > 1 and self.hold_back:
            for process in list(queues)[1:]:
                if self._rng.random() < self.hold_back:
                    self._held += queues.pop(process)
        if len(queues) == 1:
            self._ready.extend(*queues.values())
            return
        sources = [process for process, handles in queues.items() for _ in handles]
        self._rng.shuffle(sources)
        turns = {process: iter(handles) for process, handles in queues.items()}
        self._ready.extend(next(turns[process]) for process in sources)


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, *, context: Any = None) -> asyncio.Task[Any]:
    task = NumberedTask(coroutine, loop=loop, context=context)
    process = current_process() if context is None else process_of(context)
    if process is not None:
        process.adopt(task)
    return task
