"""Progress, the wish to stop and handing back, through the whole of Taskline in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from taskline import HandBack, Registry, TaskContext
from taskline.schemas.events import Progress
from taskline.settings import Settings
from taskline.testing import Fault, InMemoryTaskline

registry = Registry()
ran: list[str] = []


@registry.task("steps", timeout=86_400)
async def steps(seconds: float, ctx: TaskContext) -> None:
    """Speak twice a second."""
    for step in range(round(seconds * 2)):
        ctx.progress(step / (seconds * 2), f"step {step}")
        await asyncio.sleep(0.5)


@registry.task("plain")
def plain(payload: object, ctx: TaskContext) -> None:
    ctx.progress(0.5)


@registry.task("wrong", max_retries=0)
def wrong(payload: object, ctx: TaskContext) -> None:
    ctx.progress(2)


@registry.task("heedful", timeout=600)
async def heedful(payload: object, ctx: TaskContext) -> str:
    ran.append(f"begins {ctx.attempt}")
    await ctx.stopping()
    ran.append("stops")
    raise HandBack("the worker leaves")


@registry.task("gives-up", max_retries=1)
async def gives_up(payload: object, ctx: TaskContext) -> None:
    ran.append(f"{ctx.attempt} {ctx.should_stop}")
    raise HandBack


@registry.task("limited", timeout=30, soft_timeout=10)
async def limited(payload: object, ctx: TaskContext) -> str:
    try:
        await asyncio.sleep(60)
    except Exception:
        return f"asked: {ctx.should_stop}"
    return "not stopped"


@pytest.fixture(autouse=True)
def fresh() -> None:
    ran.clear()


@pytest.fixture
def tl() -> Iterator[InMemoryTaskline]:
    with InMemoryTaskline(registry) as made:
        yield made


def test_how_far_it_is_is_in_the_status_while_it_runs(tl: InMemoryTaskline) -> None:
    task = tl.submit("steps", 10)
    tl.advance(5.3)
    told = tl.status(task.task_id).progress
    assert told is not None
    assert told.message == f"step {round((told.fraction or 0) * 20)}"
    assert 0.4 <= (told.fraction or 0) <= 0.5
    assert 0 <= (tl.now - told.at).total_seconds() < 1.2
    tl.run_until_idle()
    history = tl.history(task.task_id)
    assert history.state.progress is None
    last = history.attempts[0].progress
    assert last is not None
    assert last.fraction is not None
    assert last.fraction >= 0.85
    # Twenty words, about one a second.
    assert sum(isinstance(placed.event, Progress) for placed in history.events) in (10, 11)


def test_a_long_execution_leaves_few_events() -> None:
    with InMemoryTaskline(registry) as tl:
        task = tl.submit("steps", 3_600)
        tl.run_until_idle(limit_seconds=4_000)
        events = tl.history(task.task_id).events
        assert 100 < len(events) < 300


def test_the_interval_is_a_setting() -> None:
    settings = Settings.model_validate({"worker": {"progress_interval_seconds": 5}})
    with InMemoryTaskline(registry, settings=settings) as tl:
        task = tl.submit("steps", 20)
        tl.run_until_idle()
        events = tl.history(task.task_id).events
        assert sum(isinstance(placed.event, Progress) for placed in events) in (4, 5)


def test_an_end_does_not_wait_for_it_and_nothing_comes_behind(tl: InMemoryTaskline) -> None:
    task = tl.submit("plain", None)
    tl.run_until_idle()
    tl.advance(5)
    kinds = [type(placed.event).__name__ for placed in tl.history(task.task_id).events]
    assert kinds == ["Started", "Progress", "Succeeded"]


def test_a_fraction_out_of_range_fails_the_handler(tl: InMemoryTaskline) -> None:
    task = tl.submit("wrong", None)
    tl.run_until_idle()
    error = tl.status(task.task_id).last_error
    assert error is not None
    assert error.error_class == "ValueError"


def test_lost_progress_is_no_error(tl: InMemoryTaskline) -> None:
    task = tl.submit("steps", 10)
    tl.advance(2)
    tl.broker.fail_next(Fault.REFUSED, topic=tl.topics.lifecycle, times=4)
    tl.run_until_idle()
    history = tl.history(task.task_id)
    assert (history.state.status, len(history.attempts)) == ("completed", 1)
    assert sum(isinstance(placed.event, Progress) for placed in history.events) in (6, 7)


def test_a_handler_that_hands_back_on_the_way_out_spends_no_attempt(tl: InMemoryTaskline) -> None:
    task = tl.submit("heedful", None)
    tl.advance(5)
    assert ran == ["begins 1"]
    before = tl.elapsed_seconds
    tl.stop_worker()
    # At once, and not when the grace period is over.
    assert tl.elapsed_seconds - before < 2
    tl.advance(1)
    (row,) = tl.history(task.task_id).attempts
    assert (row.outcome, row.reason) == ("released", "handed_back")
    state = tl.status(task.task_id)
    assert (state.status, state.last_error) == ("pending", None)
    tl.start_worker()
    tl.advance(5)
    assert ran == ["begins 1", "stops", "begins 1"]
    assert tl.status(task.task_id).status == "running"
    tl.cancel(task.task_id, running=True)
    tl.run_until_idle()


def test_handing_back_when_nobody_leaves_is_a_retry_that_spends_an_attempt(tl: InMemoryTaskline) -> None:
    task = tl.submit("gives-up", None)
    tl.run_until_idle()
    assert ran == ["1 False", "2 False"]
    state = tl.status(task.task_id)
    assert (state.status, state.reason, state.attempt) == ("dead", "exhausted", 2)
    assert state.last_error is not None
    assert state.last_error.category == "transient"


def test_a_handler_sees_that_its_soft_limit_has_passed(tl: InMemoryTaskline) -> None:
    task = tl.submit("limited", None)
    tl.run_until_idle()
    assert tl.result(task.task_id) == "asked: True"


def test_a_task_that_is_aborted_ends_although_its_handler_hands_back() -> None:
    own = Registry()
    seen: list[bool] = []

    @own.task("refuses", timeout=600)
    async def refuses(payload: object, ctx: TaskContext) -> None:
        try:
            await asyncio.sleep(500)
        except asyncio.CancelledError:
            seen.append(ctx.should_stop)
            raise HandBack from None

    with InMemoryTaskline(own) as tl:
        task = tl.submit("refuses", None)
        tl.advance(5)
        tl.cancel(task.task_id, running=True)
        tl.run_until_idle()
        assert (seen, tl.status(task.task_id).status) == ([True], "cancelled")
        # By this very attempt, and not by the next one's being refused.
        assert [row.outcome for row in tl.history(task.task_id).attempts] == ["cancelled"]
