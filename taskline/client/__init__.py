"""The HTTP API from Python: `Client` for plain code, `AsyncClient` for asyncio. Needs the extra `client` (httpx).

```python
from taskline.client import Client

with Client.from_env() as client:
    task = client.submit("photos.resize", {"url": "cat.png"})
    print(client.wait(task.task_id, timeout=60).result)
```
"""

from __future__ import annotations

from taskline.client.aio import AsyncClient
from taskline.client.calls import LetterFields, ListFields, Submit, SubmitFields
from taskline.client.errors import (
    ApiError,
    CancelRefused,
    Conflict,
    Forbidden,
    IdempotencyConflict,
    InvalidFields,
    NotEnded,
    Problem,
    RateLimited,
    ServerFault,
    ServiceUnavailable,
    SubmissionUnknown,
    Unauthorized,
    UnexpectedAnswer,
)
from taskline.client.options import ClientOptions
from taskline.client.results import (
    Attempt,
    AttemptError,
    Cancellation,
    DeadLetter,
    Event,
    History,
    LetterPage,
    Progress,
    Replayed,
    SubmittedTask,
    TaskLookup,
    TaskPage,
    TaskSnapshot,
    TaskTypeInfo,
)
from taskline.client.submitting import SubmitFailure
from taskline.client.sync import Client

__all__ = [
    "ApiError",
    "AsyncClient",
    "Attempt",
    "AttemptError",
    "CancelRefused",
    "Cancellation",
    "Client",
    "ClientOptions",
    "Conflict",
    "DeadLetter",
    "Event",
    "Forbidden",
    "History",
    "IdempotencyConflict",
    "InvalidFields",
    "LetterFields",
    "LetterPage",
    "ListFields",
    "NotEnded",
    "Problem",
    "Progress",
    "RateLimited",
    "Replayed",
    "ServerFault",
    "ServiceUnavailable",
    "SubmissionUnknown",
    "Submit",
    "SubmitFailure",
    "SubmitFields",
    "SubmittedTask",
    "TaskLookup",
    "TaskPage",
    "TaskSnapshot",
    "TaskTypeInfo",
    "Unauthorized",
    "UnexpectedAnswer",
]
