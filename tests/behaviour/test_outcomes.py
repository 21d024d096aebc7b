"""What becomes of good and of failing tasks."""

from __future__ import annotations

import pytest
from systems import System

from taskline import Submission, TaskFailure, TaskHandle
from taskline.errors import InvalidPayload, TaskNotFound, UnknownTaskType
from taskline.schemas.events import DeadLettered, Failed, Priority, Started, Succeeded
from taskline.state.status import TaskStatus


def ended(system: System, task: TaskHandle):
    return system.wait_ended([task.task_id])[task.task_id]


def letters_of(system: System, task: TaskHandle):
    return [letter for letter in system.dead_letters() if letter.task_id == task.task_id]


@pytest.mark.parametrize("payload", [None, 0, "Zürich ✈", [1, 2.5, {"a": [True]}], {"": {"x": None}}])
def test_a_task_completes_and_its_result_is_visible(system: System, payload):
    task = system.submit("behave.echo", payload)
    state = ended(system, task)
    assert state.status is TaskStatus.COMPLETED
    assert system.result(task.task_id) == payload
    assert state.created_at == task.created_at
    assert state.created_at <= state.started_at <= state.completed_at
    assert (state.attempt, state.retry_count, state.last_error, state.tenant) == (1, 0, None, "default")


def test_a_plain_handler_runs_too(system: System):
    task = system.submit("behave.plain", {"text": "atl"})
    assert ended(system, task).status is TaskStatus.COMPLETED
    assert system.result(task.task_id) == "ATL"


def test_a_typed_handler_gets_an_instance_with_its_defaults(system: System):
    task = system.submit("behave.greet", {"name": "Ada"})
    assert ended(system, task).status is TaskStatus.COMPLETED
    assert system.result(task.task_id) == {
        "class": "Greeting",
        "text": "hello Ada",
        "task_id": str(task.task_id),
        "attempt": 1,
    }


def test_a_task_queued_under_an_older_schema_runs_in_the_newer_handler(system: System):
    assert ended(system, system.early).status is TaskStatus.COMPLETED
    assert system.result(system.early.task_id) == "good day, Ada"


@pytest.mark.parametrize("task_type", ["behave.fail", "behave.fail_plain"])
def test_a_failing_handler_reads_dead_with_its_error_and_stands_on_the_dead_letter_topic(
    system: System, task_type
):
    task = system.submit(task_type, "no such airport")
    state = ended(system, task)
    assert (state.status, state.reason) == (TaskStatus.DEAD, "exhausted")
    assert (state.last_error.error_class, state.last_error.message) == ("LookupError", "no such airport")
    assert "behaviour_tasks.py" in state.last_error.traceback
    (letter,) = letters_of(system, task)
    assert (letter.reason, letter.error_class, letter.message, letter.attempt) == (
        "exhausted",
        "LookupError",
        "no such airport",
        1,
    )
    # With the record itself, so that it can be put in again.
    (record,) = (
        record
        for record in system.records(system.topics.dispatch("default", Priority.NORMAL))
        if record.headers.get("taskline-task-id") == task.task_id.bytes
    )
    assert letter.submission == record.value
    assert (letter.source_partition, letter.source_offset) == (
        record.position.partition,
        record.position.offset,
    )


def test_a_handler_that_exceeds_its_time_is_dead_with_a_timeout(system: System):
    task = system.submit("behave.endless", None)
    state = ended(system, task)
    assert (state.status, state.last_error.error_class) == (TaskStatus.DEAD, "TimeoutError")
    assert (state.completed_at - state.started_at).total_seconds() >= 0.5


def test_a_submission_may_ask_for_another_time_limit(system: System):
    task = system.submit("behave.work", 30, timeout_seconds=0.2, max_retries=0)
    assert ended(system, task).last_error.error_class == "TimeoutError"


def test_a_result_over_its_cap_is_a_failure(system: System):
    fits, large = system.submit("behave.large", 1_000), system.submit("behave.large", 3_000)
    assert ended(system, fits).status is TaskStatus.COMPLETED
    state = ended(system, large)
    assert (state.status, state.reason) == (TaskStatus.DEAD, "permanent")
    assert not state.last_error.retryable
    assert "2000" in state.last_error.message
    assert len(letters_of(system, large)) == 1


def test_a_type_without_a_handler_is_a_dead_letter(system: System):
    task = system.submit("behave.nobody", {"x": 1})
    state = ended(system, task)
    assert (state.status, state.reason) == (TaskStatus.DEAD, "unregistered")
    (letter,) = letters_of(system, task)
    assert (letter.reason, letter.task_type) == ("unregistered", "behave.nobody")


def test_all_priorities_are_served(system: System):
    tasks = {
        priority: system.submit("behave.echo", priority.value, priority=priority) for priority in Priority
    }
    for priority, task in tasks.items():
        state = ended(system, task)
        assert (state.status, state.priority) == (TaskStatus.COMPLETED, priority)
        assert task.position.topic == system.topics.dispatch("default", priority)


def test_history_has_a_row_for_the_execution_and_every_event(system: System):
    good, bad = system.submit("behave.echo", 1), system.submit("behave.fail", "x")
    ended(system, good), ended(system, bad)
    told = system.history(good.task_id)
    assert [type(placed.event) for placed in told.events] == [Started, Succeeded]
    (row,) = told.attempts
    assert (row.attempt, row.outcome, row.error, row.worker) == (1, "succeeded", None, told.state.worker)
    assert row.started_at <= row.ended_at
    told = system.history(bad.task_id)
    assert [type(placed.event) for placed in told.events] == [Started, Failed, DeadLettered]
    (row,) = told.attempts
    assert (row.outcome, row.error.error_class) == ("failed", "LookupError")
    assert row.error.message == "x"


def test_submit_many_answers_in_order_and_a_bad_item_stops_nobody(system: System):
    items = [Submission(task_type="behave.count", payload=number) for number in range(40)]
    items[7] = Submission(task_type="behave.greet", payload={"nom": "Ada"})
    items[13] = Submission(task_type="behave.cuont", payload=1)
    answers = system.submit_many(items)
    assert len(answers) == 40
    failures = {answer.index: answer.error for answer in answers if isinstance(answer, TaskFailure)}
    assert {index: type(error) for index, error in failures.items()} == {
        7: InvalidPayload,
        13: UnknownTaskType,
    }
    handles = [answer for answer in answers if isinstance(answer, TaskHandle)]
    states = system.wait_ended(handle.task_id for handle in handles)
    assert {state.status for state in states.values()} == {TaskStatus.COMPLETED}
    numbers = [number for number in range(40) if number not in (7, 13)]
    assert [system.result(handle.task_id) for handle in handles] == numbers
    begun = system.effects("begin")
    assert [begun[str(handle.task_id)] for handle in handles] == [1] * len(handles)


def test_a_task_is_its_tenants_alone(system: System):
    task = system.submit("behave.echo", 1, tenant="acme")
    system.wait_until(
        lambda: system.status(task.task_id, tenant="acme").status.ended, "the tenant sees its task ended"
    )
    with pytest.raises(TaskNotFound):
        system.status(task.task_id)
    with pytest.raises(TaskNotFound):
        system.history(task.task_id)
