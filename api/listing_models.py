"""The shapes of `GET /tasks`, for the OpenAPI document and for tests."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonValue

from taskline.api.examples import EXAMPLES
from taskline.api.models import TaskView

_TASK = EXAMPLES["TaskView"][0]
_WITHOUT_RESULT: JsonValue = (
    {name: value for name, value in _TASK.items() if name != "result"} if isinstance(_TASK, dict) else None
)


class TaskListItem(TaskView):
    """A task of a list."""

    model_config = ConfigDict(json_schema_extra={"examples": [_WITHOUT_RESULT]})

    result: Annotated[
        Any, Field(description="What the handler returned; only in lists by `ids`, absent in others.")
    ] = None


class TaskList(BaseModel):
    """Some tasks. Clients must ignore members that they do not know."""

    model_config = ConfigDict(
        extra="ignore",
        json_schema_extra={
            "examples": [
                {
                    "tasks": [_WITHOUT_RESULT],
                    "next_cursor": "ATr4b1FxZ0lVAZrW4nwAfTqbHg9sOlLUgQ",
                    "searched_to": "2026-11-29T15:04:05.120Z",
                    "unknown": [],
                    "unreadable": [],
                },
                {
                    "tasks": [],
                    "next_cursor": None,
                    "searched_to": None,
                    "unknown": ["019ad6e2-7c00-7d3a-9b1e-0f6c3a52d482"],
                    "unreadable": [],
                },
            ]
        },
    )

    tasks: list[TaskListItem]
    next_cursor: Annotated[
        str | None, Field(description="For the next page, with the same filters; null: this is the last.")
    ]
    searched_to: Annotated[
        datetime | None,
        Field(
            description="All tasks created later than this were searched; null: all that the filters allow."
        ),
    ]
    unknown: Annotated[
        list[UUID], Field(description="Of `ids`: those that are no task of the caller's tenant.")
    ]
    unreadable: Annotated[
        list[UUID],
        Field(
            description="Tasks that this process can't read, e.g. since a newer Taskline has written them."
        ),
    ]


# What the OpenAPI document names besides `taskline.api.models.DOCUMENTED`.
LIST_MODELS: tuple[type[BaseModel], ...] = (TaskList,)
