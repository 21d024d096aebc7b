from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from taskline.errors import DeliveryUnknown, IncompatibleSchema, TaskNotFound
from taskline.schemas.events import Priority
from taskline.schemas.ids import lane_of
from taskline.settings import Settings
from taskline.testing import BackgroundError, Fault, InMemoryTaskline, NeverIdle
from taskline.workers import Registry, TaskContext

registry = Registry()
ran: list[str] = []


@dataclass
class Sum:
    a: int
    b: int = 10


@registry.task("kit.add")
async def add(payload: Sum, ctx: TaskContext) -> int:
    ran.append(str(ctx.task_id))
    return payload.a + payload.b


@registry.task("kit.nap", timeout=86_400)
async def nap(seconds: float, ctx: TaskContext) -> str:
    ran.append(f"begin {ctx.task_id}")
    await asyncio.sleep(seconds)
    ran.append(f"end {ctx.task_id}")
    return "rested"


@registry.task("kit.plain")
def plain(payload: str) -> str:
    return payload.upper()


@registry.task("kit.fails")
def fails(payload: object) -> None:
    raise LookupError("no such airport")


@registry.task("other.echo", queue="other")
def echo(payload: object) -> object:
    return payload


@pytest.fixture(autouse=True)
def fresh():
    ran.clear()


@pytest.fixture
def tl():
    with InMemoryTaskline(registry) as made:
        yield made


def test_a_task_goes_all_the_way(tl):
    task = tl.submit("kit.add", {"a": 1}, priority="high")
    tl.run_until_idle()
    state = tl.status(task.task_id)
    assert (state.status, state.priority, state.attempt) == ("completed", Priority.HIGH, 1)
    assert tl.result(task.task_id) == 11
    assert len(tl.records("tasks.high")) == 1
    assert [row.outcome for row in tl.history(task.task_id).attempts] == ["succeeded"]


def test_every_queue_has_its_worker(tl):
    task = tl.submit("other.echo", [1, {"x": None}])
    tl.run_until_idle()
    assert tl.result(task.task_id) == [1, {"x": None}]


def test_long_waits_pass_at_once_and_to_the_millisecond(tl):
    task = tl.submit("kit.nap", 1_200)
    tl.advance(1)
    assert tl.status(task.task_id).status == "running"
    tl.run_until_idle()
    state = tl.status(task.task_id)
    assert state.status == "completed"
    assert state.completed_at - state.started_at == timedelta(minutes=20)


def test_time_begins_where_it_is_told_to_and_moves_only_when_asked():
    start = datetime(2031, 2, 3, tzinfo=UTC)
    with InMemoryTaskline(registry, start=start) as tl:
        begun = tl.now
        assert tl.submit("kit.plain", "x").created_at == begun
        tl.advance(60)
        assert tl.now == begun + timedelta(seconds=60)
        assert begun - start < timedelta(milliseconds=1)


def test_what_failed_is_a_dead_letter(tl):
    task = tl.submit("kit.fails", None)
    tl.run_until_idle()
    (letter,) = tl.dead_letters()
    assert (letter.task_id, letter.error_class, letter.message) == (
        task.task_id,
        "LookupError",
        "no such airport",
    )
    assert tl.status(task.task_id).status == "dead"
    assert tl.result(task.task_id) is None


def test_injected_bytes_come_out_verbatim(tl):
    tl.inject("tasks.normal", b"junk", key=b"k", headers={"h": b"v"})
    tl.run_until_idle()
    (record,) = tl.undecodable()
    assert (record.value, record.key, record.headers["h"]) == (b"junk", b"k", b"v")
    assert tl.dead_letters() == ()


def test_without_a_worker_tasks_wait_and_that_is_idle(tl):
    tl.stop_worker()
    task = tl.submit("kit.plain", "x")
    tl.run_until_idle()
    assert tl.status(task.task_id).status == "pending"
    tl.start_worker()
    tl.run_until_idle()
    assert tl.result(task.task_id) == "X"


def test_a_crash_repeats_what_was_running_and_nothing_that_was_done(tl):
    done = [tl.submit("kit.add", {"a": n}).task_id for n in range(10)]
    tl.run_until_idle()
    running = tl.submit("kit.nap", 60).task_id
    tl.advance(5)
    tl.crash_worker()
    assert f"end {running}" not in ran
    tl.start_worker()
    tl.run_until_idle()
    assert [ran.count(str(task_id)) for task_id in done] == [1] * 10
    assert ran.count(f"begin {running}") == 2
    assert ran.count(f"end {running}") == 1
    assert [row.outcome for row in tl.history(running).attempts] == ["superseded", "succeeded"]


def test_a_task_whose_worker_died_ends_when_it_comes_again_past_its_start_by(tl):
    task = tl.submit("kit.nap", 60, start_by=tl.now + timedelta(seconds=5))
    tl.advance(1)
    tl.crash_worker()
    tl.advance(120)
    tl.start_worker()
    tl.run_until_idle()
    assert tl.status(task.task_id).status == "expired"
    assert [row.outcome for row in tl.history(task.task_id).attempts] == ["superseded"]


def test_a_graceful_stop_lets_handlers_finish(tl):
    task = tl.submit("kit.nap", 10)
    tl.advance(1)
    tl.stop_worker()
    tl.run_until_idle()
    assert tl.status(task.task_id).status == "completed"


def test_a_stop_hands_back_what_outlasts_the_grace_period(tl):
    task = tl.submit("kit.nap", 600)
    tl.advance(1)
    tl.stop_worker()
    tl.run_until_idle()
    assert tl.status(task.task_id).status == "pending"
    tl.start_worker()
    tl.run_until_idle()
    assert tl.status(task.task_id).status == "completed"


def test_two_workers_share_and_one_takes_over_when_the_other_dies(tl):
    (second,) = tl.start_worker(queue="default")
    tasks = [tl.submit("kit.nap", 1).task_id for _ in range(60)]
    tl.advance(0.5)
    tl.crash_worker(second)
    tl.run_until_idle()
    states = [tl.status(task_id) for task_id in tasks]
    assert {state.status for state in states} == {"completed"}
    with pytest.raises(ValueError, match="does not run"):
        tl.stop_worker(second)


def test_a_paused_projector_leaves_the_view_as_it_is(tl):
    tl.pause_projector()
    task = tl.submit("kit.plain", "x")
    tl.run_until_idle()
    with pytest.raises(TaskNotFound):
        tl.status(task.task_id)
    tl.resume_projector()
    tl.run_until_idle()
    assert tl.status(task.task_id).status == "completed"


@pytest.mark.parametrize("end", ["crash_projector", "stop_projector"])
def test_a_projector_goes_on_where_another_ended(tl, end):
    first = tl.submit("kit.plain", "x")
    getattr(tl, end)()
    second = tl.submit("kit.plain", "y")
    tl.run_until_idle()
    tl.start_projector()
    tl.run_until_idle()
    assert [tl.result(task.task_id) for task in (first, second)] == ["X", "Y"]


def test_the_broker_can_be_away_for_a_while(tl):
    running = tl.submit("kit.nap", 20)
    tl.advance(1)
    tl.broker.stop()
    tl.advance(100)
    tl.broker.start()
    tl.run_until_idle()
    assert tl.status(running.task_id).status == "completed"
    assert ran.count(f"begin {running.task_id}") == 1


def test_the_view_can_be_away_for_a_while(tl):
    tl.view.stop()
    task = tl.submit("kit.plain", "x")
    tl.advance(100)
    tl.view.start()
    tl.view.fail_next(stored=0)
    tl.run_until_idle()
    assert tl.result(task.task_id) == "X"


def test_a_lost_acknowledgement_reaches_the_submitter_and_the_task_runs(tl):
    tl.broker.fail_next(Fault.ACK_LOST, topic=tl.topics.dispatch("default", Priority.NORMAL))
    with pytest.raises(DeliveryUnknown) as caught:
        tl.submit("kit.plain", "x")
    tl.run_until_idle()
    assert str(tl.view.task_ids()[0]) == caught.value.task_id


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("topic", ["tasks.lifecycle", "tasks.dlq"])
def test_a_fault_of_the_log_changes_no_outcome(tl, fault, topic):
    tl.broker.fail_next(fault, topic=topic, times=3)
    good, bad = tl.submit("kit.add", {"a": 1}), tl.submit("kit.fails", None)
    tl.run_until_idle()
    assert tl.status(good.task_id).status == "completed"
    assert tl.status(bad.task_id).status == "dead"
    assert bad.task_id in [letter.task_id for letter in tl.dead_letters()]


def test_a_new_version_reads_what_the_old_one_queued(tl):
    tl.stop_worker()
    task = tl.submit("kit.add", {"a": 1})
    newer = Registry()

    @dataclass
    class Sum:
        a: int
        b: int = 10
        c: int = 100

    @newer.task("kit.add")
    async def add_three(payload: Sum) -> int:
        return payload.a + payload.b + payload.c

    tl.start_worker(newer)
    tl.run_until_idle()
    assert tl.result(task.task_id) == 111


def test_a_version_that_cannot_read_what_is_queued_is_refused(tl):
    newer = Registry()

    @dataclass
    class Sum:
        a: int
        c: int

    @newer.task("kit.add")
    async def add_other(payload: Sum) -> int:
        return payload.a

    with pytest.raises(IncompatibleSchema):
        tl.start_worker(newer)


def test_tasks_are_forgotten_when_their_time_is_over(tl):
    task = tl.submit("kit.plain", "x", retain_days=1)
    tl.run_until_idle()
    tl.stop_worker()
    tl.advance(86_400 - 10)
    assert tl.status(task.task_id).status == "completed"
    tl.advance(10)
    with pytest.raises(TaskNotFound):
        tl.status(task.task_id)


def test_a_lane_with_an_event_of_a_newer_version_waits_and_the_others_go_on(tl):
    tl.inject(tl.topics.lifecycle, b"\xc3\x01newer---and more", partition=0)
    tasks = [tl.submit("kit.plain", "x").task_id for _ in range(30)]
    tl.run_until_idle()
    by_lane = {lane_of(task_id, tl.settings.topics.lanes) == 0: set() for task_id in tasks}
    for task_id in tasks:
        by_lane[lane_of(task_id, tl.settings.topics.lanes) == 0].add(tl.status(task_id).status)
    assert by_lane == {True: {"pending"}, False: {"completed"}}


def test_settings_count():
    settings = Settings.model_validate({"worker": {"concurrency": 1}, "kafka": {"namespace": "n."}})
    with InMemoryTaskline(registry, settings=settings) as tl:
        tasks = [tl.submit("kit.nap", 10) for _ in range(3)]
        tl.run_until_idle()
        assert sorted(tl.status(task.task_id).completed_at for task in tasks)[-1] - tl.status(
            tasks[0].task_id
        ).created_at >= timedelta(seconds=30)
        assert len(tl.records("n.tasks.normal")) == 3


def test_what_never_ends_is_named(tl):
    tl.submit("kit.nap", 50_000)
    with pytest.raises(NeverIdle, match=r"1 record\(s\) on tasks.normal"):
        tl.run_until_idle(limit_seconds=60)


def test_a_condition_can_be_waited_for(tl):
    tl.submit("kit.nap", 10)
    tl.run_until(lambda: any(line.startswith("end") for line in ran))
    assert 10 <= tl.elapsed_seconds < 11


def test_a_role_that_ends_by_itself_is_loud(tl, monkeypatch):
    async def broken(*_):
        raise OSError("disk on fire")

    monkeypatch.setattr(tl.view, "read", broken)
    monkeypatch.setattr("taskline.processors.projector.Projector.fold", broken)
    with pytest.raises(BackgroundError, match="projector") as caught:
        tl.submit("kit.plain", "x")
    assert isinstance(caught.value.__cause__, OSError)
    tl.crash_projector()


def test_outside_its_block_it_says_how_it_is_used():
    tl = InMemoryTaskline(registry)
    with pytest.raises(RuntimeError, match="with"):
        tl.submit("kit.plain", "x")
    with tl:
        pass


def test_a_thousand_tasks_take_a_moment(tl):
    begun = time.monotonic()
    tasks = [tl.submit("kit.add", {"a": n}) for n in range(1_000)]
    tl.run_until_idle()
    assert [tl.result(task.task_id) for task in tasks] == [n + 10 for n in range(1_000)]
    print(f"{1_000 / (time.monotonic() - begun):.0f} tasks/s")


BLOCKED = ("cassandra", "faust", "mode", "fastapi", "uvicorn", "uvloop", "psutil", "hypothesis", "pytest")


def test_it_needs_only_the_base_dependencies():
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
from taskline.testing import InMemoryTaskline
from taskline import Registry
registry = Registry()
@registry.task("a.b")
async def handler(payload): return payload
with InMemoryTaskline(registry) as tl:
    task = tl.submit("a.b", 7)
    tl.run_until_idle()
    assert tl.result(task.task_id) == 7
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_worker_that_waits_for_the_broker_since_its_start_can_be_stopped():
    with InMemoryTaskline(registry, workers=False) as tl:
        tl.broker.stop()
        tl.start_worker()
        stopping = tl._loop.create_task(tl.workers[0].stop())
        tl.advance(10)
        assert stopping.done()
