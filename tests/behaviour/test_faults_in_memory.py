"""Any schedule of faults, in memory: what was acknowledged ends, and the view is the fold of the log.

The virtual clock makes minutes of outages cheap, so that many schedules are tried. Ids are drawn from a seed here, so that a failing
schedule, which is printed as a list of steps, fails again.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taskline import Priority, Registry, Settings, Submission, TaskContext, TaskHandle
from taskline.schemas.codec import Codec
from taskline.schemas.events import LifecycleBatch, LifecycleEvent, TaskSubmitted, sequence_of
from taskline.state.fold import LaneEvent, history
from taskline.testing import Fault, InMemoryTaskline

SETTINGS = Settings.model_validate(
    {
        "kafka": {"session_timeout_ms": 6_000},
        "topics": {"dispatch_partitions": 3, "lanes": 2},
        "worker": {
            "concurrency": 4,
            "prefetch": 8,
            "window": 12,
            "grace_seconds": 2,
            "commit_interval_seconds": 0.5,
        },
        "projector": {"flush_records": 20},
    }
)

registry = Registry()
ended: Counter[str] = Counter()


@registry.task("any.work", timeout=20)
async def work(seconds: float, ctx: TaskContext) -> str:
    await asyncio.sleep(seconds)
    ended[str(ctx.task_id)] += 1
    return str(ctx.task_id)


@registry.task("any.fail")
def fail(payload: None) -> None:
    raise ValueError("as asked")


durations = st.sampled_from([0, 0.01, 0.4, 3.0])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.lists(durations, min_size=1, max_size=15)),
        st.tuples(st.just("fail"), st.integers(1, 3)),
        st.tuples(st.just("junk"), st.sampled_from(["tasks.high", "tasks.normal", "tasks.lifecycle"])),
        st.tuples(st.just("advance"), st.sampled_from([0.01, 0.3, 2.0, 20.0])),
        st.tuples(st.just("start worker"), st.none()),
        st.tuples(st.sampled_from(["crash worker", "stop worker"]), st.integers(0, 3)),
        st.tuples(st.sampled_from(["crash projector", "stop projector", "start projector"]), st.none()),
        st.tuples(st.sampled_from(["stop broker", "start broker", "stop view", "start view"]), st.none()),
        st.tuples(st.just("view fails"), st.integers(0, 3)),
        st.tuples(
            st.just("fault"),
            st.tuples(
                st.sampled_from(list(Fault)),
                st.sampled_from(["tasks.lifecycle", "tasks.dlq"]),
                st.integers(1, 3),
            ),
        ),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps)
def test_whatever_fails_what_was_acknowledged_ends_and_the_view_is_the_fold_of_the_log(schedule):
    ended.clear()
    with (
        mock.patch("taskline.producers.submission.new_task_id", _seeded_ids()),
        InMemoryTaskline(registry, settings=SETTINGS) as tl,
    ):
        good, bad = [], []
        for step, argument in schedule:
            _do(tl, step, argument, good, bad)
        tl.broker.start()
        tl.view.start()
        tl.start_projector()
        tl.start_worker()
        tl.run_until_idle()
        for task in good:
            state = tl.status(task.task_id)
            assert (state.status, tl.result(task.task_id)) == ("completed", str(task.task_id))
            assert ended[str(task.task_id)] >= 1
        letters = {letter.task_id for letter in tl.dead_letters()}
        for task in bad:
            assert tl.status(task.task_id).status == "dead"
        assert letters == {task.task_id for task in bad}
        _view_is_the_fold_of_the_log(tl, good + bad)


def _seeded_ids():
    numbers = random.Random(0)

    def new_task_id(now_ms):
        version, variant = 7 << 76, 2 << 62
        return uuid.UUID(
            int=now_ms << 80 | version | numbers.getrandbits(12) << 64 | variant | numbers.getrandbits(62)
        )

    return new_task_id


def _do(tl, step, argument, good, bad):
    match step:
        case "submit":
            items = [
                Submission(task_type="any.work", payload=seconds, priority=priority)
                for seconds, priority in zip(argument, list(Priority) * 5, strict=False)
            ]
            good += _acknowledged(tl, items)
        case "fail":
            bad += _acknowledged(tl, [Submission(task_type="any.fail", payload=None)] * argument)
        case "junk":
            tl.inject(argument, b"junk")
        case "advance":
            tl.advance(argument)
        case "start worker":
            tl.start_worker()
        case "crash worker" | "stop worker" if tl.workers:
            worker = tl.workers[argument % len(tl.workers)]
            (tl.crash_worker if step == "crash worker" else tl.stop_worker)(worker)
        case "crash projector":
            tl.crash_projector()
        case "stop projector":
            tl.stop_projector()
        case "start projector":
            tl.start_projector()
        case "stop broker":
            tl.broker.stop()
        case "start broker":
            tl.broker.start()
        case "stop view":
            tl.view.stop()
        case "start view":
            tl.view.start()
        case "view fails":
            tl.view.fail_next(stored=argument)
        case "fault":
            fault, topic, times = argument
            tl.broker.fail_next(fault, topic=topic, times=times)


def _acknowledged(tl, items):
    return [answer for answer in tl.submit_many(items) if isinstance(answer, TaskHandle)]


def _view_is_the_fold_of_the_log(tl, tasks):
    """Fold the raw records here, with nothing but the codec and the fold, and compare with what readers see."""
    codec = Codec()
    events: dict[object, list[LaneEvent]] = {}
    for record in tl.records("tasks.lifecycle"):
        if record.value == b"junk":
            continue
        for index, entry in enumerate(codec.decode(record.value, LifecycleBatch).events):
            sequence = sequence_of(record.position.offset, index)
            placed = LaneEvent.at_sequence(sequence, codec.decode(entry.event, LifecycleEvent))
            events.setdefault(entry.task_id, []).append(placed)
    for task in tasks:
        told = tl.history(task.task_id)
        (submission,) = (
            record for record in tl.records(task.position.topic) if record.position == task.position
        )
        assert told == history(codec.decode(submission.value, TaskSubmitted), events[task.task_id])
