"""What a child makes of an order to run a task: the handler's arguments before, the answer's frame after."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from taskline.schemas.events import ErrorCategory
from taskline.workers.child_frames import FAILED, RESULT, Message, context_of, encode
from taskline.workers.child_limits import MemoryLimit
from taskline.workers.context import TaskContext
from taskline.workers.failure import Failure, failure_of
from taskline.workers.line import Line
from taskline.workers.outcome import MAX_MESSAGE_BYTES, ErrorInfo, describe_error, encode_result, head
from taskline.workers.registry import Registry, Task

_MS = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A task to run."""

    number: int
    task: Task
    # Plain values; `Task.instance` can raise, and then it is the task that has failed.
    value: Any
    ctx: TaskContext

    @property
    def soft_seconds(self) -> float | None:
        """What is left until the soft limit; None: there is none."""
        deadline = self.ctx.soft_deadline_ms
        return None if deadline is None else deadline / _MS - time.time()


class Answers:
    """Reads orders for one registry, and writes their answers."""

    def __init__(self, registry: Registry, max_result_bytes: int, memory: MemoryLimit) -> None:
        """Results are bounded by `max_result_bytes`, the process by `memory`."""
        self._registry = registry
        self.memory = memory
        self._max_result_bytes = max_result_bytes

    def order(self, message: Message, line: Line) -> Order | bytes:
        """What a RUN message orders, with its handler's `line`; a frame that refuses it, if there is no such task here."""
        _, number, name, value, context = message
        task = self._registry.get(name)
        if task is None:
            info = ErrorInfo(
                error_class="InvalidRegistry", message=f"the registry has no task {name!r} in a child process"
            )
            return encode((FAILED, number, Failure(info=info, category=ErrorCategory.UNKNOWN)))
        return Order(number=number, task=task, value=value, ctx=context_of(context, line))

    def result(self, order: Order, result: Any) -> bytes:  # noqa: ANN401 - whatever a handler returned
        """The frame for what the handler returned; that it failed, if that can't be recorded."""
        try:
            return encode((RESULT, order.number, encode_result(result, self._max_result_bytes)))
        except BaseException as error:
            return self.failure(order, error)

    def failure(self, order: Order, error: BaseException) -> bytes:
        """The frame for what the handler raised."""
        try:
            if isinstance(error, MemoryError):
                return encode((FAILED, order.number, self._at_limit(order, error)))
            return encode((FAILED, order.number, failure_of(error, order.task)))
        except BaseException:
            # A user's own code may judge errors, and may fail at it.
            failure = Failure(info=describe_error(error), category=ErrorCategory.UNKNOWN)
            return encode((FAILED, order.number, failure))

    def _at_limit(self, order: Order, error: MemoryError) -> Failure:
        limit_mb = self.memory.limit_mb
        self.memory.reserve()
        failure = failure_of(error, order.task)
        if limit_mb is None:
            return failure
        limit = f"out of memory: its child process may have {limit_mb:g} MB more than at its birth"
        message = f"{limit}; {failure.info.message}" if failure.info.message else limit
        return replace(failure, info=replace(failure.info, message=head(message, MAX_MESSAGE_BYTES)))
