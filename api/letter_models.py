"""The shapes of requests and answers about dead letters; as `taskline.api.models` has those about tasks."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonValue

from taskline.api.examples import EXAMPLE_ID
from taskline.schemas.events import ErrorCategory, LetterAction, Priority

# Letters that one bulk request replays; the caller goes on with the cursor.
MAX_BULK = 100
MAX_TEXT_CHARS = 200
MAX_NOTE_CHARS = 1_000

_REPLAY_ID = "019ad6f1-0a40-7b1c-8e55-4d1f6a2b9c07"
_DIED, _RESOLVED = "2026-11-29T15:19:48.480Z", "2026-11-29T16:02:11.007Z"
_LETTER: dict[str, JsonValue] = {
    "letter_id": EXAMPLE_ID,
    "at": _DIED,
    "task_type": "mail.send",
    "queue": "default",
    "reason": "exhausted",
    "category": "server",
    "error_class": "httpx.HTTPStatusError",
    "message": "502 Bad Gateway",
    "attempt": 4,
    "generation": 0,
    "root_id": EXAMPLE_ID,
    "replay_of": None,
    "size_bytes": 1_204,
    "resolution": None,
}
_RESOLUTION: dict[str, JsonValue] = {
    "action": "replayed",
    "at": _RESOLVED,
    "by": "api-7f9c-31-0c77aa",
    "replayed_as": _REPLAY_ID,
    "note": None,
}
_FILTER: dict[str, JsonValue] = {"task_type": "mail.send", "after": "2026-11-29T15:00:00Z"}


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore")


class LetterReplay(_Request):
    """How to replay one dead letter. Without a payload the task is submitted with the one that it had."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"payload": {"to": "ada@example.org"}}]})

    payload: Annotated[
        Any, Field(description="Another payload; must fit the task type's schema as it is now.")
    ] = None


class LetterDiscard(_Request):
    """Why nothing will be done about a dead letter."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"note": "the account was closed"}]})

    note: Annotated[str | None, Field(max_length=MAX_NOTE_CHARS)] = None


class LetterSelection(_Request):
    """Which open dead letters. A member that is null or absent takes any."""

    model_config = ConfigDict(strict=False, json_schema_extra={"examples": [_FILTER]})

    task_type: Annotated[str | None, Field(max_length=MAX_TEXT_CHARS)] = None
    reason: Annotated[str | None, Field(max_length=MAX_TEXT_CHARS)] = None
    error: Annotated[
        str | None, Field(max_length=MAX_TEXT_CHARS, description="Part of the error's class or message.")
    ] = None
    after: Annotated[datetime | None, Field(description="Died at or after this instant.")] = None
    before: Annotated[datetime | None, Field(description="Died before this instant.")] = None


class LettersReplay(_Request):
    """Replay the open dead letters that a filter takes, oldest first, as many as `limit`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"filter": _FILTER, "limit": 50}]})

    filter: Annotated[LetterSelection, Field(description="Which; {} takes every open one.")]
    limit: Annotated[int, Field(ge=1, le=MAX_BULK)] = MAX_BULK
    dry_run: Annotated[bool, Field(description="Only say which they are.")] = False
    cursor: Annotated[str | None, Field(description="Where an earlier request left off.")] = None


class ResolutionView(_Answer):
    """What was done about a dead letter."""

    action: LetterAction
    at: datetime
    by: Annotated[str, Field(description="The process or the person.")]
    replayed_as: Annotated[UUID | None, Field(description="The task that replays it.")]
    note: str | None


class LetterView(_Answer):
    """A dead letter in short."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [_LETTER, _LETTER | {"resolution": _RESOLUTION}]}
    )

    letter_id: Annotated[UUID, Field(description="The dead task's id.")]
    at: Annotated[datetime, Field(description="When it died.")]
    task_type: str
    queue: str | None
    reason: Annotated[str, Field(description="Why it was given up, in a word.")]
    category: Annotated[ErrorCategory, Field(description="Of the last error.")]
    error_class: str
    message: Annotated[str, Field(description="The last error's text, shortened in a list.")]
    attempt: Annotated[int, Field(description="The last attempt.")]
    generation: Annotated[int, Field(description="How many replays led here.")]
    root_id: UUID | None
    replay_of: UUID | None
    size_bytes: Annotated[int, Field(description="Of the whole letter in the log.")]
    resolution: Annotated[ResolutionView | None, Field(description="null: it is open.")]


class LetterError(_Answer):
    """Why one attempt failed."""

    attempt: int
    at: datetime
    worker: str
    category: ErrorCategory
    error_class: str
    message: str


class LetterDetail(LetterView):
    """A whole dead letter."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                _LETTER
                | {
                    "traceback": "Traceback (most recent call last): …",
                    "worker": "worker-7f9c-4711-a1b2c3",
                    "errors": [
                        {
                            "attempt": 4,
                            "at": _DIED,
                            "worker": "worker-7f9c-4711-a1b2c3",
                            "category": "server",
                            "error_class": "httpx.HTTPStatusError",
                            "message": "502 Bad Gateway",
                        }
                    ],
                    "priority": "normal",
                    "max_retries": 3,
                    "affinity_key": None,
                    "payload": {"to": "ada@example.org"},
                    "payload_unread": None,
                }
            ]
        }
    )

    traceback: str | None
    worker: str
    errors: Annotated[
        list[LetterError],
        Field(description="Of all attempts, oldest first; of too many, the first and the newest."),
    ]
    priority: Priority
    max_retries: int
    affinity_key: str | None
    payload: Annotated[Any, Field(description="As JSON; base64 of its bytes where they can't be read.")]
    payload_unread: Annotated[str | None, Field(description="Why the payload can't be read; null: it can.")]


class LetterList(_Answer):
    """Some dead letters, newest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"dead_letters": [_LETTER], "cursor": None}]})

    dead_letters: list[LetterView]
    cursor: Annotated[
        str | None,
        Field(
            description="Ask again with it for more; a list may be empty and still have one. null: that was all."
        ),
    ]


class LetterReplayed(_Answer):
    """The dead task was submitted again, as a new one."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "letter_id": EXAMPLE_ID,
                    "outcome": "replayed",
                    "task_id": _REPLAY_ID,
                    "generation": 1,
                    "root_id": EXAMPLE_ID,
                }
            ]
        }
    )

    letter_id: UUID
    outcome: Annotated[
        Literal["replayed", "resumed"],
        Field(description="resumed: an earlier, interrupted replay had submitted the same task."),
    ]
    task_id: Annotated[UUID, Field(description="The new task.")]
    generation: int
    root_id: UUID


class LetterDiscarded(_Answer):
    """Nothing will be done about the dead letter."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"letter_id": EXAMPLE_ID, "outcome": "discarded"}]}
    )

    letter_id: UUID
    outcome: Literal["discarded"]


class LetterOutcome(_Answer):
    """What became of one dead letter."""

    letter_id: UUID
    outcome: Literal["replayed", "resumed", "matched", "refused"]
    task_id: Annotated[UUID | None, Field(description="The new task.")]
    problem: Annotated[
        str | None,
        Field(description="Of a refused one: the type of the problem, as if it had been asked for alone."),
    ]
    detail: str | None


class LettersReplayed(_Answer):
    """What became of each dead letter."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "results": [
                        {
                            "letter_id": EXAMPLE_ID,
                            "outcome": "replayed",
                            "task_id": _REPLAY_ID,
                            "problem": None,
                            "detail": None,
                        }
                    ],
                    "cursor": None,
                }
            ]
        }
    )

    results: list[LetterOutcome]
    cursor: Annotated[
        str | None, Field(description="Ask again with it for those that are left; null: that was all.")
    ]


# What the OpenAPI document names besides `taskline.api.models.DOCUMENTED`.
LETTER_MODELS: tuple[type[BaseModel], ...] = (
    LetterReplay,
    LetterDiscard,
    LettersReplay,
    LetterList,
    LetterDetail,
    LetterReplayed,
    LetterDiscarded,
    LettersReplayed,
)
