"""Prometheus numbers of a worker process. Task types that this process does not serve are never label values."""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter, Gauge, Histogram

from taskline.schemas.events import Priority

# A handler takes anything from nothing to hours.
_HANDLER_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300, 1_800, 7_200)
# An idle worker picks up within milliseconds; a backlog is minutes.
_PICKUP_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30, 120, 600, 3_600)

TASKS = Counter(
    "taskline_worker_tasks",
    "Executions that ended, by outcome: succeeded, failed, timed_out, crashed, released, cancelled (aborted), dropped (its task was over).",
    ["task_type", "outcome"],
)
HANDLER_SECONDS = Histogram(
    "taskline_worker_handler_seconds",
    "Time from a handler's start to its end.",
    ["task_type"],
    buckets=_HANDLER_SECONDS,
)
PICKUP_SECONDS = Histogram(
    "taskline_worker_pickup_seconds",
    "Time from a dispatch record's append to its handler's start, by the clocks of the broker and this machine.",
    ["priority"],
    buckets=_PICKUP_SECONDS,
)
SLOTS = Gauge("taskline_worker_slots", "Handlers that may run at once.")
SLOTS_USED = Gauge(
    "taskline_worker_slots_used", "Slots in use, from the append of Started to the handler's end."
)
BUFFERED = Gauge("taskline_worker_buffered", "Records that wait in memory for a slot.", ["priority"])
IN_FLIGHT = Gauge(
    "taskline_worker_in_flight",
    "Records taken and not done: buffered, running, or with an unacknowledged outcome.",
)
COMMIT_FAILURES = Counter(
    "taskline_worker_commit_failures",
    "Offset commits that failed; the next one carries newer offsets.",
    ["priority"],
)
DEAD_LETTERS = Counter(
    "taskline_worker_dead_letters",
    "Records put on the dead-letter topic: exhausted, permanent, poison, unregistered, payload_undecodable, or undecodable bytes.",
    ["reason"],
)
RETRIES = Counter(
    "taskline_worker_retries",
    "Attempts that failed and are followed by another one, by what kind of error ended them.",
    ["category"],
)
EXPIRED = Counter(
    "taskline_worker_expired",
    "Tasks that were not worth starting any more, at their first attempt or a later one.",
    ["task_type"],
)
DEATHS = Counter(
    "taskline_worker_handler_deaths",
    "Executions whose process died under them: alone (the task's own doing), or beside others.",
    ["task_type", "alone"],
)
CHILDREN_RECYCLED = Counter(
    "taskline_worker_children_recycled",
    "Child processes that were replaced although they lived: tasks (worker.child_max_tasks), rss (worker.child_max_rss_mb), "
    "memory (they were at their memory limit, or more than half way there after a task).",
    ["reason"],
)
LOOKED_UP = Counter(
    "taskline_worker_looked_up",
    "Executions whose task was looked up in the view before they began, since it may have been cancelled.",
)
ASIDE = Gauge(
    "taskline_worker_aside",
    "Executions that wait, off their slots, for the view to say whether they may begin.",
)
DUPLICATES = Counter(
    "taskline_worker_duplicates",
    "Records that were not run, since the same attempt had been brought to its end here from another place in the log.",
)
SKIPPED = Counter(
    "taskline_worker_skipped",
    "Records read again after a restart or a move that an earlier owner had completed.",
)
ABANDONED = Counter(
    "taskline_worker_abandoned_handlers",
    "Handlers that were still running after their time limit and the grace.",
    ["task_type"],
)


# `labels()` looks its child up under a lock, which once a task is a noticeable part of a worker's time.
@cache
def tasks(task_type: str, outcome: str) -> Counter:
    """The child of TASKS."""
    return TASKS.labels(task_type, outcome)


@cache
def handler_seconds(task_type: str) -> Histogram:
    """The child of HANDLER_SECONDS."""
    return HANDLER_SECONDS.labels(task_type)


@cache
def pickup(priority: Priority) -> Histogram:
    """The child of PICKUP_SECONDS."""
    return PICKUP_SECONDS.labels(priority.value)
