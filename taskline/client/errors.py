"""What the API refused, as exceptions.

Where `taskline.errors` has a class for it, that is raised (`UnknownTaskType`, `InvalidPayload`, `TaskNotFound`, …), with the
problem itself as its `__cause__`; the rest are `ApiError`s. Decide by class, or by `type` and `status`; the words may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from taskline.client.results import TaskSnapshot
from taskline.errors import DeliveryUnknown, InvalidRequest, TasklineError, Unavailable


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A refusal as the API told it (RFC 9457)."""

    status: int
    # The end of the problem's URN, e.g. "invalid-payload"; "" when it was no problem of Taskline's, as from a proxy.
    type: str
    title: str
    detail: str
    # Names the request in the server's log.
    instance: str | None = None
    # Seconds after which to try again.
    retry_after: float | None = None
    # Members that belong to the type.
    members: Mapping[str, Any] = field(default_factory=dict)


class ApiError(TasklineError):
    """The API refused a request, and no other class says it better."""

    def __init__(self, problem: Problem) -> None:
        """Take over what the API said."""
        self.problem = problem
        self.status = problem.status
        self.type = problem.type
        self.title = problem.title
        self.detail = problem.detail
        self.retry_after = problem.retry_after
        super().__init__(f"{problem.title}: {problem.detail}" if problem.detail else problem.title)


class Unauthorized(ApiError):
    """401: no API key, or one that is unknown, revoked or expired."""


class Forbidden(ApiError):
    """403: the API key lacks a scope."""

    @property
    def scope(self) -> str | None:
        """The scope that it lacks."""
        scope = self.problem.members.get("scope")
        return scope if isinstance(scope, str) else None


class InvalidFields(ApiError, InvalidRequest):
    """400 or 422: a field or a parameter is unknown, missing or of the wrong kind; `problem.members["errors"]` lists them."""


class Conflict(ApiError):
    """409: the task, the dead letter or the idempotency key is not in a state that allows it."""


class CancelRefused(Conflict):
    """409: the task runs or is over, so that it was not cancelled."""

    @property
    def task_status(self) -> str | None:
        """In which state it was."""
        status = self.problem.members.get("task_status")
        return status if isinstance(status, str) else None


class IdempotencyConflict(Conflict):
    """409: the idempotency key was used for another submission."""


class RateLimited(ApiError):
    """429: a rate limit of the tenant or the key is used up, and did not become free within the time for retries."""


class ServiceUnavailable(ApiError, Unavailable):
    """503: something that the API needs is away; `type` says what, and whether anything was accepted."""


class ServerFault(ApiError):
    """500: a fault of the server; quote `problem.instance` when you report it."""


class UnexpectedAnswer(ApiError):
    """An answer that this version can't read: a proxy's, or a newer server's."""


class SubmissionUnknown(DeliveryUnknown):
    """Nobody could tell whether a submission is in the log.

    With an `idempotency_key`, submitting the same again under that key is safe. `task_id`, where the API named it, can be looked up.
    """

    def __init__(
        self, message: str, *, task_id: str | None = None, idempotency_key: str | None = None
    ) -> None:
        """Say what is known."""
        self.task_id = task_id
        self.idempotency_key = idempotency_key
        super().__init__(message)


class NotEnded(TasklineError, TimeoutError):
    """`wait` ran out of time; `task` is as it was then."""

    def __init__(self, task: TaskSnapshot) -> None:
        """Say how far it got."""
        self.task = task
        super().__init__(f"task {task.task_id} has not ended: it is {task.status}")
