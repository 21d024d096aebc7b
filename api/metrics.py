"""The API's own Prometheus numbers, and the page that shows them with all others of the process."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# From a read served from memory to the longest wait that the API allows itself.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Methods that get a label of their own; anything else could be made up by a caller without end.
_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PATCH", "PUT"})
UNMATCHED = "(none)"


class ApiMetrics:
    """Counts requests. Each app has its own registry, so that several can live in one process (tests)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "taskline_api_requests",
            "Requests answered, by route template and status (499: the client left first).",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "taskline_api_request_seconds",
            "Time from the request's head to the end of its answer.",
            ["method", "route"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.in_flight = Gauge("taskline_api_requests_in_flight", "Requests in hand.", registry=self.registry)
        self.waiting = Gauge(
            "taskline_api_requests_waiting",
            "Requests that wait for a task's end (?wait=); not counted as in hand.",
            registry=self.registry,
        )
        self.dependency_up = Gauge(
            "taskline_api_dependency_up",
            "1: it answered when last asked; 0: it did not.",
            ["dependency"],
            registry=self.registry,
        )
        self.submitted = Counter(
            "taskline_api_submitted_tasks",
            "Tasks of single submissions and of batches, by what their caller was told (taskline.api.outcomes).",
            ["via", "outcome"],
            registry=self.registry,
        )
        self.cancels = Counter(
            "taskline_api_cancels",
            "Requests to cancel a task that could be read: cancelled, refused (running or over), requested (not known in time) or unknown "
            "(Kafka did not acknowledge).",
            ["outcome"],
            registry=self.registry,
        )
        # Looking a labelled child up costs more than counting with it.
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        key = (method, route, status)
        found = self._children.get(key)
        if found is None:
            shown = method if method in _METHODS else "OTHER"
            found = (
                self._requests.labels(shown, route, str(status)),
                self._seconds.labels(shown, route),
            )
            if shown == method:
                self._children[key] = found
        requests, histogram = found
        requests.inc()
        histogram.observe(seconds)

    def page(self) -> bytes:
        """Everything that the process counts, in Prometheus' text format."""
        return generate_latest(REGISTRY) + generate_latest(self.registry)
