"""What the view says of one task: its executions with their ends and the waits between them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

SUCCEEDED = "succeeded"
# Ends of executions that spend no attempt: the task was taken over by another worker.
HANDED_ON = frozenset({"released", "superseded"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """One execution of the handler."""

    attempt: int
    # succeeded, failed, …
    outcome: str
    # What kind of error ended it; None: none did.
    category: str | None
    error: str | None
    worker: str
    started_at: datetime
    # From the end of the attempt before, or of the first from the instant at which it might start; in seconds.
    waited: float
    # None: it has not ended.
    ran: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """A task, as the status and the history tell it."""

    task_id: str
    status: str
    reason: str | None
    created_at: datetime
    # It must not start earlier; None: at once.
    scheduled_at: datetime | None
    acts: tuple[Act, ...]
    result: Any
    retry_count: int
    root_id: str
    replay_of: str | None
    replayed_as: str | None

    @property
    def tried(self) -> tuple[Act, ...]:
        """The executions that spent an attempt, in order."""
        return tuple(act for act in self.acts if act.outcome not in HANDED_ON)

    @property
    def failures(self) -> tuple[str, ...]:
        """The kinds of error of the attempts that failed, in order."""
        return tuple(act.category or act.outcome for act in self.tried if act.outcome != SUCCEEDED)


def story_of(status: Mapping[str, Any], history: Mapping[str, Any]) -> Story:
    """Tell it from the answers of `GET /tasks/{id}` and `GET /tasks/{id}/history`."""
    created_at, scheduled_at = _instant(status["created_at"]), _instant(status["scheduled_at"])
    assert created_at is not None
    free_from = scheduled_at or created_at
    acts = []
    for row in history["attempts"]:
        started_at, ended_at = _instant(row["started_at"]), _instant(row["ended_at"])
        assert started_at is not None
        error = row["error"]
        acts.append(
            Act(
                attempt=row["attempt"],
                outcome=row["outcome"],
                category=None if error is None else error["category"],
                error=None if error is None else f"{error['class']}: {error['message']}",
                worker=row["worker"],
                started_at=started_at,
                waited=(started_at - free_from).total_seconds(),
                ran=None if ended_at is None else (ended_at - started_at).total_seconds(),
            )
        )
        if row["outcome"] not in HANDED_ON:
            free_from = ended_at or started_at
    return Story(
        task_id=status["task_id"],
        status=status["status"],
        reason=status["reason"],
        created_at=created_at,
        scheduled_at=scheduled_at,
        acts=tuple(acts),
        result=status["result"],
        retry_count=status["retry_count"],
        root_id=status["root_id"],
        replay_of=status["replay_of"],
        replayed_as=status["replayed_as"],
    )


def tell(story: Story, workers: Mapping[str, str]) -> str:
    """The story in a line; `workers` has short names for theirs."""
    words = []
    if story.scheduled_at is not None:
        words.append(f"(delayed {(story.scheduled_at - story.created_at).total_seconds():.1f} s)")
    for act in story.acts:
        if act.attempt > 1:
            words.append(f"+{act.waited:.2f} s →")
        words.append(f"{act.category or act.outcome} [{workers.get(act.worker, act.worker)}]")
    end = story.status if story.reason is None else f"{story.status} ({story.reason})"
    return f"{' '.join(words)} = {end}"


def _instant(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
