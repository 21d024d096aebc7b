"""Results and errors agree with what the API documents."""

from __future__ import annotations

from datetime import UTC
from typing import Any
from uuid import UUID

import pytest
from client_kit import TASK_ID, good, problem
from pydantic import BaseModel

from taskline.api.cancel_models import CancelPending, TaskCancelled
from taskline.api.letter_models import LetterList, LetterReplayed
from taskline.api.listing_models import TaskList
from taskline.api.models import (
    BatchOutcome,
    TaskAccepted,
    TaskDuplicate,
    TaskHistoryView,
    TaskTypeList,
    TaskView,
)
from taskline.api.problems import PROBLEMS, ProblemType
from taskline.client import (
    ApiError,
    Problem,
    ServerFault,
    ServiceUnavailable,
    UnexpectedAnswer,
    parsing,
    refusals,
)
from taskline.client.asking import _NOTHING_DONE
from taskline.client.calls import CLAIMS_UNAVAILABLE
from taskline.client.parsing import read
from taskline.client.refusals import error_of, problem_in
from taskline.errors import InvalidPayload, PayloadTooLarge, TasklineError, UnknownTaskType

PARSERS = {
    TaskAccepted: parsing.submitted,
    TaskDuplicate: parsing.submitted,
    TaskView: parsing.snapshot,
    TaskHistoryView: parsing.history,
    TaskList: parsing.page,
    LetterList: parsing.letters,
    LetterReplayed: parsing.replayed,
    TaskTypeList: parsing.task_types,
}


def examples(model: type[BaseModel]) -> list[Any]:
    found = model.model_config["json_schema_extra"]
    assert isinstance(found, dict)
    listed = found["examples"]
    assert isinstance(listed, list)
    return listed


@pytest.mark.parametrize("model", PARSERS)
def test_every_documented_example_can_be_read(model: type[BaseModel]) -> None:
    for example in examples(model):
        # A newer server's members do no harm.
        parsed = read(good(example | {"new": [1]}), PARSERS[model])
        assert parsed is not None


def test_a_batch_s_examples_can_be_read() -> None:
    for example in examples(BatchOutcome):
        outcomes = parsing.batch(good(example), len(example["results"]))
        for outcome, item in zip(outcomes, example["results"], strict=True):
            assert isinstance(outcome, Problem) == ("problem" in item)
        with pytest.raises(UnexpectedAnswer):
            parsing.batch(good(example), len(example["results"]) + 1)


def test_a_cancel_s_examples_can_be_read() -> None:
    for model, status in ((TaskCancelled, 200), (CancelPending, 202)):
        done = parsing.cancellation(UUID(TASK_ID), good(examples(model)[0], status))
        assert done.decided == (status == 200)
        assert (done.status, done.cancelled_at is None) == (
            ("cancelled", False) if done.decided else (None, True)
        )


def test_instants_are_aware_and_ids_are_ids() -> None:
    task = read(good(examples(TaskView)[0]), parsing.snapshot)
    assert task.created_at.tzinfo == UTC
    assert str(task.task_id) == TASK_ID
    assert task.ended
    assert task.result == {"nearest": "HHR", "km": 6.1}
    assert task.raw["worker"] == task.worker


# Lists leave results out, and a task that was accepted need not say that it is not for later.
NOT_NEEDED = {(TaskAccepted, "scheduled_at"), (TaskView, "result"), (TaskView, "progress")}


@pytest.mark.parametrize("model", PARSERS)
def test_an_answer_without_what_is_needed_is_told(model: type[BaseModel]) -> None:
    example = examples(model)[0]
    for missing in example:
        if (model, missing) not in NOT_NEEDED:
            answer = good({name: value for name, value in example.items() if name != missing})
            with pytest.raises(UnexpectedAnswer, match="can't be read"):
                read(answer, PARSERS[model])


@pytest.mark.parametrize("kind", PROBLEMS, ids=lambda kind: kind.slug)
def test_every_problem_has_an_error_that_tells_it(kind: ProblemType) -> None:
    members = dict.fromkeys(kind.members, "x") | {"limit_bytes": 1, "size_bytes": 2}
    error = error_of(problem_in(problem(kind.slug, kind.status, **members)), subject=TASK_ID)
    told = error if isinstance(error, ApiError) else error.__cause__
    assert isinstance(told, ApiError)
    assert not isinstance(told, UnexpectedAnswer)
    assert (told.status, told.type, told.detail) == (kind.status, kind.slug, "in words")
    assert isinstance(told, ServerFault) == (kind.status == 500)
    assert isinstance(told, ServiceUnavailable) == (kind.status == 503)


def test_only_problems_that_exist_are_known_here() -> None:
    slugs = {kind.slug for kind in PROBLEMS}
    assert set(refusals._BY_TYPE) <= slugs
    assert {*_NOTHING_DONE, CLAIMS_UNAVAILABLE} <= slugs
    for kind in PROBLEMS:
        # Whatever the API promises not to have acted on may be sent again.
        if kind.status in (429, 503) and "nothing was accepted" in kind.meaning:
            assert kind.slug in _NOTHING_DONE


def test_the_facts_of_a_refusal_are_its_errors_attributes() -> None:
    answers: list[tuple[TasklineError, str]] = [
        (told("unknown-task-type", 400, task_type="geo.nearst", nearest="geo.nearest"), "geo.nearest"),
        (told("invalid-payload", 400, task_type="a.b", pointer="/iata"), "/iata"),
        (told("too-large", 413, size_bytes=12, limit_bytes=10), "12"),
    ]
    kinds = [UnknownTaskType, InvalidPayload, PayloadTooLarge]
    for (error, shown), kind in zip(answers, kinds, strict=True):
        assert isinstance(error, kind)
        assert shown in str(error)


def told(slug: str, status: int, **members: object) -> TasklineError:
    return error_of(problem_in(problem(slug, status, **members)), subject=TASK_ID)


def test_a_payload_s_reason_is_said_once() -> None:
    detail = "payload of 'a.b' at '/iata': an integer where a string belongs"
    answer = problem("invalid-payload", 400, task_type="a.b", pointer="/iata", detail=detail)
    error = error_of(problem_in(answer), subject="")
    assert isinstance(error, InvalidPayload)
    assert error.reason == "an integer where a string belongs"
    assert str(error) == detail


def test_problems_are_values() -> None:
    assert problem_in(problem("x", 418, after=3)) == Problem(
        status=418, type="x", title="x", detail="in words", instance="urn:taskline:request:1", retry_after=3.0
    )
