"""Conversations of several requests: waiting for an end, looking many ids up. Pure; both clients run them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from taskline.client import calls
from taskline.client.asking import Patience, ask
from taskline.client.errors import NotEnded
from taskline.client.results import TaskLookup, TaskSnapshot
from taskline.client.wire import Talk
from taskline.schemas.ids import TaskId

T = TypeVar("T")

# One request of a wait: below the idle time-outs of usual balancers (60 s), which would cut a longer one off.
SLICE_SECONDS = 25.0
# A shorter rest of a wait is one last look.
_LEAST_SECONDS = 0.001


def wait(task_id: TaskId | str, timeout_seconds: float | None, patience: Patience) -> Talk[TaskSnapshot]:
    """Ask again and again until the task has ended; None waits for ever.

    Raises:
        NotEnded: the time is over; with the task as it is.
    """
    began = patience.now()
    while True:
        left = SLICE_SECONDS if timeout_seconds is None else timeout_seconds - (patience.now() - began)
        held = min(SLICE_SECONDS, left)
        task = yield from ask(
            calls.get(task_id, wait_seconds=held if held >= _LEAST_SECONDS else 0.0), patience
        )
        if task.ended:
            return task
        if timeout_seconds is not None and patience.now() - began >= timeout_seconds:
            raise NotEnded(task)


def get_many(task_ids: Iterable[TaskId | str], patience: Patience) -> Talk[TaskLookup]:
    """Look up any number of tasks, a hundred at a time; the same id twice counts once."""
    found: dict[TaskId, TaskSnapshot] = {}
    unknown: list[TaskId] = []
    unreadable: list[TaskId] = []
    for chunk in chunks(dict.fromkeys(map(calls.id_of, task_ids)), calls.MAX_IDS):
        page = yield from ask(calls.tasks_by_id(chunk), patience)
        found |= {task.task_id: task for task in page.tasks}
        unknown += page.unknown
        unreadable += page.unreadable
    return TaskLookup(tasks=found, unknown=tuple(unknown), unreadable=tuple(unreadable))


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items, so many at a time, taken as they are needed."""
    left = iter(items)
    while chunk := list(islice(left, size)):
        yield chunk
