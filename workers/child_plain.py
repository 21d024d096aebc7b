"""A child that runs one handler at a time, in its main thread: plain functions, and coroutines each in a loop of its own.

Invariant: between two handlers nothing of the first is left running in the main thread, so that a death is the work of the
handler that runs.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Any

from taskline.infra.role import loop_factory
from taskline.workers.child_alarm import Alarm
from taskline.workers.child_answers import Answers, Order
from taskline.workers.child_frames import RUN, read_message
from taskline.workers.child_limits import limited_cpu
from taskline.workers.child_line import PlainLine, Unbuffered
from taskline.workers.executor import refuse_awaitable
from taskline.workers.soft import SoftLimited


def serve_plain(sock: socket.socket, answers: Answers) -> None:
    """Run what the worker sends until it hangs up.

    Raises:
        CorruptFrame: what it sent can't be read.
    """
    alarm = Alarm()
    stream = Unbuffered(sock)
    while (message := read_message(stream)) is not None:
        # Others are STOPs that came too late.
        if message[0] == RUN:
            line = PlainLine(sock, message[1])
            order = answers.order(message, line)
            answer = order if isinstance(order, bytes) else _run(order, answers, alarm)
            line.close()
            sock.sendall(answer)
            # Not kept while waiting for the next one: they hold the last handler's arguments.
            del order, answer
        del message


def _run(order: Order, answers: Answers, alarm: Alarm) -> bytes:
    answers.memory.set(order.task.conduct.memory_mb)
    return limited_cpu(order.task, partial(_handle, order, answers, alarm))


def _handle(order: Order, answers: Answers, alarm: Alarm) -> bytes:
    try:
        payload = order.task.instance(order.value)
        seconds = order.soft_seconds
        if order.task.is_async:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                result, error = runner.run(_coroutine(order, payload, seconds))
            if error is not None:
                return answers.failure(order, error)
        else:
            call = partial(order.task.call, payload, order.ctx)
            result = call() if seconds is None else alarm.call(call, seconds)
            refuse_awaitable(order.task, result)
    except BaseException as error:
        return answers.failure(order, error)
    return answers.result(order, result)


async def _coroutine(
    order: Order, payload: object, seconds: float | None
) -> tuple[Any, BaseException | None]:
    # As a value: SystemExit and KeyboardInterrupt would end the loop before it is tidied up.
    try:
        coroutine = order.task.call(payload, order.ctx)
        return await (coroutine if seconds is None else SoftLimited(coroutine, seconds)), None
    except BaseException as error:
        return None, error
