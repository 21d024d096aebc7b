from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from taskline.testing.broker import MemoryBroker
from taskline.testing.clock import VirtualClock
from taskline.testing.loop import VirtualLoop
from taskline.testing.process import track


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with contextlib.closing(VirtualLoop(io_patience_seconds=0.2, thread_patience_seconds=0.5)) as made:
        track(made)
        yield made
        tasks = asyncio.all_tasks(made)
        for task in tasks:
            task.cancel()
        if tasks:
            made.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


@pytest.fixture
def clock(loop: VirtualLoop) -> VirtualClock:
    return VirtualClock(loop)


@pytest.fixture
def broker(clock: VirtualClock) -> MemoryBroker:
    return MemoryBroker(clock)


@pytest.fixture
def run(loop: VirtualLoop) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    return loop.run_until_complete
