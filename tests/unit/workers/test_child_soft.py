"""Soft time limits: of coroutines by asyncio, of plain functions by SIGALRM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from taskline.errors import SoftTimeout
from taskline.workers.child_alarm import Alarm
from taskline.workers.child_line import PlainLine
from taskline.workers.soft import SoftLimited


async def limited(coroutine: Any, seconds: float = 1) -> Any:
    return await SoftLimited(coroutine, seconds)


def test_a_coroutine_within_its_limit_notices_nothing(virtually: Callable[..., Any]) -> None:
    async def handler() -> str:
        await asyncio.sleep(0.5)
        await asyncio.sleep(0)
        return "done"

    async def scenario() -> None:
        assert await limited(handler()) == "done"
        # Nor does what the task does afterwards.
        await asyncio.sleep(5)

    virtually(scenario())


def test_a_coroutine_sees_it_at_its_await_once_and_may_go_on(virtually: Callable[..., Any]) -> None:
    async def handler() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        with pytest.raises(SoftTimeout):
            await asyncio.sleep(10)
        caught = loop.time()
        await asyncio.sleep(7)
        return caught, loop.time()

    async def scenario() -> None:
        begun = asyncio.get_running_loop().time()
        caught, ended = await limited(handler())
        assert (round(caught - begun, 3), round(ended - begun, 3)) == (1, 8)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    virtually(scenario())


def test_one_that_does_not_catch_it_fails_with_it(virtually: Callable[..., Any]) -> None:
    async def inner() -> None:
        await asyncio.sleep(10)

    async def scenario() -> None:
        with pytest.raises(SoftTimeout):
            await limited(inner())

    virtually(scenario())


def test_what_the_coroutine_waited_for_is_cancelled(virtually: Callable[..., Any]) -> None:
    async def scenario() -> None:
        other = asyncio.ensure_future(asyncio.sleep(100))

        async def handler() -> None:
            await other

        with pytest.raises(SoftTimeout):
            await limited(handler())
        await asyncio.sleep(0)
        assert other.cancelled()

    virtually(scenario())


def test_a_coroutine_that_only_takes_turns_sees_it_too() -> None:
    async def handler() -> None:
        while True:  # noqa: ASYNC110 - that is the point
            await asyncio.sleep(0)

    async def scenario() -> None:
        with pytest.raises(SoftTimeout):
            await limited(handler(), 0.05)

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_it_is_seen_even_if_what_was_waited_for_swallows_its_cancellation(
    virtually: Callable[..., Any],
) -> None:
    async def swallows() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        return "value"

    async def scenario() -> None:
        child = asyncio.ensure_future(swallows())

        async def handler() -> None:
            await child

        with pytest.raises(SoftTimeout):
            await limited(handler())

    virtually(scenario())


@pytest.mark.parametrize("when", [0.5, 1.0, 1.5])
def test_a_real_cancellation_is_one_before_at_and_after_the_limit(
    virtually: Callable[..., Any], when: float
) -> None:
    seen: list[str] = []

    async def handler() -> None:
        while True:
            try:
                await asyncio.sleep(10)
            except SoftTimeout:
                seen.append("soft")
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

    async def scenario() -> None:
        task = asyncio.ensure_future(limited(handler()))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_at(asyncio.get_running_loop().time() + when, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(5)

    virtually(scenario())
    assert seen[-1] == "cancelled"
    assert seen.count("cancelled") == 1
    assert seen.count("soft") <= (when >= 1)


def test_time_limits_inside_the_coroutine_still_work(virtually: Callable[..., Any]) -> None:
    async def handler() -> list[str]:
        seen = []
        for _ in range(2):
            try:
                # At the same time as the soft limit, the first time.
                async with asyncio.timeout(1):
                    await asyncio.sleep(10)
            except TimeoutError:
                seen.append("inner")
            except SoftTimeout:
                seen.append("soft")
        try:
            await asyncio.sleep(0.1)
        except SoftTimeout:
            seen.append("soft")
        return seen

    async def scenario() -> None:
        seen = await limited(handler())
        assert seen.count("soft") == 1
        assert "inner" in seen

    virtually(scenario())


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    before = signal.getsignal(signal.SIGALRM)
    timer = signal.getitimer(signal.ITIMER_REAL)
    try:
        yield Alarm()
    finally:
        # pytest-timeout's own.
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_a_plain_function_sees_it_wherever_it_is(alarm: Alarm) -> None:
    def computes() -> int:
        number = 0
        while True:
            number += 1

    with pytest.raises(SoftTimeout):
        alarm.call(computes, 0.05)
    with pytest.raises(SoftTimeout):
        alarm.call(lambda: time.sleep(10), 0.05)


def test_a_plain_function_that_catches_it_is_not_disturbed_again(alarm: Alarm) -> None:
    def handler() -> str:
        try:
            time.sleep(10)
        except SoftTimeout:
            time.sleep(0.05)
        return "done"

    assert alarm.call(handler, 0.02) == "done"
    time.sleep(0.05)


def test_no_result_is_lost_to_an_alarm_that_comes_as_the_function_ends(alarm: Alarm) -> None:
    # Alarms at every moment around the end of a function that takes about as long as its limit.
    ended, limited = 0, 0
    for number in range(400):
        finished = []

        def handler(finished: list[int] = finished) -> int:
            deadline = time.perf_counter() + 0.002
            while time.perf_counter() < deadline:
                pass
            finished.append(1)
            return 1

        try:
            assert alarm.call(handler, 0.0015 + number * 0.0000025) == 1
            ended += 1
        except SoftTimeout:
            limited += 1
            # Only in the few instructions between the note and the return may both be true.
            assert not finished or number
    assert ended
    assert limited


def test_an_alarm_outside_of_a_handler_raises_nothing(alarm: Alarm) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.05)
    assert alarm.call(lambda: "done", 10) == "done"
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_the_alarm_cuts_no_frame_off_that_is_being_written() -> None:
    before = signal.getsignal(signal.SIGALRM)
    try:
        alarm = Alarm()
        writing: Any = types.SimpleNamespace(f_code=PlainLine._send.__code__)
        elsewhere: Any = types.SimpleNamespace(f_code=PlainLine.progress.__code__)

        def handler() -> None:
            # As if it rang there.
            alarm._ring(signal.SIGALRM, writing)
            assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 1
            with pytest.raises(SoftTimeout):
                alarm._ring(signal.SIGALRM, elsewhere)

        alarm.call(handler, 60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
