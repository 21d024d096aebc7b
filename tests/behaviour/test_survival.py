"""Roles that die or stop in the middle, and records that come twice."""

from __future__ import annotations

import pytest
from systems import GENERAL_SLOTS, System

from taskline import Submission, TaskHandle
from taskline.schemas.ids import TaskId, lane_of
from taskline.state.status import TaskStatus

# Where a status stands in a life in which nothing is handed back or retried.
RANK = {TaskStatus.PENDING: 0, TaskStatus.RUNNING: 1, TaskStatus.COMPLETED: 2}


def submit(system: System, task_type: str, payloads) -> list[TaskId]:
    answers = system.submit_many(Submission(task_type=task_type, payload=payload) for payload in payloads)
    assert all(isinstance(answer, TaskHandle) for answer in answers)
    return [answer.task_id for answer in answers]


def completed(system: System, task_ids: list[TaskId]) -> None:
    states = system.wait_ended(task_ids)
    assert {task_id: state.status for task_id, state in states.items()} == dict.fromkeys(
        task_ids, TaskStatus.COMPLETED
    )


@pytest.fixture(autouse=True)
def same_system_for_all(system: System):
    yield
    system.settle()


def test_a_worker_killed_in_the_middle_repeats_only_what_was_running(system: System):
    done = submit(system, "behave.count", range(30))
    completed(system, done)
    system.settle()
    slow = submit(system, "behave.work", [0.6] * 20)
    system.wait_until(
        lambda: len(system.effects("begin").keys() & set(map(str, slow))) >= GENERAL_SLOTS,
        "the slots are taken",
    )
    system.kill_worker()
    running = system.effects("begin").keys() - system.effects("end").keys() & set(map(str, slow))
    assert running
    system.start_worker()
    completed(system, slow)
    begun, ended = system.effects("begin"), system.effects("end")
    repeated = {task_id for task_id in map(str, done + slow) if begun[task_id] > 1}
    assert repeated <= running
    assert all(ended[str(task_id)] >= 1 for task_id in slow)
    for task_id in slow:
        told = system.history(task_id)
        outcomes = [row.outcome for row in told.attempts]
        assert outcomes[-1] == "succeeded"
        # The worker never said what became of the first execution; the second one made that clear.
        assert outcomes[:-1] == ["superseded"] * (len(outcomes) - 1)


def test_a_graceful_stop_lets_what_runs_finish_and_hands_nothing_finished_back(system: System):
    tasks = submit(system, "behave.work", [0.3] * 20)
    names = set(map(str, tasks))
    system.wait_until(
        lambda: len(system.effects("begin").keys() & names) >= GENERAL_SLOTS, "the slots are taken"
    )
    system.stop_worker()
    begun, ended = system.effects("begin"), system.effects("end")
    assert {task_id for task_id in names if begun[task_id]} == {
        task_id for task_id in names if ended[task_id]
    }
    system.start_worker()
    completed(system, tasks)
    begun = system.effects("begin")
    assert {begun[task_id] for task_id in names} == {1}
    for task_id in tasks:
        outcomes = [row.outcome for row in system.history(task_id).attempts]
        # A task whose Started was on its way at the stop is handed back before its handler began.
        assert outcomes[-1] == "succeeded"
        assert set(outcomes[:-1]) <= {"released"}


def test_a_projector_killed_in_the_middle_leaves_the_same_view(system: System):
    first = submit(system, "behave.work", [0.05] * 30)
    system.wait_until(lambda: any(system.effects("end")[str(task_id)] for task_id in first), "some are done")
    system.kill_projector()
    second = submit(system, "behave.count", range(30))
    system.start_projector()
    completed(system, first + second)
    for task_id in first + second:
        assert [row.outcome for row in system.history(task_id).attempts] == ["succeeded"]


def test_a_projector_that_was_away_catches_up(system: System):
    system.kill_projector()
    tasks = submit(system, "behave.count", range(30))
    names = set(map(str, tasks))
    system.wait_until(lambda: names <= system.effects("end").keys(), "work goes on without a view")
    system.start_projector()
    completed(system, tasks)


def test_lifecycle_records_that_come_twice_change_nothing(system: System):
    good, bad = system.submit("behave.echo", 1), system.submit("behave.fail", "x")
    before = system.wait_ended([good.task_id, bad.task_id])
    system.settle()
    rows = {task_id: system.history(task_id).attempts for task_id in before}
    lanes = {lane_of(task_id, system.settings.topics.lanes) for task_id in before}
    for record in system.records(system.topics.lifecycle):
        if record.position.partition in lanes and record.value and record.value[:2] == b"\xc3\x01":
            system.inject(system.topics.lifecycle, record.value, partition=record.position.partition)
    system.settle()
    for task_id, state in before.items():
        assert system.status(task_id) == state
        assert system.history(task_id).attempts == rows[task_id]


def test_a_dispatch_record_that_comes_twice_is_run_once_by_a_worker_that_has_it_in_mind(system: System):
    task = system.submit("behave.count", 5)
    system.wait_ended([task.task_id])
    (record,) = (record for record in system.records(task.position.topic) if record.position == task.position)
    system.inject(task.position.topic, record.value, key=record.key, headers=record.headers)
    system.settle()
    assert system.effects("end")[str(task.task_id)] == 1
    assert [row.outcome for row in system.history(task.task_id).attempts] == ["succeeded"]


def test_a_dispatch_record_that_comes_twice_leaves_the_first_end(system: System):
    task = system.submit("behave.count", 5)
    state = system.wait_ended([task.task_id])[task.task_id]
    (record,) = (record for record in system.records(task.position.topic) if record.position == task.position)
    system.stop_worker()
    system.inject(task.position.topic, record.value, key=record.key, headers=record.headers)
    system.start_worker()
    system.settle()
    # Execution is at least once: another worker runs it again, and the task's state is what it was.
    assert system.effects("end")[str(task.task_id)] == 2
    assert system.status(task.task_id) == state
    assert [row.outcome for row in system.history(task.task_id).attempts] == ["succeeded", "succeeded"]


def test_a_reader_who_polls_never_sees_a_task_go_back(system: System):
    tasks = submit(system, "behave.work", [0.1] * 18)
    seen: dict[TaskId, list[TaskStatus]] = {task_id: [] for task_id in tasks}
    disturbed = False

    def poll() -> bool:
        nonlocal disturbed
        for task_id in tasks:
            state = system.find(task_id)
            if state is None:
                assert not seen[task_id], "a task that was seen is not there"
                continue
            status = state.status
            if not seen[task_id] or seen[task_id][-1] is not status:
                seen[task_id].append(status)
        if not disturbed and any(TaskStatus.COMPLETED in states for states in seen.values()):
            disturbed = True
            system.kill_projector()
            system.start_projector()
        return all(TaskStatus.COMPLETED in states for states in seen.values())

    system.wait_until(poll, "all completed before the reader's eyes")
    assert disturbed
    for states in seen.values():
        ranks = [RANK[status] for status in states]
        assert ranks == sorted(ranks)
