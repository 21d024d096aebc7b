"""The shapes of requests and answers.

`TaskSubmission` is what a body is checked against. The others describe the answers for the OpenAPI document and for tests;
answers are built by `taskline.api.render` and not validated again on their way out.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from taskline.api.examples import EXAMPLES
from taskline.api.instants import instant_of
from taskline.infra.tiers import MAX_DELAY_SECONDS
from taskline.producers.submission import MAX_NAME_CHARS, MAX_TIMEOUT_SECONDS
from taskline.schemas.events import ErrorCategory, Priority
from taskline.schemas.types import MAX_RETRIES
from taskline.state.fold import Outcome
from taskline.state.status import TaskStatus

MAX_BATCH_TASKS = 500
MAX_DEDUP_WINDOW_SECONDS = 30 * 86_400
PriorityName = Literal["high", "normal", "low"]
# Text in a strict model would not become a datetime; a number is refused, since nobody can tell seconds from milliseconds.
Instant = Annotated[
    AwareDatetime,
    BeforeValidator(instant_of, json_schema_input_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]


class TaskSubmission(BaseModel):
    """A task to run. A field that is null counts as absent."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": EXAMPLES["TaskSubmission"]},
    )

    task_type: Annotated[str, Field(min_length=1, max_length=255, description="A registered task type.")]
    payload: Annotated[Any, Field(description="The task's input; must fit the task type's schema.")]
    priority: Annotated[
        PriorityName | None, Field(description="How urgent it is. Default: the task type's.")
    ] = None
    timeout_seconds: Annotated[
        float | None,
        Field(
            gt=0,
            le=MAX_TIMEOUT_SECONDS,
            allow_inf_nan=False,
            description="How long one execution may take. Default: the task type's.",
        ),
    ] = None
    max_retries: Annotated[
        int | None,
        Field(ge=0, le=MAX_RETRIES, description="Attempts after the first. Default: the task type's."),
    ] = None
    affinity_key: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=MAX_NAME_CHARS,
            description="Tasks of one priority with the same key go to the same partition, in order of acceptance.",
        ),
    ] = None
    delay_seconds: Annotated[
        float | None,
        Field(
            ge=0,
            le=MAX_DELAY_SECONDS,
            allow_inf_nan=False,
            description="It does not start earlier than so long from now: 0, or from 0.1 s to 365 days. Not beside scheduled_at.",
        ),
    ] = None
    scheduled_at: Annotated[
        Instant | None,
        Field(
            description="It does not start earlier than this instant, at most 365 days ahead; one in the past means at once."
        ),
    ] = None
    start_by: Annotated[
        Instant | None,
        Field(description="An instant after which it is not worth starting: then it ends as expired."),
    ] = None
    idempotency_key: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=MAX_NAME_CHARS,
            description="Names this request, so that it can be sent again and makes one task: same key and same request, same task; other request: 409. Or the header Idempotency-Key.",
        ),
    ] = None
    dedup_key: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=MAX_NAME_CHARS,
            description="Of tasks of one type with the same key, one is accepted per window.",
        ),
    ] = None
    dedup_window_seconds: Annotated[
        float | None,
        Field(
            ge=1,
            le=MAX_DEDUP_WINDOW_SECONDS,
            allow_inf_nan=False,
            description="How long the dedup_key holds, from the accepted submission: 1 s to 30 days.",
        ),
    ] = None
    dedup_mode: Annotated[
        Literal["reject", "replace"] | None,
        Field(
            description="What happens to a second task inside the window. reject (the default): the first stands for it. replace: if the first has not started, or waits for its next attempt, it is cancelled, and this one takes its place and begins the window anew; if it runs or has ended (other than by being cancelled), it stands."
        ),
    ] = None


class _Answer(BaseModel):
    # An answer may gain members at any time; clients must ignore what they do not know.
    model_config = ConfigDict(extra="ignore")


class TaskAccepted(_Answer):
    """The task is in the log: it will run, whatever dies."""

    model_config = ConfigDict(json_schema_extra={"examples": EXAMPLES["TaskAccepted"]})

    task_id: UUID
    status: Literal["pending", "scheduled"]
    created_at: datetime
    scheduled_at: Annotated[datetime | None, Field(description="It does not start earlier.")]
    task_type: str
    priority: Priority
    queue: str


class TaskDuplicate(_Answer):
    """Not accepted: inside the dedup window this task stands for it."""

    model_config = ConfigDict(json_schema_extra={"examples": EXAMPLES["TaskDuplicate"]})

    task_id: UUID
    duplicate: Literal[True]
    task_type: str
    created_at: datetime
    status: Annotated[
        TaskStatus | None, Field(description="Of that task now; null: the view does not have it yet.")
    ]


class TaskBatch(BaseModel):
    """Several tasks to run. Each is checked, refused or accepted by itself."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"examples": EXAMPLES["TaskBatch"]}
    )

    tasks: Annotated[
        list[Any],
        Field(min_length=1, max_length=MAX_BATCH_TASKS),
        WithJsonSchema(
            {
                "type": "array",
                "items": {"$ref": "#/components/schemas/TaskSubmission"},
                "minItems": 1,
                "maxItems": MAX_BATCH_TASKS,
            }
        ),
    ]


class ErrorView(_Answer):
    """Why an execution failed."""

    error_class: Annotated[
        str, Field(alias="class", description="The exception's qualified name, as the worker knows it.")
    ]
    message: str
    attempt: int
    at: datetime
    retryable: Annotated[bool, Field(description="False: the worker said that another attempt can't help.")]
    category: Annotated[ErrorCategory, Field(description="What kind of error it is, as the worker judged.")]


class ProgressView(_Answer):
    """How far an execution has come, by its handler's word."""

    fraction: Annotated[float | None, Field(description="From 0 to 1; null: the handler did not say.")]
    message: str | None
    at: datetime


class TaskView(_Answer):
    """A task as the view knows it: the fold of its events. Members that do not apply are null."""

    model_config = ConfigDict(json_schema_extra={"examples": EXAMPLES["TaskView"]})

    task_id: UUID
    task_type: str
    status: Annotated[
        TaskStatus, Field(description="completed, dead, cancelled and expired are final: they never change.")
    ]
    priority: Priority
    queue: str
    created_at: datetime
    scheduled_at: Annotated[datetime | None, Field(description="It must not start earlier.")]
    started_at: Annotated[datetime | None, Field(description="Start of the newest execution.")]
    completed_at: Annotated[datetime | None, Field(description="When it reached its final status.")]
    attempt: Annotated[int, Field(description="The highest attempt that started, from 1; 0: none has.")]
    retry_count: Annotated[int, Field(description="Attempts after the first.")]
    max_retries: int
    next_attempt_at: Annotated[
        datetime | None, Field(description="While the next attempt waits: it does not start earlier.")
    ]
    last_error: ErrorView | None
    result: Annotated[Any, Field(description="What the handler returned, once completed.")]
    reason: Annotated[str | None, Field(description="Why it is dead, in a word.")]
    worker: Annotated[str | None, Field(description="The process that started the newest execution.")]
    progress: Annotated[
        ProgressView | None,
        Field(description="While it runs: the handler's newest word on how far it is, if it says so."),
    ]
    root_id: Annotated[UUID, Field(description="The first task of a chain of replays; its own id otherwise.")]
    replay_of: Annotated[UUID | None, Field(description="The dead task that this one replays.")]
    generation: Annotated[int, Field(description="How many replays led here.")]
    replayed_as: Annotated[UUID | None, Field(description="Of a dead task: the one that replays it.")]
    retain_until: Annotated[datetime, Field(description="After this the task may be forgotten.")]


class AttemptError(ErrorView):
    """Why this execution failed, with the end of its traceback."""

    traceback: str | None


class AttemptView(_Answer):
    """One execution of the handler."""

    attempt: int
    execution: UUID
    outcome: Outcome
    worker: str
    started_at: datetime
    ended_at: datetime | None
    error: AttemptError | None
    reason: Annotated[str | None, Field(description="Why it was handed back unfinished, in a word.")]
    progress: Annotated[
        ProgressView | None, Field(description="The handler's last word on how far it was.")
    ] = None


class EventView(_Answer):
    """One lifecycle event, as it stands in the log."""

    event: Literal[
        "started",
        "lease_extended",
        "timed_out",
        "released",
        "succeeded",
        "failed",
        "retry_scheduled",
        "crashed",
        "expired",
        "dead_lettered",
        "cancel_requested",
        "cancelled",
        "progress",
    ]
    at: datetime
    attempt: int
    worker: str
    offset: Annotated[int, Field(description="Its batch's offset in the task's lane.")]
    index: Annotated[int, Field(description="Its place in the batch.")]
    execution: Annotated[UUID | None, Field(description="The execution that it is about, if any.")] = None
    reason: str | None = None
    error: Annotated[str | None, Field(description="Of a failure: the exception's qualified name.")] = None
    alone: Annotated[
        bool | None,
        Field(description="Of a crash: nothing else ran in the process, so the task is to blame."),
    ] = None
    next_attempt_at: Annotated[
        datetime | None, Field(description="Of a scheduled retry: it does not start earlier.")
    ] = None
    lease_until: Annotated[
        datetime | None,
        Field(description="Of a task lent to an HTTP worker: when that lease ends, or ended."),
    ] = None
    abort: Annotated[
        bool | None,
        Field(description="Of a cancel request: a running execution was to be stopped, too."),
    ] = None
    fraction: Annotated[float | None, Field(description="Of progress: how much is done, from 0 to 1.")] = None
    message: Annotated[str | None, Field(description="Of progress: what the handler is at.")] = None


class TaskHistoryView(_Answer):
    """What happened to a task: its executions in order of their starts, and its events in log order."""

    model_config = ConfigDict(json_schema_extra={"examples": EXAMPLES["TaskHistoryView"]})

    task_id: UUID
    task_type: str
    status: TaskStatus
    created_at: datetime
    attempts: list[AttemptView]
    events: list[EventView]


class TaskTypeView(_Answer):
    """A registered task type and the defaults of its tasks."""

    name: str
    queue: str
    priority: Priority
    timeout_seconds: Annotated[
        float | None, Field(description="Limit of one execution; null: the worker's default.")
    ]
    max_retries: int
    payload_schema: Annotated[Any, Field(description="The payload's Avro schema; null: any JSON is taken.")]


class TaskTypeList(_Answer):
    """Every registered task type, by name."""

    model_config = ConfigDict(json_schema_extra={"examples": EXAMPLES["TaskTypeList"]})

    task_types: list[TaskTypeView]


class Check(_Answer):
    """Whether one thing that the process needs is there."""

    up: bool
    detail: Annotated[
        str | None, Field(description="What is wrong and, where one can help, the command to run.")
    ] = None


class Ready(_Answer):
    """Everything that was asked about is there."""

    model_config = ConfigDict(json_schema_extra={"examples": EXAMPLES["Ready"]})

    status: Literal["ready"]
    checks: dict[str, Check]


class Alive(_Answer):
    """The process answers."""

    model_config = ConfigDict(json_schema_extra={"examples": EXAMPLES["Alive"]})

    status: Literal["alive"]


class FieldProblem(_Answer):
    """One field that is wrong."""

    pointer: Annotated[str, Field(description="JSON pointer into the body.")]
    detail: str
    nearest: Annotated[str | None, Field(description="Of an unknown field: the field that may be meant.")] = (
        None
    )


class Problem(BaseModel):
    """RFC 9457. Decide by `type` or the status; the words may change. Members beyond these depend on the type."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(description="A stable URN, urn:taskline:problem:<slug>.")]
    title: str
    status: int
    detail: str
    instance: Annotated[str, Field(description="Names this one request, as the server's log does.")]
    pointer: Annotated[str | None, Field(description="JSON pointer of the payload's field.")] = None
    task_type: str | None = None
    nearest: Annotated[str | None, Field(description="The name that may be meant.")] = None
    task_id: Annotated[UUID | None, Field(description="The task whose fate is unknown.")] = None
    task_status: Annotated[
        TaskStatus | None, Field(description="Of a task that was not cancelled: why not.")
    ] = None
    limit_bytes: int | None = None
    size_bytes: int | None = None
    errors: list[FieldProblem] | None = None
    checks: dict[str, Check] | None = None
    scope: Annotated[str | None, Field(description="The scope that the API key lacks.")] = None
    violated_policies: Annotated[
        list[str] | None,
        Field(
            alias="violated-policies",
            description="The rate limits that are used up, as RateLimit-Policy names them.",
        ),
    ] = None


class BatchItem(_Answer):
    """What became of one task of a batch: what `POST /tasks` would have answered."""

    status: Annotated[int, Field(description="201: accepted. 200: a duplicate. Others: see `problem`.")]
    task: Annotated[TaskAccepted | TaskDuplicate | None, Field(description="With 201 or 200.")] = None
    replayed: Annotated[
        bool, Field(description="Accepted before, by an earlier request with the same idempotency key.")
    ] = False
    problem: Annotated[Problem | None, Field(description="With any other status.")] = None
    retry_after: Annotated[
        int | None, Field(description="With 503: seconds after which to try this one again.")
    ] = None


class BatchOutcome(_Answer):
    """What became of each task of a batch."""

    model_config = ConfigDict(json_schema_extra={"examples": EXAMPLES["BatchOutcome"]})

    results: Annotated[list[BatchItem], Field(description="In the order of the tasks.")]


# Everything that the OpenAPI document names.
DOCUMENTED: tuple[type[BaseModel], ...] = (
    TaskSubmission,
    TaskAccepted,
    TaskDuplicate,
    TaskBatch,
    BatchOutcome,
    TaskView,
    TaskHistoryView,
    TaskTypeList,
    Ready,
    Alive,
    Problem,
)
