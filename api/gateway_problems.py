"""The problems of the worker protocol, beyond those of the public API."""

from __future__ import annotations

from taskline.api.problems import ProblemType

WRONG_QUEUE = ProblemType(
    slug="wrong-queue",
    status=403,
    title="The API key is for other queues",
    meaning="The API key has the scope `work`, but not for the queue that this process serves; nothing was done.",
)
STALE_LEASE = ProblemType(
    slug="stale-lease",
    status=409,
    title="The lease does not hold",
    meaning="The lease ended before this report, or the token is none of this task's: the report changed nothing. Drop the task, and don't report again.",
    members=("task_id",),
)
REPORT_UNKNOWN = ProblemType(
    slug="report-unknown",
    status=503,
    title="Not known in time whether the report counts",
    meaning="Kafka or Cassandra did not answer in time, so nobody can say whether the report counts. Send the same report again after `Retry-After`: the answer is what is true then.",
    members=("task_id",),
)
GATEWAY_PROBLEMS: tuple[ProblemType, ...] = (WRONG_QUEUE, STALE_LEASE, REPORT_UNKNOWN)
