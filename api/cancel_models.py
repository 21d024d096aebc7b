"""What `DELETE /tasks/{task_id}` answers with, as models for the document."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from taskline.api.examples import EXAMPLE_ID


class _Answer(BaseModel):
    # An answer may gain members at any time; clients must ignore what they do not know.
    model_config = ConfigDict(extra="ignore")


class TaskCancelled(_Answer):
    """The task is cancelled: its handler will not start again."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"task_id": EXAMPLE_ID, "status": "cancelled", "cancelled_at": "2026-11-29T15:04:05.164Z"}
            ]
        }
    )

    task_id: UUID
    status: Literal["cancelled"]
    cancelled_at: Annotated[datetime, Field(description="When it was, also if an earlier request did it.")]


class CancelPending(_Answer):
    """The cancel is in the log, and what came of it is not known yet: the task's state will tell."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"task_id": EXAMPLE_ID, "status": "cancel_requested"}]}
    )

    task_id: UUID
    status: Literal["cancel_requested"]


CANCEL_MODELS: tuple[type[BaseModel], ...] = (TaskCancelled, CancelPending)
