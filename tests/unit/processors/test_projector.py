"""Nothing is settled before it is durable: the projector over a store and a log that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from view_kit import CODEC, ListLog, ModelStore, batch, dispatch, event, in_record, submission

from taskline.errors import DeliveryUnknown, Unavailable
from taskline.infra.log import InRecord
from taskline.processors import projector as module
from taskline.processors.projection import Layout
from taskline.processors.projector import Projector
from taskline.schemas.events import Started
from taskline.schemas.ids import lane_of
from taskline.state.store import Write

NOW = 1_800_000_000_000
LAYOUT = Layout(
    lifecycle_topic="tasks.lifecycle",
    scheduled_topic="tasks.scheduled",
    dlq_topic="tasks.dlq",
    lanes=1,
    bucket_ms=600_000,
)
UNKNOWN_SCHEMA = b"\xc3\x01\x00\x01\x02\x03\x04\x05\x06\x07body"


class FixedClock:
    def now_ms(self) -> int:
        return NOW


class Flaky(ModelStore):
    """A store that stores half of the first attempts' writes and fails."""

    def __init__(self, failures: Sequence[Exception] = ()) -> None:
        super().__init__(1, LAYOUT.bucket_ms)
        self.failures = list(failures)
        self.attempts = 0

    async def apply(self, writes: Sequence[Write]) -> None:
        self.attempts += 1
        if self.failures:
            await super().apply(writes[: len(writes) // 2])
            raise self.failures.pop(0)
        await super().apply(writes)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(module, "_LONGEST_PAUSE_SECONDS", 0.0)


def make(store: Any, log: Any) -> Projector:
    return Projector(store, log, CODEC, LAYOUT, clock=FixedClock())


def some_records() -> list[InRecord]:
    task = submission(NOW)
    assert lane_of(task.task_id, 1) == 0
    return [
        dispatch("tasks.normal", 0, 0, task, now_ms=NOW),
        in_record("tasks.lifecycle", 0, 0, batch([event(Started, task, NOW)]), now_ms=NOW),
        in_record("tasks.lifecycle", 0, 1, b"garbage", now_ms=NOW),
    ]


def test_a_store_that_fails_is_asked_until_it_works() -> None:
    store, log = Flaky([Unavailable("away"), RuntimeError("what?"), Unavailable("away")]), ListLog()
    asyncio.run(make(store, log).fold(some_records()))
    assert store.attempts == 4
    straight = Flaky()
    asyncio.run(make(straight, ListLog()).fold(some_records()))
    assert len(store.rows) == len(straight.rows) == 1


def test_a_dead_letter_is_sent_until_it_is_acknowledged() -> None:
    log = ListLog([DeliveryUnknown("?"), DeliveryUnknown("?")])
    asyncio.run(make(Flaky(), log).fold(some_records()))
    assert [record.value for record in log.records] == [b"garbage"]


def test_a_cancelled_fold_has_settled_nothing() -> None:
    async def check() -> None:
        class Away(ModelStore):
            async def apply(self, writes: Sequence[Write]) -> None:
                raise Unavailable("away")

        folding = asyncio.create_task(make(Away(1, LAYOUT.bucket_ms), ListLog()).fold(some_records()))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not folding.done()
        folding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await folding

    asyncio.run(check())


def test_what_is_halted_is_not_settled_until_somebody_has_passed_it() -> None:
    projector = make(Flaky(), ListLog())
    records = [
        in_record("tasks.lifecycle", 0, 3, batch([]), now_ms=NOW),
        in_record("tasks.lifecycle", 0, 4, UNKNOWN_SCHEMA, now_ms=NOW),
        in_record("tasks.lifecycle", 0, 5, batch([]), now_ms=NOW),
    ]
    asyncio.run(projector.fold(records))
    assert [projector.settles(record) for record in records] == [True, False, False]
    # The partition comes back at the same place: it is still halted.
    projector.resumed(("tasks.lifecycle", 0), 4)
    assert [projector.settles(record) for record in records] == [True, False, False]
    # It comes back beyond it: a newer projector has taken care of it.
    projector.resumed(("tasks.lifecycle", 0), 5)
    assert projector.settles(records[2])
