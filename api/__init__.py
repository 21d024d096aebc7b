"""The HTTP API: submit tasks, read their state and their history.

`create_app` makes the ASGI app on given dependencies. The `api` extra is needed.
"""

from __future__ import annotations

from taskline.api.app import create_app
from taskline.api.appending import TaskTypes
from taskline.api.deps import ApiDeps, StatusQueries
from taskline.api.health import Health
from taskline.api.metrics import ApiMetrics
from taskline.api.problems import PROBLEMS, ProblemError, ProblemType
from taskline.api.submissions import Submissions

__all__ = [
    "PROBLEMS",
    "ApiDeps",
    "ApiMetrics",
    "Health",
    "ProblemError",
    "ProblemType",
    "StatusQueries",
    "Submissions",
    "TaskTypes",
    "create_app",
]
