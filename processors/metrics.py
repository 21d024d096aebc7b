"""Prometheus numbers of the projector, updated once per flush."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

RECORDS = Counter(
    "taskline_projector_records",
    "What was folded into the view, by kind: submissions, redispatches, undecodable, events, rejected, expired, letters, raw_letters, resolutions.",
    ["kind"],
)
FLUSHES = Counter("taskline_projector_flushes", "Runs of records that are stored and acknowledged.")
FLUSH_SECONDS = Histogram(
    "taskline_projector_flush_seconds",
    "From the projection of a run of records to its last acknowledgement.",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5, 30),
)
FLUSH_RECORDS = Histogram(
    "taskline_projector_flush_records",
    "Records in a flush.",
    buckets=(1, 3, 10, 30, 100, 300, 1_000, 3_000),
)
LAG_SECONDS = Gauge(
    "taskline_projector_lag_seconds",
    "Age of the oldest record of the last flush when it became visible, by this process's clock.",
)
HALTED = Gauge(
    "taskline_projector_halted_partitions",
    "Partitions that this process has halted, since only a newer projector knows the schema of their next record. Alert when above 0.",
)
STORE_RETRIES = Counter("taskline_projector_store_retries", "Writes to the view that have to be tried again.")
DLQ_RETRIES = Counter("taskline_projector_dlq_retries", "Dead letters that have to be sent again.")
RESTARTS = Counter(
    "taskline_projector_consumer_restarts", "Times that the Faust app died or stalled and was replaced."
)
OPEN_LETTERS = Gauge(
    "taskline_dead_letters_open",
    "Dead letters that nobody has replayed or discarded, up to the 20,000 that one look counts. From the process that has partition 0 of the dead-letter topic; others say 0, so take the maximum.",
)
OLDEST_LETTER_SECONDS = Gauge(
    "taskline_dead_letters_oldest_age_seconds",
    "Age of the oldest of them; 0: there is none. From that process, too.",
)
