"""All that puts a task in: needs Kafka, and no database."""

from __future__ import annotations

from taskline.producers.async_producer import AsyncTaskProducer
from taskline.producers.producer import TaskProducer
from taskline.producers.submission import Submission, SubmitOptions, TaskFailure, TaskHandle

__all__ = ["AsyncTaskProducer", "Submission", "SubmitOptions", "TaskFailure", "TaskHandle", "TaskProducer"]
