"""Read-your-writes and tenancy, over a store that fills while it is read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from view_kit import CODEC, event, submission

from taskline.errors import TaskNotFound
from taskline.schemas.events import Started
from taskline.schemas.ids import TaskId
from taskline.settings import ApiSettings
from taskline.state.reader import StatusReader
from taskline.state.status import TaskStatus
from taskline.state.store import StoredTask, Write

NOW = 1_800_000_000_000
API = ApiSettings(read_your_writes_seconds=0.2, young_task_seconds=30)


class Clock:
    def now_ms(self) -> int:
        return NOW


class Filling:
    """Gives each of these answers once, the last one for ever."""

    def __init__(self, *answers: StoredTask | None) -> None:
        self.answers = list(answers)
        self.reads = 0

    async def apply(self, writes: Sequence[Write]) -> None:
        raise AssertionError

    async def read(self, task_id: TaskId) -> StoredTask | None:
        self.reads += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def reader(store: Filling) -> StatusReader:
    return StatusReader(store, CODEC, API, Clock())


def stored(task: Any) -> StoredTask:
    return StoredTask(submission=CODEC.encode(task), events={0: CODEC.encode(event(Started, task, NOW))})


def test_a_visible_task_is_folded_at_once() -> None:
    task = submission(NOW)
    store = Filling(stored(task))
    state = asyncio.run(reader(store).get(task.task_id, tenant="acme"))
    assert (state.status, store.reads) == (TaskStatus.RUNNING, 1)


def test_a_young_task_is_waited_for() -> None:
    task = submission(NOW)
    store = Filling(None, StoredTask(events=stored(task).events), stored(task))
    assert asyncio.run(reader(store).get(task.task_id, tenant="acme")).task_id == task.task_id
    assert store.reads == 3


def test_a_young_task_that_does_not_come_is_not_found() -> None:
    task = submission(NOW)
    store = Filling(None)
    with pytest.raises(TaskNotFound) as refused:
        asyncio.run(reader(store).get(task.task_id, tenant="acme"))
    assert refused.value.task_id == task.task_id
    assert store.reads > 3


@pytest.mark.parametrize("answer", [None, StoredTask()])
def test_an_old_task_is_not_waited_for(answer: StoredTask | None) -> None:
    task = submission(NOW - 31_000)
    store = Filling(answer)
    with pytest.raises(TaskNotFound):
        asyncio.run(reader(store).get(task.task_id, tenant="acme"))
    assert store.reads == 1


def test_another_tenants_task_is_not_found() -> None:
    task = submission(NOW)
    for ask in (reader(Filling(stored(task))).get, reader(Filling(stored(task))).history):
        with pytest.raises(TaskNotFound):
            asyncio.run(ask(task.task_id, tenant="other"))


def test_history_has_the_events_in_their_places() -> None:
    task = submission(NOW)
    told = asyncio.run(reader(Filling(stored(task))).history(task.task_id, tenant="acme"))
    assert [(each.offset, each.index) for each in told.events] == [(0, 0)]
    assert told.attempts[0].attempt == 1
