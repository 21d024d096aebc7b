"""The dispatch record of a task's next attempt: the same bytes under the same key, with headers of its own. Pure.

Invariant: the headers are made anew from what is known, and not added to what came; so however often a task is retried they
stay within RECORD_ROOM_BYTES of the producer, and the record within its topic's limit.
"""

from __future__ import annotations

from taskline.infra.log import (
    HEADER_ATTEMPT,
    HEADER_DEATHS,
    HEADER_TASK_ID,
    HEADER_TRAIL,
    InRecord,
    OutRecord,
)
from taskline.schemas.events import TaskSubmitted
from taskline.schemas.ids import TaskId
from taskline.workers.trail import Trail


def next_attempt(record: InRecord, task_id: TaskId, *, attempt: int, deaths: int, trail: Trail) -> OutRecord:
    """What is appended to the record's own topic, or to a tier on the way there.

    Args:
        record: the attempt that failed.
        task_id: of its task.
        attempt: the next one's number.
        deaths: how many processes the task has killed that ran nothing else.
        trail: what went wrong so far.
    """
    return OutRecord(
        topic=record.position.topic,
        key=record.key,
        value=record.value,
        headers=_headers(task_id, attempt, deaths, trail),
    )


def dispatch_again(
    topic: str, value: bytes, submission: TaskSubmitted, *, attempt: int, deaths: int, trail: Trail
) -> OutRecord:
    """As `next_attempt`, of a task whose record is not at hand: from its submission's bytes.

    Args:
        topic: the dispatch topic of its queue and priority.
        value: the submission's bytes.
        submission: the same, decoded.
        attempt: the next one's number.
        deaths: how many processes the task has killed that ran nothing else.
        trail: what went wrong so far.
    """
    key = submission.affinity_key
    return OutRecord(
        topic=topic,
        key=submission.task_id.bytes if key is None else key.encode(),
        value=value,
        headers=_headers(submission.task_id, attempt, deaths, trail),
    )


def _headers(task_id: TaskId, attempt: int, deaths: int, trail: Trail) -> dict[str, bytes]:
    headers = {HEADER_TASK_ID: task_id.bytes, HEADER_ATTEMPT: b"%d" % attempt}
    if deaths:
        headers[HEADER_DEATHS] = b"%d" % deaths
    if trail.errors:
        headers[HEADER_TRAIL] = trail.encode()
    return headers
