"""`POST /tasks/batch`: up to 500 submissions in one request, each accepted or refused by itself.

Invariant: the results are in the order of the tasks, and each says what `POST /tasks` would have answered. Whatever is wrong with one
does not stop the others. All that need no claim are handed to the log before the first acknowledgement is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson
import structlog
from fastapi import APIRouter, Request
from starlette.responses import Response

from taskline.api import problems
from taskline.api.appending import Draft
from taskline.api.body import parse_body, read_body, submission_of
from taskline.api.dedup import REPLACE, Duplicate, window_name
from taskline.api.deps import ApiDeps
from taskline.api.errors import problem_of
from taskline.api.idempotency import refuse_header
from taskline.api.middleware import REQUEST_ID
from taskline.api.models import BatchOutcome, TaskBatch, TaskSubmission
from taskline.api.openapi import answers, json_body
from taskline.api.outcomes import SubmissionCounts, Via
from taskline.api.problems import ProblemError, problem_fields
from taskline.api.render import JSONAnswer, accepted_fields, duplicate_fields
from taskline.api.submission_answers import BODY_PROBLEMS
from taskline.api.submissions import Outcome, Submissions, Submitted, needs_claim
from taskline.api.tenancy import ACCESS_PROBLEMS, charge, needs, require
from taskline.state.keys import Scope

log = structlog.get_logger(__name__)

_TAGS: list[str | Enum] = ["tasks"]
# Claims of one batch that are being held at once: each costs the store some conditional writes.
_CLAIMS_AT_ONCE = 32
# Tasks that are checked and encoded before others get a turn of the loop: about 5 ms.
_AT_A_STRETCH = 50

Result = Outcome | ProblemError


@dataclass(frozen=True, kw_only=True, slots=True)
class _Caller:
    tenant: str
    traceparent: str | None


def add_batch_route(router: APIRouter, deps: ApiDeps) -> None:
    """Add the route, on these dependencies. The router's routes are `DirectRoute`s."""
    counts = SubmissionCounts(deps.metrics, Via.BATCH)

    @router.post(
        "/tasks/batch",
        operation_id="submitTasks",
        summary="Submit several tasks",
        tags=_TAGS,
        response_class=Response,
        openapi_extra=json_body(TaskBatch) | needs(Scope.SUBMIT),
        responses=answers(
            200,
            BatchOutcome,
            "What became of each task; some, or all, may have been refused.",
            *BODY_PROBLEMS,
            *ACCESS_PROBLEMS,
        ),
    )
    async def submit_tasks(request: Request) -> Response:
        """Each task is accepted or refused by itself, and has its own status in the answer, whose own status is 200 all the same.

        The order of acceptance is that of the tasks, but for those with an idempotency or dedup key; of those that replace in one dedup window
        the last one stays. Each task counts against the rate limit.
        """
        tenant = await require(request, Scope.SUBMIT, cost=0)
        refuse_header(request)
        body = await read_body(
            request,
            limit_bytes=max(deps.settings.max_batch_bytes, deps.max_body_bytes),
            timeout_seconds=deps.settings.request_timeout_seconds,
        )
        documents = parse_body(body, TaskBatch, wanted='a JSON object is wanted: {"tasks": [...]}').tasks
        await charge(request, Scope.SUBMIT, len(documents))
        caller = _Caller(tenant=tenant, traceparent=request.headers.get("traceparent"))
        results = await submit_all(deps.submissions, documents, caller)
        for result in results:
            counts.count(result)
        request_id: str = request.scope[REQUEST_ID]
        return JSONAnswer(orjson.dumps({"results": [_item(result, request_id) for result in results]}))


async def submit_all(
    submissions: Submissions, documents: Sequence[object], caller: _Caller
) -> Sequence[Result]:
    """Submit what was parsed; the results in the same order."""
    results: list[Result | None] = [None] * len(documents)
    drafts: dict[int, Draft] = {}
    claiming: dict[int, TaskSubmission] = {}
    for index, document in enumerate(documents):
        if index and index % _AT_A_STRETCH == 0:
            await asyncio.sleep(0)
        try:
            submission = submission_of(document)
            if needs_claim(submission):
                claiming[index] = submission
            else:
                drafts[index] = submissions.draft(
                    submission, tenant=caller.tenant, traceparent=caller.traceparent
                )
        except Exception as error:
            results[index] = _problem(error)
    limit = asyncio.Semaphore(_CLAIMS_AT_ONCE)

    async def claim(indices: Sequence[int]) -> None:
        for index in indices:
            try:
                async with limit:
                    results[index] = await submissions.submit(
                        claiming[index], tenant=caller.tenant, traceparent=caller.traceparent
                    )
            except Exception as error:
                results[index] = _problem(error)

    async def append() -> None:
        refusals = await submissions.append_all(list(drafts.values()))
        for (index, draft), refusal in zip(drafts.items(), refusals, strict=True):
            results[index] = refusal or Submitted(submission=draft.submission)

    await asyncio.gather(append(), *map(claim, _chains(claiming, caller.tenant)))
    return [result for result in results if result is not None]


def _chains(claiming: Mapping[int, TaskSubmission], tenant: str) -> Iterable[Sequence[int]]:
    """Which go one after another: those that replace in the same window, so that the last of them stays; every other one by itself."""
    chains: dict[object, list[int]] = {}
    for index, submission in claiming.items():
        replaces = submission.dedup_mode == REPLACE and submission.dedup_key is not None
        chains.setdefault(window_name(submission, tenant) if replaces else index, []).append(index)
    return chains.values()


def _problem(error: Exception) -> ProblemError:
    """What a single request would have been answered with; a fault of the server is one task's, not the batch's."""
    try:
        return problem_of(error)
    except Exception:
        log.exception("a task of a batch failed")
        return ProblemError(problems.INTERNAL_ERROR, "an unexpected error; the server's log has it")


def _item(result: Result, request_id: str) -> dict[str, Any]:
    """A `BatchItem`, for `orjson.dumps`."""
    if isinstance(result, Duplicate):
        return {"status": 200, "task": duplicate_fields(result)}
    if isinstance(result, Submitted):
        return {"status": 201, "task": accepted_fields(result.submission), "replayed": result.replayed}
    item: dict[str, Any] = {"status": result.kind.status, "problem": problem_fields(result, request_id)}
    if "retry-after" in result.headers:
        item["retry_after"] = int(result.headers["retry-after"])
    return item
