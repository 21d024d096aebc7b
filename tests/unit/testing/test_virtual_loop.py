from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskline.testing.clock import VirtualClock
from taskline.testing.errors import Deadlock, NeverIdle
from taskline.testing.loop import VirtualLoop

YEAR_SECONDS = 365 * 86_400


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with contextlib.closing(VirtualLoop(io_patience_seconds=0.2, thread_patience_seconds=0.5)) as made:
        yield made


def test_a_year_of_sleep_passes_at_once(loop):
    loop.run_until_complete(asyncio.sleep(YEAR_SECONDS))
    assert loop.time() == pytest.approx(YEAR_SECONDS)


def test_timers_fire_in_the_order_of_their_times_and_time_stands_still_in_between(loop):
    seen = []

    async def sleeper(name, seconds):
        await asyncio.sleep(seconds)
        seen.append((name, loop.time()))

    async def main():
        await asyncio.gather(sleeper("c", 3), sleeper("a", 1), sleeper("b", 2))

    loop.run_until_complete(main())
    assert seen == [("a", 1.0), ("b", 2.0), ("c", 3.0)]


@given(st.lists(st.floats(min_value=0, max_value=YEAR_SECONDS), min_size=1, max_size=20))
def test_no_timer_fires_early_and_time_never_goes_back(delays):
    with contextlib.closing(VirtualLoop()) as loop:
        fired = []
        for delay in delays:
            loop.call_later(delay, lambda due=delay: fired.append((due, loop.time())))
        loop.run_until_complete(asyncio.sleep(max(delays)))
        loop.run_until_complete(asyncio.sleep(0))
        assert len(fired) == len(delays)
        assert all(at >= due - 1e-6 for due, at in fired)
        assert [at for _, at in fired] == sorted(at for _, at in fired)


def test_asyncio_timeout_is_virtual(loop):
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3_600):
                await asyncio.Event().wait()

    loop.run_until_complete(main())
    assert loop.time() == 3_600


def test_a_wait_for_ever_is_reported_with_the_place_that_waits(loop):
    async def waits_for_nobody():
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"waits_for_nobody.*test_virtual_loop\.py") as caught:
        loop.run_until_complete(waits_for_nobody())
    assert len(caught.value.waiting) == 1
    _cancel_all(loop)


def test_time_stands_still_while_a_thread_works(loop):
    async def main():
        ticks = loop.call_later(10, lambda: None)
        await asyncio.to_thread(time.sleep, 0.05)
        assert loop.time() == 0
        ticks.cancel()

    loop.run_until_complete(main())


def test_a_thread_that_never_answers_is_reported(loop):
    blocked = socket.socketpair()

    async def main():
        await asyncio.to_thread(blocked[0].recv, 1)

    with pytest.raises(Deadlock, match="thread"):
        loop.run_until_complete(main())
    blocked[1].send(b"x")
    with contextlib.suppress(Deadlock):
        _cancel_all(loop)
    loop.run_until_complete(loop.shutdown_default_executor())
    for end in blocked:
        end.close()


def test_real_sockets_are_heard_before_time_moves(loop):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    async def main():
        loop.call_later(3_600, lambda: None)
        loop.run_in_executor(None, theirs.send, b"x")
        assert await loop.sock_recv(ours, 1) == b"x"
        assert loop.time() == 0

    loop.run_until_complete(main())
    loop.run_until_complete(loop.shutdown_default_executor())
    ours.close()
    theirs.close()


def test_a_silent_socket_does_not_stop_the_time_for_ever(loop):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    loop.add_reader(ours, lambda: None)
    loop.run_until_complete(asyncio.sleep(YEAR_SECONDS))
    assert loop.time() == pytest.approx(YEAR_SECONDS)
    loop.remove_reader(ours)
    ours.close()
    theirs.close()


def test_run_until_stops_at_the_first_quiet_moment_and_moves_no_time(loop):
    done = []

    async def work():
        await asyncio.sleep(5)
        done.append(1)
        await asyncio.sleep(0)
        done.append(2)
        await asyncio.sleep(1_000)

    task = loop.create_task(work())
    loop.run_until(lambda: bool(done), limit_seconds=60)
    assert done == [1, 2]
    assert loop.time() == 5
    task.cancel()
    _cancel_all(loop)


def test_run_until_says_what_is_outstanding_at_its_limit(loop):
    def tick():
        loop.call_later(1, tick)

    tick()
    with pytest.raises(NeverIdle, match=r"60 virtual seconds: the soup"):
        loop.run_until(lambda: False, limit_seconds=60, outstanding=lambda: ["the soup"])


def test_what_a_condition_raises_is_raised(loop):
    def broken():
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        loop.run_until(broken, limit_seconds=1)


@given(st.integers(min_value=0, max_value=10 * YEAR_SECONDS * 1000))
def test_the_clock_is_exact_to_the_millisecond(elapsed_ms):
    start = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
    with contextlib.closing(VirtualLoop()) as loop:
        loop.run_until_complete(asyncio.sleep(elapsed_ms / 1000))
        assert VirtualClock(loop, start).now_ms() == round(
            (start + timedelta(milliseconds=elapsed_ms)).timestamp() * 1000
        )


def _cancel_all(loop):
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
