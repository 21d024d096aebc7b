from __future__ import annotations

import asyncio

import pytest

from taskline.errors import Unavailable
from taskline.schemas.events import Priority
from taskline.schemas.ids import new_task_id
from taskline.state.status import TaskStatus
from taskline.state.store import EventsWrite, StoredTask, SubmissionWrite
from taskline.testing.view import MemoryView


@pytest.fixture
def view(clock):
    return MemoryView(clock)


@pytest.fixture
def task_id(clock):
    return new_task_id(clock.now_ms())


def submission(task_id, ttl_seconds=100):
    return SubmissionWrite(
        task_id=task_id,
        lane=0,
        bucket=0,
        ttl_seconds=ttl_seconds,
        submission=b"s",
        tenant="t",
        task_type="a.b",
        queue="q",
        priority=Priority.LOW,
        status=TaskStatus.PENDING,
    )


def events(task_id, of, ttl_seconds=100):
    return EventsWrite(
        task_id=task_id,
        lane=0,
        bucket=0,
        ttl_seconds=ttl_seconds,
        events=of,
        tenant="t",
        status=TaskStatus.RUNNING,
    )


def test_pieces_add_up_in_any_order_and_again(view, task_id, run):
    writes = [events(task_id, {2: b"c"}), submission(task_id), events(task_id, {0: b"a", 1: b"b"})]
    for order in (writes, writes[::-1], writes):
        run(view.apply(order))
    stored = run(view.read(task_id))
    assert stored == StoredTask(submission=b"s", events={0: b"a", 1: b"b", 2: b"c"})
    assert view.task_ids() == (task_id,)


def test_nothing_is_known_of_an_unknown_task(view, task_id, run):
    assert run(view.read(task_id)) is None


def test_each_piece_is_forgotten_when_its_time_is_over(view, task_id, run):
    run(view.apply([submission(task_id, ttl_seconds=10), events(task_id, {0: b"a"}, ttl_seconds=20)]))
    run(asyncio.sleep(9.999))
    assert run(view.read(task_id)).submission == b"s"
    run(asyncio.sleep(0.001))
    assert run(view.read(task_id)) == StoredTask(submission=None, events={0: b"a"})
    run(asyncio.sleep(10))
    assert run(view.read(task_id)) is None


def test_while_it_is_away_it_says_so_and_keeps_what_it_has(view, task_id, run):
    run(view.apply([submission(task_id)]))
    view.stop()
    with pytest.raises(Unavailable):
        run(view.read(task_id))
    with pytest.raises(Unavailable):
        run(view.apply([events(task_id, {0: b"a"})]))
    view.start()
    assert run(view.read(task_id)) == StoredTask(submission=b"s")


def test_a_write_can_fail_in_the_middle(view, task_id, run):
    view.fail_next(stored=1)
    with pytest.raises(Unavailable, match="1 of 2"):
        run(view.apply([submission(task_id), events(task_id, {0: b"a"})]))
    assert run(view.read(task_id)) == StoredTask(submission=b"s")
    run(view.apply([events(task_id, {0: b"a"})]))
    assert run(view.read(task_id)).events == {0: b"a"}
