"""What workers send and get, as models: they check bodies, and describe answers for the document."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from taskline.api.examples import EXAMPLE_ID
from taskline.schemas.types import TASK_TYPE_NAME

_TOKEN = "q8yGk2vYw5Zr3cJx0dTfUhLbNaQeSpMi"  # noqa: S105 - an example
MAX_TASK_TYPES = 200
_TypeName = Annotated[str, Field(pattern=f"^{TASK_TYPE_NAME}$")]
_Token = Annotated[
    str, Field(min_length=1, max_length=200, description="As `fetch` gave it; treat it as opaque.")
]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Answer(BaseModel):
    # An answer may gain members at any time; workers must ignore what they do not know.
    model_config = ConfigDict(extra="ignore")


class FetchRequest(_Request):
    """Ask for tasks."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"worker_id": "node-7", "task_types": ["geo.nearest"], "batch_size": 10, "wait_seconds": 20}
            ]
        }
    )

    worker_id: Annotated[
        str,
        Field(
            min_length=1, max_length=100, description="A name for the worker, shown in the tasks' history."
        ),
    ]
    task_types: Annotated[
        list[_TypeName],
        Field(
            min_length=1,
            max_length=MAX_TASK_TYPES,
            description="What the worker can do; it gets nothing else.",
        ),
    ]
    batch_size: Annotated[
        int, Field(ge=1, description="Most tasks wanted; the process may give fewer (`gateway.max_batch`).")
    ] = 1
    wait_seconds: Annotated[
        float,
        Field(ge=0, description="How long to wait for the first task, at most `gateway.max_wait_seconds`."),
    ] = 0.0


class FetchedTask(_Answer):
    """A task that is lent to the worker."""

    task_id: UUID
    task_type: str
    payload: Annotated[Any, Field(description="As JSON: bytes are base64, decimals and durations text.")]
    timeout_seconds: Annotated[
        float, Field(description="How long the work may take; the lease is not extended beyond it.")
    ]
    attempt: Annotated[int, Field(ge=1)]
    lease_token: _Token


class FetchAnswer(_Answer):
    """The tasks that the worker was lent; none, when the wait was over first."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "tasks": [
                        {
                            "task_id": EXAMPLE_ID,
                            "task_type": "geo.nearest",
                            "payload": {"iata": "FRA"},
                            "timeout_seconds": 300.0,
                            "attempt": 1,
                            "lease_token": _TOKEN,
                        }
                    ],
                    "lease_duration_seconds": 60.0,
                }
            ]
        }
    )

    tasks: list[FetchedTask]
    lease_duration_seconds: Annotated[
        float, Field(description="How long each is the worker's, unless it extends the lease.")
    ]


class CompleteRequest(_Request):
    """The work is done."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"lease_token": _TOKEN, "result": {"km": 12}}]})

    lease_token: _Token
    result: Annotated[Any, Field(description="Any JSON, at most `worker.max_result_bytes`.")] = None


class FailRequest(_Request):
    """The work could not be done."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "lease_token": _TOKEN,
                    "error_class": "HttpError",
                    "message": "429 Too Many Requests",
                    "retry_after_seconds": 30,
                }
            ]
        }
    )

    lease_token: _Token
    error_class: Annotated[
        str, Field(min_length=1, max_length=1_000, description="What went wrong, as a name.")
    ]
    message: Annotated[str, Field(max_length=100_000, description="In words; kept up to 1,536 bytes.")] = ""
    retry_after_seconds: Annotated[
        float | None,
        Field(
            ge=0, le=31_536_000, description="When to try again. Absent: as the workers' retry policy has it."
        ),
    ] = None
    permanent: Annotated[
        bool, Field(description="True: another attempt can't help; the task becomes a dead letter.")
    ] = False


class ExtendRequest(_Request):
    """The work goes on."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"lease_token": _TOKEN}]})

    lease_token: _Token
    seconds: Annotated[
        float | None,
        Field(gt=0, description="How long the lease shall last from now. Absent: as long as a new one."),
    ] = None
    progress: Annotated[
        float | None,
        Field(ge=0, le=1, description="How much is done; shown in the task's status."),
    ] = None
    message: Annotated[
        str | None,
        Field(max_length=500, description="What is being done, in a few words; shown in the task's status."),
    ] = None


class ReportTaken(_Answer):
    """The report counted; the same one again is answered the same."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"task_id": EXAMPLE_ID, "outcome": "completed", "next_attempt_at": None}]
        }
    )

    task_id: UUID
    outcome: Literal["completed", "retry_scheduled", "dead", "expired", "cancelled"]
    next_attempt_at: Annotated[
        datetime | None, Field(description="Of `retry_scheduled`, if it is known.")
    ] = None


class LeaseExtension(_Answer):
    """The lease goes on."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"task_id": EXAMPLE_ID, "lease_remaining_seconds": 60.0, "cancel_requested": False}]
        }
    )

    task_id: UUID
    lease_remaining_seconds: float
    cancel_requested: Annotated[
        bool,
        Field(
            description="True: somebody cancels the task although it runs. Stop, and report `fail`: the task ends as cancelled."
        ),
    ]


GATEWAY_MODELS: tuple[type[BaseModel], ...] = (
    FetchRequest,
    FetchAnswer,
    CompleteRequest,
    FailRequest,
    ExtendRequest,
    ReportTaken,
    LeaseExtension,
)
