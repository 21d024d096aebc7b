"""The OpenAPI document is what client generators need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_kit import Api
from pydantic import BaseModel

from taskline.api import models
from taskline.api.models import DOCUMENTED, TaskSubmission
from taskline.api.problems import PROBLEMS

OPERATIONS = {
    ("post", "/tasks"): "submitTask",
    ("post", "/tasks/batch"): "submitTasks",
    ("get", "/tasks"): "listTasks",
    ("get", "/tasks/{task_id}"): "getTask",
    ("delete", "/tasks/{task_id}"): "cancelTask",
    ("get", "/tasks/{task_id}/history"): "getTaskHistory",
    ("get", "/task-types"): "listTaskTypes",
    ("get", "/dead-letters"): "listDeadLetters",
    ("post", "/dead-letters/replay"): "replayDeadLetters",
    ("get", "/dead-letters/{task_id}"): "getDeadLetter",
    ("post", "/dead-letters/{task_id}/replay"): "replayDeadLetter",
    ("post", "/dead-letters/{task_id}/discard"): "discardDeadLetter",
    ("get", "/healthz"): "getHealth",
    ("get", "/readyz"): "getReadiness",
    ("get", "/metrics"): "getMetrics",
}


@pytest.fixture
def document(api: Api) -> dict[str, Any]:
    answer: dict[str, Any] = api.request_raw("GET", "/openapi.json").json()
    return answer


def nodes(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for child in value.values():
            yield from nodes(child)
    elif isinstance(value, list):
        for child in value:
            yield from nodes(child)


def test_every_operation_is_there_under_its_own_id(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    found = {
        (method, path): operation["operationId"]
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    assert found == OPERATIONS
    for path in document["paths"].values():
        for operation in path.values():
            assert operation["summary"]
            assert operation["description"]
            assert operation["tags"]


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for node in nodes(document):
        if isinstance(node.get("$ref"), str):
            assert node["$ref"].removeprefix("#/components/schemas/") in schemas
    assert "HTTPValidationError" not in schemas
    assert schemas["ErrorView"]["properties"]["class"]


def test_every_answer_has_content_and_every_problem_an_example(document: dict[str, Any]) -> None:
    for path in document["paths"].values():
        for operation in path.values():
            for status, answer in operation["responses"].items():
                if status == "304":
                    assert "content" not in answer
                    continue
                (media_type,) = answer["content"]
                if int(status) >= 400:
                    assert media_type == "application/problem+json"
                    for example in answer["content"][media_type]["examples"].values():
                        models.Problem.model_validate(example["value"])
                        assert example["value"]["status"] == int(status)


def test_every_problem_that_the_app_answers_is_documented(document: dict[str, Any]) -> None:
    documented = {
        example["value"]["type"]
        for path in document["paths"].values()
        for operation in path.values()
        for status, answer in operation["responses"].items()
        if int(status) >= 400
        for example in answer["content"]["application/problem+json"]["examples"].values()
    }
    # Answered where no operation is: no such path, no such method, or no HTTP at all.
    nowhere = {"not-found", "method-not-allowed", "head-too-large"}
    assert documented == {kind.uri for kind in PROBLEMS if kind.slug not in nowhere}


@pytest.mark.parametrize("model", DOCUMENTED)
def test_the_examples_are_valid(model: type[BaseModel]) -> None:
    examples = model.model_config.get("json_schema_extra", {}).get("examples", [])  # type: ignore[union-attr]
    for example in examples:
        model.model_validate(example, strict=model is TaskSubmission)
    assert examples or model is models.Problem


def test_slugs_are_unique_and_stable() -> None:
    assert len({kind.slug for kind in PROBLEMS}) == len(PROBLEMS)
    assert {kind.uri for kind in PROBLEMS if kind.status == 400} == {
        "urn:taskline:problem:bad-request",
        "urn:taskline:problem:invalid-cursor",
        "urn:taskline:problem:invalid-payload",
        "urn:taskline:problem:invalid-task-id",
        "urn:taskline:problem:unknown-task-type",
    }


def test_the_page_for_people_is_served(api: Api) -> None:
    assert "text/html" in api.request_raw("GET", "/docs").headers["content-type"]


def test_a_method_that_a_path_does_not_take_is_told_all_that_it_does(
    api: Api, document: dict[str, Any]
) -> None:
    for template, operations in document["paths"].items():
        path = template.replace("{task_id}", "019ad6e2-7c00-7d3a-9b1e-0f6c3a52d481")
        takes = {each.upper() for each in operations}
        for method in {"GET", "POST", "DELETE", "PATCH"} - takes:
            answer = api.request_raw(method, path)
            assert answer.status_code == 405
            assert answer.headers.get_list("allow") == [", ".join(sorted(takes))]
