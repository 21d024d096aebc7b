"""The problems that the HTTP API answers with (RFC 9457), in one table.

A problem's `type` is a stable URN: clients decide by it (or by the status), never by the words in `title` and `detail`.
`docs/http-api.md` and the OpenAPI document are made from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response

from taskline.errors import TasklineError

PROBLEM_JSON = "application/problem+json"
_TYPE_PREFIX = "urn:taskline:problem:"
_INSTANCE_PREFIX = "urn:taskline:request:"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemType:
    """One kind of problem."""

    # The end of the type URN; part of the API's contract.
    slug: str
    status: int
    title: str
    # When it is answered and what the caller can do, for the documentation.
    meaning: str
    # Members beyond RFC 9457's own, by name.
    members: tuple[str, ...] = ()

    @property
    def uri(self) -> str:
        """The `type` member."""
        return _TYPE_PREFIX + self.slug


INVALID_TASK_ID = ProblemType(
    slug="invalid-task-id",
    status=400,
    title="Not a task id",
    meaning="The id is not a UUIDv7 in its usual form, or lies in the future.",
)
INVALID_CURSOR = ProblemType(
    slug="invalid-cursor",
    status=400,
    title="Not a cursor of this list",
    meaning="The cursor is none that a list gave, or belongs to a list with other filters; begin the list anew.",
)
UNKNOWN_TASK_TYPE = ProblemType(
    slug="unknown-task-type",
    status=400,
    title="Unknown task type",
    meaning="No such task type is registered; `nearest` is the closest name that is, if any is close.",
    members=("task_type", "nearest"),
)
INVALID_PAYLOAD = ProblemType(
    slug="invalid-payload",
    status=400,
    title="Payload off its schema",
    meaning="The payload does not fit its task type; `pointer` is the JSON pointer of the field within the payload.",
    members=("task_type", "pointer"),
)
UNAUTHORIZED = ProblemType(
    slug="unauthorized",
    status=401,
    title="No valid API key",
    meaning="The request has no API key (`Authorization: Bearer tk_…`), or one that is unknown, revoked or expired; nothing was accepted.",
)
FORBIDDEN = ProblemType(
    slug="forbidden",
    status=403,
    title="The API key lacks the scope",
    meaning="The API key is valid, but has not the scope named by `scope`; nothing was accepted.",
    members=("scope",),
)
TASK_NOT_FOUND = ProblemType(
    slug="task-not-found",
    status=404,
    title="No such task",
    meaning="No task with this id is in the view: it was never accepted, is another tenant's, or its retention is over.",
)
LETTER_NOT_FOUND = ProblemType(
    slug="dead-letter-not-found",
    status=404,
    title="No such dead letter",
    meaning="No dead letter with this id is in the view: the task is not dead, is another tenant's, or the letter's retention is over.",
)
NOT_FOUND = ProblemType(
    slug="not-found", status=404, title="No such resource", meaning="The path leads nowhere."
)
METHOD_NOT_ALLOWED = ProblemType(
    slug="method-not-allowed",
    status=405,
    title="Method not allowed",
    meaning="The path does not take this method; the Allow header lists those that it does.",
)
BODY_TIMEOUT = ProblemType(
    slug="body-timeout",
    status=408,
    title="The body did not arrive in time",
    meaning="The request's body took longer than `api.request_timeout_seconds`; nothing was accepted.",
)
IDEMPOTENCY_CONFLICT = ProblemType(
    slug="idempotency-conflict",
    status=409,
    title="The idempotency key belongs to another request",
    meaning="The idempotency key came before with another request, which made `task_id`; nothing was accepted. Use a new key for a new task.",
    members=("task_id",),
)
NOT_CANCELLED = ProblemType(
    slug="not-cancelled",
    status=409,
    title="Running or over",
    meaning="The task is running (or its worker has just died), or it has ended: `task_status` says which; it was not cancelled. `?running=abort` stops a running one.",
    members=("task_id", "task_status"),
)
LETTER_RESOLVED = ProblemType(
    slug="dead-letter-resolved",
    status=409,
    title="Replayed or discarded before",
    meaning="Something was done about the dead letter before; `replayed_as` is the task that replays it, if one does.",
    members=("replayed_as",),
)
GENERATIONS_EXHAUSTED = ProblemType(
    slug="generations-exhausted",
    status=409,
    title="Replayed often enough",
    meaning="The task and its replays have died as often as `dlq.max_generations` allows; submit a new task if it should run all the same.",
)
NOT_REPLAYABLE = ProblemType(
    slug="not-replayable",
    status=409,
    title="Nothing to replay",
    meaning="The dead letter's task can't be read, so that it can't be submitted again.",
)
LETTER_GONE = ProblemType(
    slug="dead-letter-gone",
    status=410,
    title="Not in the log any more",
    meaning="The dead letter is still listed, but its retention in the log (`topics.dlq_retention_days`) is over.",
)
TOO_LARGE = ProblemType(
    slug="too-large",
    status=413,
    title="Too large",
    meaning="The encoded payload, or the whole body before it is read, is over `limit_bytes`; nothing was accepted.",
    members=("limit_bytes", "size_bytes"),
)
UNSUPPORTED_MEDIA_TYPE = ProblemType(
    slug="unsupported-media-type",
    status=415,
    title="Not a JSON content type",
    meaning="Send the body with `Content-Type: application/json`, not compressed.",
)
MALFORMED_BODY = ProblemType(
    slug="malformed-body",
    status=422,
    title="Not a JSON object",
    meaning="The body can't be read as one JSON object (RFC 8259; no NaN or Infinity, nested at most 128 deep).",
)
INVALID_FIELDS = ProblemType(
    slug="invalid-fields",
    status=422,
    title="Unknown or wrong fields",
    meaning="Fields of the body are unknown, missing or of the wrong kind; `errors` lists each with its JSON pointer.",
    members=("errors",),
)
BAD_REQUEST = ProblemType(
    slug="bad-request",
    status=400,
    title="Bad request",
    meaning="The request is not HTTP that the server can read, or a query parameter has no such value.",
)
RATE_LIMITED = ProblemType(
    slug="rate-limited",
    status=429,
    title="Too many requests",
    meaning="The tenant or the API key has used up a rate limit (`violated-policies`, explained by the header RateLimit-Policy); nothing was accepted. Try again after `Retry-After` seconds.",
    members=("violated-policies",),
)
HEAD_TOO_LARGE = ProblemType(
    slug="head-too-large",
    status=431,
    title="Request head too large",
    meaning="Request line and headers together are over 64 KiB.",
)
INTERNAL_ERROR = ProblemType(
    slug="internal-error",
    status=500,
    title="Internal error",
    meaning="A fault of the server; quote the `instance` when you report it.",
)
DELIVERY_UNKNOWN = ProblemType(
    slug="delivery-unknown",
    status=503,
    title="Not acknowledged in time",
    meaning="Kafka did not acknowledge the task in time: it may or may not run. With the same idempotency key it is safe to submit it again; without one that may run the work twice, so look `task_id` up first.",
    members=("task_id",),
)
IN_PROGRESS = ProblemType(
    slug="submission-in-progress",
    status=503,
    title="Another request is submitting it",
    meaning="Another request with the same idempotency or dedup key is submitting `task_id`, or died while it did; its outcome is not known yet. Send the same request again after `Retry-After`.",
    members=("task_id",),
)
CANCEL_UNKNOWN = ProblemType(
    slug="cancel-unknown",
    status=503,
    title="The cancel was not acknowledged in time",
    meaning="Kafka did not acknowledge the cancel in time: the task may or may not be cancelled by it. Ask again: the answer is what is true then.",
    members=("task_id",),
)
REPLACE_UNKNOWN = ProblemType(
    slug="replacement-undecided",
    status=503,
    title="Not known whether the first task makes way",
    meaning="The dedup window is another task's (`task_id`), and nobody can tell in time whether that one is cancelled; the new task was not accepted, but the other may be cancelled. Send the same request again after `Retry-After`: it goes on from there.",
    members=("task_id",),
)
NOT_ACCEPTED = ProblemType(
    slug="not-accepted",
    status=503,
    title="Not accepted",
    meaning="The task is certainly not in the queue (send buffer full, refused by Kafka, or the process is stopping); submit again later.",
)
TYPES_UNAVAILABLE = ProblemType(
    slug="types-unavailable",
    status=503,
    title="Task types not read yet",
    meaning="The registered task types have not been read from Kafka since this process started; nothing was accepted. Try again later.",
)
VIEW_UNAVAILABLE = ProblemType(
    slug="view-unavailable",
    status=503,
    title="The view does not answer",
    meaning="Cassandra does not answer, so that the task's state can't be told. Try again later.",
)
CLAIMS_UNAVAILABLE = ProblemType(
    slug="claims-unavailable",
    status=503,
    title="Keys of submissions can't be looked up",
    meaning="Cassandra does not answer, so nobody can tell whether the idempotency or dedup key was used before; the task was not accepted. Send the same request again after `Retry-After`.",
)
KEYS_UNAVAILABLE = ProblemType(
    slug="keys-unavailable",
    status=503,
    title="API keys can't be looked up",
    meaning="Cassandra does not answer, and this process has not seen the API key lately; nothing was accepted. Try again later.",
)
LOG_UNAVAILABLE = ProblemType(
    slug="log-unavailable",
    status=503,
    title="The log does not answer",
    meaning="Kafka does not answer, so that the whole dead letter can't be read; nothing was done about it. Try again later.",
)
OVERLOADED = ProblemType(
    slug="overloaded",
    status=503,
    title="Too many requests in flight",
    meaning="This process has `api.max_requests_in_flight` requests in hand; nothing was accepted. Try again later.",
)
NOT_READY = ProblemType(
    slug="not-ready",
    status=503,
    title="Not ready",
    meaning="Something that the process needs is away, or the process is stopping; `checks` says which.",
    members=("checks",),
)

PROBLEMS: tuple[ProblemType, ...] = (
    BAD_REQUEST,
    INVALID_TASK_ID,
    INVALID_CURSOR,
    UNKNOWN_TASK_TYPE,
    INVALID_PAYLOAD,
    UNAUTHORIZED,
    FORBIDDEN,
    TASK_NOT_FOUND,
    LETTER_NOT_FOUND,
    NOT_FOUND,
    METHOD_NOT_ALLOWED,
    BODY_TIMEOUT,
    IDEMPOTENCY_CONFLICT,
    NOT_CANCELLED,
    LETTER_RESOLVED,
    GENERATIONS_EXHAUSTED,
    NOT_REPLAYABLE,
    LETTER_GONE,
    TOO_LARGE,
    UNSUPPORTED_MEDIA_TYPE,
    MALFORMED_BODY,
    INVALID_FIELDS,
    RATE_LIMITED,
    HEAD_TOO_LARGE,
    INTERNAL_ERROR,
    DELIVERY_UNKNOWN,
    IN_PROGRESS,
    CANCEL_UNKNOWN,
    REPLACE_UNKNOWN,
    NOT_ACCEPTED,
    TYPES_UNAVAILABLE,
    VIEW_UNAVAILABLE,
    CLAIMS_UNAVAILABLE,
    KEYS_UNAVAILABLE,
    LOG_UNAVAILABLE,
    OVERLOADED,
    NOT_READY,
)


class ProblemError(TasklineError):
    """Ends a request with a problem."""

    def __init__(
        self,
        kind: ProblemType,
        detail: str,
        *,
        members: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Say what happened to this request; `members` extend the body, `headers` the answer."""
        self.kind = kind
        self.detail = detail
        self.members = dict(members or {})
        self.headers = dict(headers or {})
        super().__init__(detail)


def problem_fields(problem: ProblemError, request_id: str) -> dict[str, Any]:
    """The problem, for `orjson.dumps`; members that are None are left out."""
    return {
        "type": problem.kind.uri,
        "title": problem.kind.title,
        "status": problem.kind.status,
        "detail": problem.detail,
        "instance": _INSTANCE_PREFIX + request_id,
        **{name: value for name, value in problem.members.items() if value is not None},
    }


def problem_body(problem: ProblemError, request_id: str) -> bytes:
    """The problem as JSON."""
    return orjson.dumps(problem_fields(problem, request_id))


def problem_response(problem: ProblemError, request_id: str) -> Response:
    """The problem as an answer."""
    return Response(
        problem_body(problem, request_id),
        status_code=problem.kind.status,
        headers={"cache-control": "no-store", **problem.headers},
        media_type=PROBLEM_JSON,
    )
