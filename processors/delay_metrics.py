"""Prometheus numbers of a delay process. Labels are topics' tiers and never come from records."""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter, Gauge, Histogram

# Milliseconds on a good day, seconds behind a rebalance, minutes behind an outage.
_LATE_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30, 300)

RELEASE_LATENESS = Histogram(
    "taskline_delay_release_lateness_seconds",
    "From the moment at which a record should leave a tier to the moment at which it is sent on.",
    ["tier"],
    buckets=_LATE_SECONDS,
)
DELIVERY_LATENESS = Histogram(
    "taskline_delay_delivery_lateness_seconds",
    "From a record's due time to the moment at which it is sent to its dispatch topic.",
    buckets=_LATE_SECONDS,
)
FORWARDED = Counter(
    "taskline_delay_forwarded",
    "Records sent on and acknowledged, by the tier that they left and where they went: tier, or target (a dispatch topic).",
    ["tier", "to"],
)
REFUSED = Counter(
    "taskline_delay_refused",
    "Records without a usable due time or target; their bytes are on the dead-letter topic.",
)
SKIPPED = Counter(
    "taskline_delay_skipped",
    "Records read again after a restart or a move that an earlier owner had forwarded.",
)
WAITING = Gauge(
    "taskline_delay_waiting",
    "Records that wait in the partitions of this process, by tier; looked at every few seconds.",
    ["tier"],
)
HELD = Gauge("taskline_delay_held", "Records that this process holds in memory.")
UNDER_WAY = Gauge("taskline_delay_under_way", "Records that were sent on and are not acknowledged.")
COMMIT_FAILURES = Counter(
    "taskline_delay_commit_failures", "Offset commits that failed; the next one carries newer offsets."
)
PURGED = Counter("taskline_delay_purges", "Partitions whose forwarded records were deleted from the log.")


# `labels()` looks its child up under a lock, which is a noticeable part of a hop.
@cache
def release_lateness(tier: str) -> Histogram:
    """The child of RELEASE_LATENESS."""
    return RELEASE_LATENESS.labels(tier)


@cache
def forwarded(tier: str, to: str) -> Counter:
    """The child of FORWARDED."""
    return FORWARDED.labels(tier, to)
