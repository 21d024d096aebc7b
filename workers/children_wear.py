"""When a child has served enough, and who takes its place.

Invariant: a child that is *worn* (all but used up) has a successor before it is *spent*: the successor is forked while the worn one still serves,
so that no task waits for it. A spent child gets no more orders; what runs in it runs to its end. Only a child at its memory limit is spent without
warning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from taskline.schemas.events import ErrorCategory
from taskline.workers import metrics
from taskline.workers.child import Kind
from taskline.workers.child_frames import FAILED, Message
from taskline.workers.child_limits import rss_bytes
from taskline.workers.children_link import ChildLink
from taskline.workers.children_server import ForkServer
from taskline.workers.registry import Task

log = structlog.get_logger(__name__)

# Why a child is replaced, in the metric.
TASKS, RSS, MEMORY = "tasks", "rss", "memory"
# How often a child's memory is looked at: that is a read of a file of some 20 to 50 µs, which would be felt at a thousand tasks a second.
LOOK_SECONDS = 1.0
# A successor is asked for when so much of worker.child_max_tasks is left: of very short tasks, too, enough for a fork.
_LEFT_SHARE = 10
# One that has kept more of its memory limit than this is replaced, since the next handler would be blamed for it.
_KEPT_SHARE = 0.5
_MB = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class WearLimits:
    """How long children serve; 0: no limit."""

    # Orders in all.
    max_tasks: int = 0
    # Resident memory after a task, in MB.
    max_rss_mb: int = 0
    # What a child may have more than at its birth, in MB, unless a task type says otherwise (worker.child_memory_mb).
    memory_mb: int = 0


NO_LIMITS = WearLimits()


class Wear:
    """The wear of one executor's children."""

    def __init__(
        self,
        server: ForkServer,
        kind: Kind,
        limits: WearLimits,
        *,
        on_gone: Callable[[ChildLink], None],
        on_made: Callable[[ChildLink], None],
    ) -> None:
        """Successors are children of `server`; `on_made` is told of each, and `on_gone` of its end."""
        self._server = server
        self._kind = kind
        self._on_gone = on_gone
        self._on_made = on_made
        self._max_tasks = limits.max_tasks
        self._worn_tasks = limits.max_tasks - limits.max_tasks // _LEFT_SHARE
        self._max_rss_bytes = limits.max_rss_mb * _MB
        # The least that a handler may have at most, as far as was seen; 0: there is no limit. What many share is never to blame one for.
        self._default_mb = limits.memory_mb if kind is Kind.PLAIN else 0
        self._least_mb = self._default_mb
        # When a child's memory was looked at last, by loop time.
        self._looked: dict[ChildLink, float] = {}
        # Why a child that still serves is worn; and the making of successors, by who is followed.
        self._worn: dict[ChildLink, str] = {}
        self._making: dict[ChildLink, asyncio.Task[None]] = {}

    @property
    def worn(self) -> int:
        """How many serve although they have a successor."""
        return len(self._worn)

    def given(self, link: ChildLink, task: Task) -> None:
        """It was given an order."""
        own_mb = task.conduct.memory_mb
        if own_mb is not None and self._kind is Kind.PLAIN:
            self._least_mb = min(self._least_mb or own_mb, own_mb)
        if self._max_tasks and link.orders >= self._worn_tasks:
            self._wear_out(link, TASKS)

    def spent(self, link: ChildLink) -> str | None:
        """Why it gets no more orders, as far as is known before it answers; None: it gets them."""
        if self._max_tasks and link.orders >= self._max_tasks:
            return TASKS
        # What is too large goes when its successor is there, or when there will be none.
        return RSS if self._worn.get(link) == RSS and link not in self._making else None

    def spent_by(self, link: ChildLink, task: Task, answer: Message) -> str | None:
        """As `spent`, with its answer to an order to run `task`."""
        if out_of_memory(answer):
            return MEMORY
        if self._max_rss_bytes or self._least_mb:
            own_mb = task.conduct.memory_mb
            # What may have more than others is looked at each time: what it left is much for them.
            why = self._look(link, at_once=own_mb is not None and own_mb > self._least_mb)
            if why == MEMORY:
                return why
            if why is not None:
                self._wear_out(link, why)
        return self.spent(link)

    def retire(self, link: ChildLink, why: str) -> None:
        """It was found spent, and its executor gives it no more orders."""
        metrics.CHILDREN_RECYCLED.labels(why).inc()
        log.info("a child process is replaced", pid=link.pid, reason=why, tasks=link.orders)
        self._wear_out(link, why)
        del self._worn[link]

    def forget(self, link: ChildLink) -> None:
        """It is gone."""
        self._looked.pop(link, None)
        self._worn.pop(link, None)

    def close(self) -> None:
        """Make no more successors."""
        for making in self._making.values():
            making.cancel()

    def _look(self, link: ChildLink, *, at_once: bool) -> str | None:
        now = asyncio.get_running_loop().time()
        if not at_once and now - self._looked.get(link, -LOOK_SECONDS) < LOOK_SECONDS:
            return None
        self._looked[link] = now
        rss = rss_bytes(link.pid)
        if rss is None:
            return None
        if self._least_mb and rss - link.born_bytes > self._least_mb * _MB * _KEPT_SHARE:
            return MEMORY
        return RSS if 0 < self._max_rss_bytes < rss else None

    def _wear_out(self, link: ChildLink, why: str) -> None:
        if link in self._worn:
            return
        self._worn[link] = why
        making = asyncio.get_running_loop().create_task(self._make())
        self._making[link] = making
        making.add_done_callback(lambda _: self._making.pop(link, None))

    async def _make(self) -> None:
        try:
            link = await ChildLink.start(self._server, self._kind, self._on_gone)
        except OSError as error:
            # The place is filled when it is needed.
            log.warning("no successor of a child process can be started", error=str(error))
            return
        self._on_made(link)
        await link.up


def out_of_memory(answer: Message) -> bool:
    """Whether a handler got no memory in its child."""
    return answer[0] == FAILED and answer[2].category is ErrorCategory.MEMORY
