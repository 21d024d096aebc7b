"""The line between a handler and its worker's loop: what of much is sent, and when."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from asyncio import Future
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from child_kit import context
from hypothesis import given
from hypothesis import strategies as st

from taskline.workers.line import MAX_MESSAGE_BYTES, NOWHERE, Line, checked
from taskline.workers.progress import LoopLine, pause_seconds

PACE = partial(pause_seconds, least_seconds=1.0)


class Sent:
    """What went out, and when (s since the beginning)."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.begun = self.loop.time()
        self.all: list[tuple[float, float | None, str | None]] = []
        self.answer: Future[None] | Exception | None = None

    def __call__(self, fraction: float | None, message: str | None) -> Future[None] | None:
        self.all.append((round(self.loop.time() - self.begun, 3), fraction, message))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def line(self) -> LoopLine:
        return LoopLine(self, pace=PACE, now_ms=lambda: 0)


@given(st.floats(0, 1e7), st.floats(0.1, 100))
def test_a_pause_is_never_below_the_least_and_grows_with_the_time(elapsed: float, least: float) -> None:
    pause = pause_seconds(elapsed, least)
    assert least <= pause <= max(least, elapsed / 49)
    assert pause_seconds(elapsed + 1, least) >= pause


def test_a_day_of_progress_is_some_hundred_events() -> None:
    elapsed, count = 0.0, 0
    while elapsed < 86_400:
        elapsed += pause_seconds(elapsed, 1.0)
        count += 1
    assert 200 < count < 500


def test_the_first_is_sent_at_once_and_the_latest_when_the_pause_is_over(
    virtually: Callable[..., Any],
) -> None:
    async def scenario() -> None:
        sent = Sent()
        line = sent.line()
        for step in range(1, 11):
            line.progress(step / 100, None)
            await asyncio.sleep(0.3)
        await asyncio.sleep(10)
        assert sent.all == [(0, 0.01, None), (1, 0.04, None), (2, 0.07, None), (3, 0.1, None)]
        line.progress(None, "again")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sent.all[4:] == [(13, None, "again")]

    virtually(scenario())


def test_nothing_is_sent_once_it_is_closed(virtually: Callable[..., Any]) -> None:
    async def scenario() -> None:
        sent = Sent()
        line = sent.line()
        line.progress(0.1, None)
        await asyncio.sleep(0.5)
        line.progress(0.2, None)
        line.close()
        await asyncio.sleep(5)
        line.progress(0.3, None)
        await asyncio.sleep(5)
        assert sent.all == [(0, 0.1, None)]
        line.stop()
        assert not line.stopping

    virtually(scenario())


def test_while_one_is_on_its_way_only_the_latest_is_kept(virtually: Callable[..., Any]) -> None:
    async def scenario() -> None:
        sent = Sent()
        answer: Future[None] = sent.loop.create_future()
        sent.answer = answer
        line = sent.line()
        for step in range(60):
            line.progress(step / 100, None)
            await asyncio.sleep(1)
        assert len(sent.all) == 1
        answer.set_result(None)
        await asyncio.sleep(3)
        assert [fraction for _, fraction, _ in sent.all] == [0.0, 0.59]

    virtually(scenario())


def test_what_can_not_be_sent_is_lost_and_nothing_else_happens(virtually: Callable[..., Any]) -> None:
    async def scenario() -> None:
        sent = Sent()
        sent.answer = RuntimeError("no registry")
        line = sent.line()
        line.progress(0.1, None)
        await asyncio.sleep(2)
        sent.answer = None
        line.progress(0.2, None)
        await asyncio.sleep(2)
        assert [fraction for _, fraction, _ in sent.all] == [0.1, 0.2]

    virtually(scenario())


def test_threads_that_all_speak_send_one_at_a_time_and_the_last_word_is_heard() -> None:
    async def scenario() -> None:
        sent = Sent()
        line = LoopLine(sent, pace=lambda _: 0.05, now_ms=lambda: 0)

        def speak() -> None:
            for step in range(20_000):
                line.progress(step / 20_000, None)

        threads = [threading.Thread(target=speak) for _ in range(3)]
        for thread in threads:
            thread.start()
        await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
        line.progress(1.0, "done")
        await asyncio.sleep(0.2)
        assert sent.all[-1][1:] == (1.0, "done")
        gaps = [later[0] - earlier[0] for earlier, later in zip(sent.all, sent.all[1:], strict=False)]
        assert min(gaps) >= 0.049

    asyncio.run(scenario())


def test_a_line_whose_loop_is_over_is_silent() -> None:
    async def scenario() -> LoopLine:
        return Sent().line()

    line = asyncio.run(scenario())
    line.progress(0.5, None)


def test_a_listener_hears_of_the_stop_once_whenever_it_came(virtually: Callable[..., Any]) -> None:
    async def scenario() -> None:
        line = Sent().line()
        heard: list[str] = []
        line.heed(lambda: heard.append("first"))
        assert not line.stopping
        line.stop()
        line.stop()
        assert line.stopping
        line.heed(lambda: heard.append("late"))
        assert heard == ["first", "late"]

    virtually(scenario())


@pytest.mark.parametrize("fraction", [-0.01, 1.01, float("nan"), float("inf"), 40])
def test_a_fraction_out_of_range_is_the_handler_s_error(fraction: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        context().progress(fraction)


@pytest.mark.parametrize(("fraction", "message"), [("0.5", None), (b"1", None), ([], None), (0.5, 7)])
def test_what_is_no_progress_is_the_handler_s_error(fraction: Any, message: Any) -> None:
    with pytest.raises(TypeError):
        context().progress(fraction, message)


def test_a_message_is_cut_at_whole_characters() -> None:
    fraction, message = checked(1, "ü" * 400)
    assert (fraction, message) == (1.0, "ü" * (MAX_MESSAGE_BYTES // 2))
    assert checked(None, "\ud800") == (None, "?")


def test_a_context_of_no_worker_takes_everything_and_stops_at_its_deadline() -> None:
    ctx = context(deadline_ms=NOWHERE.now_ms() + 60_000)
    ctx.progress(0.5, "half")
    assert not ctx.should_stop
    assert context(deadline_ms=NOWHERE.now_ms() - 1).should_stop
    assert context(deadline_ms=NOWHERE.now_ms() + 60_000, soft_seconds=-1).should_stop


def test_a_context_in_another_process_has_a_line_to_nowhere(virtually: Callable[..., Any]) -> None:
    async def scenario() -> None:
        line = Sent().line()
        line.stop()
        ctx = context(line=line, deadline_ms=NOWHERE.now_ms() + 60_000)
        assert ctx.should_stop
        for other in (pickle.loads(pickle.dumps(ctx)), copy.deepcopy(ctx)):
            assert other == ctx
            assert type(other.line) is Line
            assert not other.should_stop

    virtually(scenario())
