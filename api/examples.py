"""One example of each request and answer, for the documentation and its tests."""

from __future__ import annotations

from pydantic.config import JsonValue

EXAMPLE_ID = "019ad6e2-7c00-7d3a-9b1e-0f6c3a52d481"
_EXECUTION = "019ad6e2-7c0b-7aaa-8000-2a61c9e0f3b7"
_CREATED, _STARTED, _ENDED = (f"2026-11-29T15:04:05.{ms}Z" for ms in ("120", "131", "164"))
_WORKER = "worker-7f9c-4711-a1b2c3"

# By the name of the model in `taskline.api.models`.
EXAMPLES: dict[str, list[JsonValue]] = {
    "TaskSubmission": [
        {"task_type": "geo.nearest", "payload": {"iata": "LAX"}, "priority": "high"},
        {
            "task_type": "mail.send",
            "payload": {"to": "ada@example.org"},
            "idempotency_key": "order-17-receipt",
            "dedup_key": "ada@example.org",
            "dedup_window_seconds": 600,
        },
        {
            "task_type": "mail.send",
            "payload": {"to": "ada@example.org"},
            "affinity_key": "account-42",
            "delay_seconds": 90,
            "start_by": "2026-11-29T18:00:00Z",
        },
    ],
    "TaskAccepted": [
        {
            "task_id": EXAMPLE_ID,
            "status": "pending",
            "created_at": _CREATED,
            "scheduled_at": None,
            "task_type": "geo.nearest",
            "priority": "high",
            "queue": "default",
        }
    ],
    "TaskDuplicate": [
        {
            "task_id": EXAMPLE_ID,
            "duplicate": True,
            "task_type": "mail.send",
            "created_at": _CREATED,
            "status": "pending",
        }
    ],
    "TaskBatch": [
        {
            "tasks": [
                {
                    "task_type": "geo.nearest",
                    "payload": {"iata": "LAX"},
                    "idempotency_key": "order-17",
                },
                {"task_type": "geo.nearst", "payload": {"iata": "SFO"}},
            ]
        }
    ],
    "BatchOutcome": [
        {
            "results": [
                {
                    "status": 201,
                    "task": {
                        "task_id": EXAMPLE_ID,
                        "status": "pending",
                        "created_at": _CREATED,
                        "scheduled_at": None,
                        "task_type": "geo.nearest",
                        "priority": "normal",
                        "queue": "default",
                    },
                    "replayed": False,
                },
                {
                    "status": 400,
                    "problem": {
                        "type": "urn:taskline:problem:unknown-task-type",
                        "title": "Unknown task type",
                        "status": 400,
                        "detail": "unknown task type 'geo.nearst'; did you mean 'geo.nearest'?",
                        "instance": "urn:taskline:request:5f2b9c0d1e7a4b36",
                        "task_type": "geo.nearst",
                        "nearest": "geo.nearest",
                    },
                },
            ]
        }
    ],
    "TaskView": [
        {
            "task_id": EXAMPLE_ID,
            "task_type": "geo.nearest",
            "status": "completed",
            "priority": "high",
            "queue": "default",
            "created_at": _CREATED,
            "scheduled_at": None,
            "started_at": _STARTED,
            "completed_at": _ENDED,
            "attempt": 1,
            "retry_count": 0,
            "max_retries": 3,
            "next_attempt_at": None,
            "last_error": None,
            "result": {"nearest": "HHR", "km": 6.1},
            "reason": None,
            "worker": _WORKER,
            "progress": None,
            "root_id": EXAMPLE_ID,
            "replay_of": None,
            "generation": 0,
            "replayed_as": None,
            "retain_until": "2026-12-29T15:04:05.120Z",
        }
    ],
    "TaskHistoryView": [
        {
            "task_id": EXAMPLE_ID,
            "task_type": "geo.nearest",
            "status": "completed",
            "created_at": _CREATED,
            "attempts": [
                {
                    "attempt": 1,
                    "execution": _EXECUTION,
                    "outcome": "succeeded",
                    "worker": _WORKER,
                    "started_at": _STARTED,
                    "ended_at": _ENDED,
                    "error": None,
                    "reason": None,
                    "progress": None,
                }
            ],
            "events": [
                {
                    "event": "started",
                    "at": _STARTED,
                    "attempt": 1,
                    "worker": _WORKER,
                    "offset": 181,
                    "index": 0,
                    "execution": _EXECUTION,
                },
                {
                    "event": "succeeded",
                    "at": _ENDED,
                    "attempt": 1,
                    "worker": _WORKER,
                    "offset": 182,
                    "index": 3,
                    "execution": _EXECUTION,
                },
            ],
        }
    ],
    "TaskTypeList": [
        {
            "task_types": [
                {
                    "name": "geo.nearest",
                    "queue": "default",
                    "priority": "normal",
                    "timeout_seconds": 30.0,
                    "max_retries": 3,
                    "payload_schema": {
                        "type": "record",
                        "name": "Nearest",
                        "fields": [{"name": "iata", "type": "string"}],
                    },
                }
            ]
        }
    ],
    "Ready": [
        {
            "status": "ready",
            "checks": {"kafka": {"up": True, "detail": None}, "view": {"up": True, "detail": None}},
        }
    ],
    "Alive": [{"status": "alive"}],
}
