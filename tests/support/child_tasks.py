"""Handlers for child processes under test."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taskline.errors import HandBack, SoftTimeout
from taskline.workers import Registry, TaskContext

registry = Registry()


@dataclass
class Parcel:
    name: str
    weight: int = 1


class Strange(Exception):
    """Can't be pickled: it is made of two arguments, and holds a lock."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")
        self.lock = threading.Lock()


def _both(name: str, handler: Any) -> None:
    """A plain handler, and the same as a coroutine."""
    registry.task(f"{name}")(handler)

    async def coroutine(payload: Any, ctx: TaskContext) -> Any:
        return handler(payload, ctx)

    registry.task(f"{name}.async")(coroutine)


def echo(payload: Any, ctx: TaskContext) -> Any:
    return payload


def who(payload: Any, ctx: TaskContext) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "task_id": str(ctx.task_id),
        "attempt": ctx.attempt,
        "priority": ctx.priority,
        "traceparent": ctx.traceparent,
    }


def fail(payload: str, ctx: TaskContext) -> None:
    raise LookupError(payload)


def strange(payload: Any, ctx: TaskContext) -> None:
    raise Strange("very", "strange")


def leave(payload: int, ctx: TaskContext) -> None:
    sys.exit(payload)


def interrupt(payload: Any, ctx: TaskContext) -> None:
    raise KeyboardInterrupt


def no_json(payload: Any, ctx: TaskContext) -> Any:
    return object()


def end(payload: int, ctx: TaskContext) -> None:
    os._exit(payload)


def segfault(payload: Any, ctx: TaskContext) -> None:
    ctypes.string_at(0)


def large(payload: int, ctx: TaskContext) -> str:
    return "x" * payload


def babble(payload: Any, ctx: TaskContext) -> None:
    """Write garbage into every socket of the process, as a stray write of a C library may."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), b"\xff" * 64)
    time.sleep(30)


for _handler in (
    echo, who, fail, strange, leave, interrupt, no_json, end, segfault, large, babble
):  # fmt: skip
    _both(_handler.__name__, _handler)


@registry.task("parcel")
def parcel(payload: Parcel) -> str:
    return f"{type(payload).__name__} {payload.name} {payload.weight}"


@registry.task("parcel.async")
async def parcel_async(payload: Parcel) -> str:
    return f"{type(payload).__name__} {payload.name} {payload.weight}"


@registry.task("fine", schema='"string"')
def fine(payload: str) -> str:
    return payload


@registry.task("hang")
def hang(payload: str) -> None:
    """Say who hangs, and take no notice of anything."""
    Path(payload).write_text(str(os.getpid()))
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(60)


@registry.task("hang.family")
def hang_family(payload: str) -> None:
    """As `hang`, with a program that the handler has started."""
    program = subprocess.Popen(["/bin/sleep", "60"])
    Path(payload).write_text(f"{os.getpid()} {program.pid}")
    time.sleep(60)


@registry.task("block")
async def block(payload: float) -> int:
    """Hold the loop up."""
    time.sleep(payload)  # noqa: ASYNC251 - as said
    return os.getpid()


@registry.task("sleep")
async def sleep(payload: float) -> str:
    await asyncio.sleep(payload)
    return "slept"


@registry.task("sleep.plain")
def sleep_plain(payload: float) -> int:
    time.sleep(payload)
    return os.getpid()


@registry.task("tidy")
async def tidy(payload: str) -> None:
    """Leave a note when cancelled, after some time."""
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.05)
        Path(payload).write_text("tidied up")  # noqa: ASYNC240 - short


@registry.task("stubborn")
async def stubborn(payload: Any) -> str:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return "finished all the same"
    return "slept"


@registry.task("cancels-itself")
async def cancels_itself(payload: Any) -> None:
    raise asyncio.CancelledError


@registry.task("soft")
def soft(payload: float) -> str:
    try:
        deadline = time.monotonic() + payload
        while time.monotonic() < deadline:
            pass
    except SoftTimeout:
        return "in time"
    return "no limit"


@registry.task("soft.uncaught")
def soft_uncaught(payload: float) -> None:
    time.sleep(payload)


@registry.task("soft.async")
async def soft_async(payload: float) -> str:
    try:
        await asyncio.sleep(payload)
    except SoftTimeout:
        await asyncio.sleep(0.01)
        return "in time"
    return "no limit"


@registry.task("soft.uncaught.async")
async def soft_uncaught_async(payload: float) -> None:
    await asyncio.sleep(payload)


@registry.task("exits-later")
async def exits_later(payload: float) -> None:
    await asyncio.sleep(payload)
    os._exit(7)


@registry.task("family")
def family(payload: int) -> list[int]:
    """Handlers may have process pools."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(abs, [-payload, payload])


@registry.task("terminates")
def terminates(payload: Any) -> int:
    """What handlers start hears signals as usual."""
    with subprocess.Popen(["/bin/sleep", "60"]) as program:
        program.send_signal(signal.SIGTERM)
        return program.wait(10)


_KEPT: list[bytes] = []
_MB = 1024 * 1024


def hoard(payload: int) -> int:
    """Have so many MB for a moment."""
    return len(bytearray(payload * _MB)) // _MB


registry.task("hoard")(hoard)
registry.task("hoard.more", memory_mb=300)(hoard)
registry.task("hoard.less", memory_mb=32)(hoard)


@registry.task("hoard.c")
def hoard_c(payload: int) -> None:
    """As a library does that can't go on without memory."""
    try:
        bytearray(payload * _MB)
    except MemoryError:
        os.abort()


@registry.task("hoard.wordy", memory_mb=300)
def hoard_wordy(payload: int) -> None:
    raise MemoryError("w" * payload)


@registry.task("hoard.async")
async def hoard_async(payload: int) -> int:
    await asyncio.sleep(0.1)
    return hoard(payload)


@registry.task("keep")
def keep(payload: int) -> int:
    """Leak so many MB, and say who leaks."""
    _KEPT.append(b"x" * (payload * _MB))
    return os.getpid()


registry.task("keep.more", memory_mb=300)(keep)


@registry.task("keep.async")
async def keep_async(payload: int) -> int:
    return keep(payload)


@registry.task("spin", cpu_seconds=0.3)
def spin(payload: float) -> str:
    """Compute for so many seconds in C, where no signal handler of Python's is heard, and sleep as long."""
    time.sleep(payload)
    deadline = time.process_time() + payload
    while time.process_time() < deadline:
        sum(range(10**9 if payload > 1 else 10**5))
    return "spun"


@registry.task("spin.async", cpu_seconds=0.3, isolation="alone")
async def spin_async(payload: float) -> str:
    return spin(payload)


@registry.task("tells")
def tells(payload: list[list[Any]], ctx: TaskContext) -> None:
    """Say each, wait as long as it says, and end."""
    for fraction, message, seconds in payload:
        ctx.progress(fraction, message)
        time.sleep(seconds)


@registry.task("tells.async")
async def tells_async(payload: list[list[Any]], ctx: TaskContext) -> None:
    for fraction, message, seconds in payload:
        ctx.progress(fraction, message)
        await asyncio.sleep(seconds)


@registry.task("tells.much")
def tells_much(payload: float, ctx: TaskContext) -> int:
    """Speak as fast as can be, from threads of its own too, under a soft limit; how often."""
    said = [0]
    stop = threading.Event()

    def speak() -> None:
        while not stop.is_set():
            ctx.progress(0.5, "x" * 100)
            said[0] += 1

    threads = [threading.Thread(target=speak) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        deadline = time.monotonic() + payload
        while time.monotonic() < deadline:
            ctx.progress(0.5, "y" * 100)
            said[0] += 1
    except SoftTimeout:
        pass
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return said[0]


@registry.task("tells.wrong")
def tells_wrong(payload: float, ctx: TaskContext) -> None:
    ctx.progress(payload)


@registry.task("tells.forked")
def tells_forked(payload: None, ctx: TaskContext) -> None:
    """What a handler forks has no say."""
    pid = os.fork()
    if not pid:
        ctx.progress(0.9, "from a fork")
        os._exit(0)
    os.waitpid(pid, 0)


def _heeds(payload: float, ctx: TaskContext) -> str:
    deadline = time.monotonic() + payload
    while time.monotonic() < deadline:
        if ctx.should_stop:
            return "stopped"
        time.sleep(0.005)
    return "not asked"


_both("heeds", _heeds)


@registry.task("waits.to.stop")
async def waits_to_stop(payload: float, ctx: TaskContext) -> str:
    try:
        async with asyncio.timeout(payload):
            await ctx.stopping()
    except TimeoutError:
        return "not asked"
    return "stopped"


@registry.task("hands.back")
def hands_back(payload: None, ctx: TaskContext) -> None:
    raise HandBack("not now")
