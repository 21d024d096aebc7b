"""What a gateway counts about leases."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

LENT = Counter("taskline_leases_lent", "Tasks handed out to HTTP workers, by task type.", ["task_type"])
OUTCOMES = Counter(
    "taskline_leases_reports",
    "Reports of HTTP workers, by kind and by what came of them (stale: it changed nothing).",
    ["report", "answer"],
)
EXPIRED = Counter("taskline_leases_expired", "Leases that ended without an outcome.", ["task_type"])
REPAIRED = Counter(
    "taskline_leases_repaired",
    "Closed leases whose next step was missing when their guard came due, since a gateway had died over it.",
)
GUARDED = Counter("taskline_leases_guards", "Guard records written.")
OPEN = Gauge(
    "taskline_leases_open", "Tasks lent by this process whose leases have not ended by its knowledge."
)
WAITING = Gauge("taskline_leases_fetches_waiting", "Fetches that wait for a task.")
BUFFERED = Gauge("taskline_leases_buffered", "Records that wait in memory for a fetch.")
HANDED_ON = Counter(
    "taskline_leases_handed_on",
    "Records that went to their topic's end since nobody fetched their type.",
    ["task_type"],
)
JOINED = Gauge(
    "taskline_leases_joined", "1: this process is in the workers' groups; 0: nobody fetches from it."
)
