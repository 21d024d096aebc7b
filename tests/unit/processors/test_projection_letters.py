"""What the projection makes of the dead-letter topic."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from letter_kit import DLQ, NOW, dead_letter, on_dlq, resolved
from prometheus_client import REGISTRY
from view_kit import CODEC, DAY_MS, batch, event, in_record, submission, task_id_of

from taskline.errors import Unavailable
from taskline.infra.log import HEADER_CAUSE, HEADER_SOURCE, HEADER_TASK_ID, InRecord, Position
from taskline.processors.letter_watch import LetterWatch
from taskline.processors.projection import Layout, Projection, project
from taskline.schemas.events import LetterAction, Started
from taskline.settings import Settings
from taskline.state.dead_letters import DeadLetters, LetterFilter, LetterStats
from taskline.state.letter_row import (
    Letter,
    LetterKey,
    LetterKind,
    LetterWrite,
    Resolution,
    ResolutionWrite,
    is_raw_letter,
    raw_letter_id,
)
from taskline.testing import MemoryView

LAYOUT = Layout(
    lifecycle_topic="tasks.lifecycle",
    scheduled_topic="tasks.scheduled",
    dlq_topic=DLQ,
    lanes=3,
    bucket_ms=600_000,
)
TASK = submission(NOW - 60_000, generation=2, replay_of=task_id_of(NOW - 120_000, 9))
DEAD = dead_letter(TASK, NOW - 5_000)
OTHER = dead_letter(submission(NOW - 1_000, tenant="zeta"), NOW - 500)
UNKNOWN_SCHEMA = b"\xc3\x01\x00\x01\x02\x03\x04\x05\x06\x07body"
RETENTION_SECONDS = 14 * DAY_MS // 1000


def run(*records: InRecord, now_ms: int = NOW) -> Projection:
    return project(records, codec=CODEC, layout=LAYOUT, now_ms=now_ms)


def test_a_dead_letter_is_a_row_with_what_its_submission_says() -> None:
    record = on_dlq(DEAD, partition=1, offset=7)
    (write,) = run(record).writes
    assert write == LetterWrite(
        letter=Letter(
            key=LetterKey(letter_id=TASK.task_id, tenant="acme", at_ms=NOW - 5_000),
            kind=LetterKind.TASK,
            task_type="geo.nearest",
            queue="default",
            reason="exhausted",
            category="unknown",
            error_class="builtins.ValueError",
            message="boom",
            attempt=4,
            generation=2,
            root_id=TASK.root_id,
            replay_of=TASK.replay_of,
            source=Position(topic="tasks.normal", partition=2, offset=40),
            dlq_partition=1,
            dlq_offset=7,
            size_bytes=len(record.value or b""),
        ),
        ttl_seconds=RETENTION_SECONDS - 5,
    )


def test_what_was_done_about_it_goes_to_the_same_row() -> None:
    (write,) = run(on_dlq(resolved(DEAD, NOW - 1_000))).writes
    assert write == ResolutionWrite(
        key=LetterKey(letter_id=TASK.task_id, tenant="acme", at_ms=NOW - 5_000),
        resolution=Resolution(
            action=LetterAction.DISCARDED, at_ms=NOW - 1_000, by="ada@host", note="never mind"
        ),
        ttl_seconds=RETENTION_SECONDS - 5,
    )


def test_a_letter_whose_submission_can_t_be_read_is_listed_all_the_same() -> None:
    (write,) = run(on_dlq(replace(DEAD, submission=b"garbage"))).writes
    assert isinstance(write, LetterWrite)
    assert (write.letter.kind, write.letter.queue, write.letter.root_id) == (LetterKind.TASK, None, None)


def test_bytes_with_a_cause_are_raw_whatever_they_are() -> None:
    # A worker of an older version could not read it; this one could.
    told = {HEADER_CAUSE: b"no frame \xff", HEADER_SOURCE: b"tasks.low/2/40"}
    record = on_dlq(DEAD, headers=told)
    (write,) = run(record).writes
    assert isinstance(write, LetterWrite)
    letter = write.letter
    assert (letter.kind, letter.key.tenant, letter.key.at_ms) == (LetterKind.RAW, "", NOW)
    assert letter.message == "no frame \ufffd"
    assert letter.source == Position(topic="tasks.low", partition=2, offset=40)
    assert letter.letter_id == raw_letter_id("tasks.low/2/40", record.key, record.value)
    assert is_raw_letter(letter.letter_id)


@pytest.mark.parametrize("value", [None, b"", b"garbage", UNKNOWN_SCHEMA, CODEC.encode(TASK)])
def test_anything_else_is_raw_under_an_id_of_its_own_place(value: bytes | None) -> None:
    projection = run(on_dlq(value, partition=1, offset=9))
    (write,) = projection.writes
    assert isinstance(write, LetterWrite)
    assert (write.letter.kind, write.letter.source) == (LetterKind.RAW, None)
    assert write.letter.letter_id == raw_letter_id(f"{DLQ}/1/9", None, value)
    assert (projection.rejects, projection.halts) == ((), {})
    assert projection.counts == {"raw_letters": 1}


@pytest.mark.parametrize("source", [b"", b"x", b"a/b/c", b"tasks.low/1", b"t/1/2/3", b"\xff/1/2", b"t/1/-2"])
def test_a_source_that_is_none_is_left_out(source: bytes) -> None:
    (write,) = run(on_dlq(b"x", headers={HEADER_CAUSE: b"c", HEADER_SOURCE: source})).writes
    assert isinstance(write, LetterWrite)
    assert write.letter.source is None


@pytest.mark.parametrize(
    "changes",
    [
        {"task_id": task_id_of(NOW, 1).__class__(int=1)},
        {"tenant": "x" * 70_000},
        {"tenant": ""},
        {"at": 0},
        {"at": -5},
        {"at": NOW + 400_000},
        {"at": 2**62},
    ],
)
def test_a_letter_that_no_table_could_take_is_raw(changes: dict[str, Any]) -> None:
    (write,) = run(on_dlq(replace(DEAD, **changes))).writes
    assert isinstance(write, LetterWrite)
    assert (write.letter.kind, write.letter.key.at_ms) == (LetterKind.RAW, NOW)
    assert write.letter.message


@pytest.mark.parametrize(
    "changes", [{"tenant": "x" * 201}, {"letter_at": 2**60}, {"at": 2**60}, {"at": 0}, {"letter_at": 0}]
)
def test_so_is_a_resolution(changes: dict[str, Any]) -> None:
    (write,) = run(on_dlq(resolved(DEAD, NOW, **changes))).writes
    assert isinstance(write, LetterWrite)
    assert write.letter.kind is LetterKind.RAW


def test_texts_are_shortened() -> None:
    long = replace(
        DEAD, message="m" * 5_000, error_class="e" * 5_000, task_type="t" * 5_000, reason="r" * 999
    )
    (write,) = run(on_dlq(long)).writes
    assert isinstance(write, LetterWrite)
    letter = write.letter
    assert [len(each) for each in (letter.message, letter.error_class, letter.task_type, letter.reason)] == [
        1_000,
        300,
        300,
        300,
    ]


def test_what_is_older_than_the_retention_is_skipped() -> None:
    later = NOW + 15 * DAY_MS
    projection = run(on_dlq(DEAD), on_dlq(resolved(DEAD, NOW)), on_dlq(b"x"), now_ms=later)
    assert (projection.writes, projection.counts) == ((), {"expired": 3})


@pytest.mark.parametrize("header", [TASK.task_id.bytes, raw_letter_id("s", None, None).bytes])
def test_a_newer_record_of_a_letter_halts_its_partition(header: bytes) -> None:
    newer = on_dlq(UNKNOWN_SCHEMA, offset=8, headers={HEADER_TASK_ID: header})
    projection = run(on_dlq(DEAD, offset=7), newer, on_dlq(DEAD, offset=9))
    assert list(projection.halts) == [(DLQ, 1)]
    assert projection.halts[DLQ, 1].position.offset == 8
    assert projection.counts == {"letters": 1}


def test_with_a_cause_it_is_somebody_else_s_and_halts_nothing() -> None:
    told = {HEADER_TASK_ID: TASK.task_id.bytes, HEADER_CAUSE: b"newer", HEADER_SOURCE: b"tasks.low/0/1"}
    projection = run(on_dlq(UNKNOWN_SCHEMA, headers=told))
    assert (projection.halts, projection.counts) == ({}, {"raw_letters": 1})


def test_the_projector_s_own_rejects_end_as_rows() -> None:
    wrong_lane = batch(
        [event(Started, TASK, NOW), event(Started, replace(TASK, task_id=task_id_of(NOW, 5)), NOW)]
    )
    records = [
        in_record("tasks.lifecycle", lane, 3, value, now_ms=NOW)
        for lane, value in itertools.product(range(3), (wrong_lane, b"garbage"))
    ]
    rejects = run(*records).rejects
    assert len(rejects) == 4 + 3
    back = run(
        *(
            on_dlq(each.value, key=each.key, headers=dict(each.headers), offset=offset)
            for offset, each in enumerate(rejects)
        )
    )
    assert back.rejects == ()
    assert back.counts == {"raw_letters": len(rejects)}
    # Also those that share their place in the log are letters of their own.
    assert len({write.letter.letter_id for write in back.writes if isinstance(write, LetterWrite)}) == len(
        rejects
    )


def records_of_letters() -> list[InRecord]:
    other = OTHER
    return [
        on_dlq(DEAD, offset=1),
        # Its worker died and did it again.
        on_dlq(replace(DEAD, at=NOW - 4_000), offset=2),
        on_dlq(other, offset=3),
        on_dlq(resolved(DEAD, NOW), offset=4),
        on_dlq(resolved(other, NOW, action=LetterAction.REPLAYED, replayed_as=TASK.task_id), offset=5),
        on_dlq(resolved(other, NOW + 9), offset=6),
        on_dlq(b"raw", offset=7, headers={HEADER_CAUSE: b"c", HEADER_SOURCE: b"tasks.low/0/1"}),
        on_dlq(
            b"raw", offset=8, now_ms=NOW + 50, headers={HEADER_CAUSE: b"c", HEADER_SOURCE: b"tasks.low/0/1"}
        ),
    ]


class Clock:
    def now_ms(self) -> int:
        return NOW


def contents(runs: Sequence[Sequence[InRecord]]) -> list[Letter]:
    async def shown() -> list[Letter]:
        view = MemoryView(Clock())
        for records in runs:
            await view.apply(run(*records).writes)
        page = await DeadLetters(view, Settings(), Clock()).list(LetterFilter(resolved=True), limit=100)
        assert page.cursor is None
        return list(page.letters)

    return asyncio.run(shown())


@settings(deadline=None, max_examples=50)
@given(st.permutations(records_of_letters()), st.integers(1, 8), st.data())
def test_deliveries_in_any_order_and_number_give_one_view(
    records: list[InRecord], size: int, data: st.DataObject
) -> None:
    again = data.draw(st.lists(st.sampled_from(records), max_size=6))
    delivered = records + again
    runs = [delivered[start : start + size] for start in range(0, len(delivered), size)]
    whole = contents([records_of_letters()])
    assert contents(runs) == whole
    assert [(each.kind, each.resolution is None) for each in whole] == [
        (LetterKind.RAW, True),
        (LetterKind.TASK, False),
        (LetterKind.TASK, False),
    ]


# ---- the gauges ----------------------------------------------------------------------------------------------


class Counted:
    def __init__(self, *answers: LetterStats | Exception) -> None:
        self.answers = list(answers)

    async def stats(self) -> LetterStats:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def gauges() -> tuple[float | None, float | None]:
    return (
        REGISTRY.get_sample_value("taskline_dead_letters_open"),
        REGISTRY.get_sample_value("taskline_dead_letters_oldest_age_seconds"),
    )


def test_one_process_keeps_the_gauges_and_an_outage_leaves_them() -> None:
    stats = LetterStats(open_letters=7, oldest_open_ms=NOW - 90_000, complete=True)
    none = LetterStats(open_letters=0, oldest_open_ms=None, complete=True)
    watch = LetterWatch(
        Counted(stats, Unavailable("away"), ValueError("odd"), none, stats), DLQ, clock=Clock()
    )
    mine = {(DLQ, 0), ("tasks.low", 1)}
    for expected in ((7, 90), (7, 90), (7, 90), (0, 0), (7, 90)):
        asyncio.run(watch.look(mine))
        assert gauges() == expected
    # Partition 0 has moved to another process, which looks from now on.
    asyncio.run(watch.look({(DLQ, 1), ("tasks.low", 0)}))
    assert gauges() == (0, 0)
