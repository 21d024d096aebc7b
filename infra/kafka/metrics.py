"""Prometheus numbers of the producer clients, updated once per run of acknowledgements (never per record)."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import Counter, Gauge

from taskline.errors import DeliveryError

APPENDED = Counter("taskline_log_records_appended", "Records that the broker has acknowledged.", ["client"])
APPENDED_BYTES = Counter("taskline_log_appended_bytes", "Bytes of acknowledged records' values.", ["client"])
FAILURES = Counter(
    "taskline_log_append_failures",
    "Records not acknowledged, by error: DeliveryFailed (not in the log), DeliveryUnknown (may be).",
    ["client", "error"],
)
BUFFERED = Gauge("taskline_log_buffered_records", "Records that wait for their acknowledgement.", ["client"])
REPLACEMENTS = Counter(
    "taskline_log_client_replacements",
    "Times that a producer client failed fatally and was replaced by a new one.",
    ["client"],
)


class AppendMetrics:
    """Plain counts of one client, moved to Prometheus by `publish`. Used by one thread."""

    def __init__(self, client: str) -> None:
        """Count for the client of this name."""
        self.appended = 0
        self.appended_bytes = 0
        self._failures: Tally[str] = Tally()
        self._client = client
        self._appended = APPENDED.labels(client)
        self._bytes = APPENDED_BYTES.labels(client)
        self._buffered = BUFFERED.labels(client)

    def failed(self, error: DeliveryError) -> None:
        """Count a record that was not acknowledged."""
        self._failures[type(error).__name__] += 1

    def replaced(self) -> None:
        """Count a replacement of the client."""
        REPLACEMENTS.labels(self._client).inc()

    def publish(self, buffered: int) -> None:
        """Move the counts to Prometheus; `buffered` records are waiting."""
        self._buffered.set(buffered)
        if self.appended:
            self._appended.inc(self.appended)
            self._bytes.inc(self.appended_bytes)
            self.appended = self.appended_bytes = 0
        for error, count in self._failures.items():
            FAILURES.labels(self._client, error).inc(count)
        self._failures.clear()
