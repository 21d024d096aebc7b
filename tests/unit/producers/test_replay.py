"""Replays: what is submitted, that every try is the same task, and many at a rate."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from letter_kit import NOW, dead_letter, letter, on_dlq
from view_kit import CODEC, DAY_MS, event, submission, task_id_of

from taskline import Registry, Settings
from taskline.errors import (
    GenerationsExhausted,
    InvalidPayload,
    LetterGone,
    LetterNotFound,
    LetterResolved,
    NotReplayable,
    PayloadTooLarge,
)
from taskline.infra.log import HEADER_CAUSE, HEADER_SOURCE, InRecord, Position
from taskline.producers.dlq_show import hex_lines, letter_document, lines_of, plain, task_document
from taskline.producers.replay import edited, letter_in, raw_replay, replay_id, replay_of
from taskline.producers.replay_bulk import Bulk, BulkOrder, BulkReport, count_matching
from taskline.producers.replay_rate import TokenBucket
from taskline.producers.replayer import Done
from taskline.schemas.codec import Codec
from taskline.schemas.events import (
    DeadLetterResolved,
    LetterAction,
    LifecycleBatch,
    Started,
    TaskSubmitted,
)
from taskline.schemas.ids import created_at_ms, from_ms, lane_of
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType
from taskline.state.dead_letters import LetterFilter
from taskline.state.letter_row import Letter, LetterKey, LetterKind
from taskline.state.status import TaskStatus
from taskline.testing import Fault, InMemoryTaskline

SETTINGS = Settings()
SOURCE = Position(topic="tasks.low", partition=2, offset=5)


def dead(**changes: Any) -> tuple[Letter, TaskSubmitted]:
    task = submission(NOW - 60_000, **changes)
    row = letter(1)
    return replace(row, key=LetterKey(letter_id=task.task_id, tenant="acme", at_ms=NOW - 5_000)), task


# ---- one task --------------------------------------------------------------------------------------------------


def test_a_replay_is_the_same_work_as_a_new_task() -> None:
    row, task = dead(
        affinity_key="a",
        timeout_ms=7,
        traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01",
        idempotency_key="once",
        not_before=NOW - 50_000,
        start_by=NOW - 40_000,
        retain_until=NOW - 60_000 + 2 * DAY_MS,
    )
    again = replay_of(row, task, now_ms=NOW, settings=SETTINGS)
    assert again == replace(
        task,
        task_id=again.task_id,
        replay_of=task.task_id,
        generation=1,
        retain_until=NOW + 2 * DAY_MS,
        # These were about the first submission.
        idempotency_key=None,
        not_before=None,
        start_by=None,
    )
    assert again.root_id == task.root_id
    # Whoever tries again comes to the same task.
    assert replay_of(row, task, now_ms=NOW + 99, settings=SETTINGS).task_id == again.task_id
    assert created_at_ms(again.task_id) == row.key.at_ms


def test_retention_is_bounded_by_the_settings() -> None:
    for retain_until in (NOW + 400 * DAY_MS, 0):
        row, task = dead(retain_until=retain_until)
        assert replay_of(row, task, now_ms=NOW, settings=SETTINGS).retain_until == NOW + 30 * DAY_MS


@given(st.integers(0, 2**48 - 1), st.integers(0, 2**62 - 1), st.integers(1, 1_000))
def test_replay_ids_are_uuid7s_of_the_death(died_at_ms: int, tail: int, generation: int) -> None:
    task = task_id_of(NOW, tail)
    found = replay_id(task, died_at_ms, generation)
    assert (found.version, found.variant) == (7, uuid.RFC_4122)
    assert created_at_ms(found) == died_at_ms
    assert found == replay_id(task, died_at_ms, generation)
    assert found not in (replay_id(task, died_at_ms, generation + 1), replay_id(task_id_of(NOW, tail ^ 1), died_at_ms, generation))  # fmt: skip


def test_lanes_of_replays_are_spread() -> None:
    lanes = Counter(lane_of(replay_id(task_id_of(NOW, tail), NOW, 1), 6) for tail in range(600))
    assert len(lanes) == 6
    assert min(lanes.values()) > 60


def test_a_task_goes_round_so_often_and_no_more() -> None:
    row, task = dead(generation=4)
    assert replay_of(row, task, now_ms=NOW, settings=SETTINGS).generation == 5
    with pytest.raises(GenerationsExhausted) as refused:
        replay_of(row, replace(task, generation=5), now_ms=NOW, settings=SETTINGS)
    assert (refused.value.letter_id, refused.value.generation, refused.value.limit) == (row.letter_id, 6, 5)


PLACE = PayloadSchema.parse(
    {"type": "record", "name": "Place", "fields": [{"name": "iata", "type": "string"}]}
)


def test_an_edited_payload_is_checked_under_the_type_as_it_is_now() -> None:
    row, task = dead(payload=b"old")
    changed = edited(TaskType(name="a.b", schema=PLACE), {"iata": "LAX"}, max_payload_bytes=100)
    again = replay_of(row, task, now_ms=NOW, settings=SETTINGS, edit=changed)
    assert (again.payload, again.payload_fingerprint) == (b"\x06LAX", PLACE.fingerprint)
    # An edit is no other replay: of two, one is submitted.
    assert again.task_id == replay_of(row, task, now_ms=NOW, settings=SETTINGS).task_id
    with pytest.raises(InvalidPayload) as refused:
        edited(TaskType(name="a.b", schema=PLACE), {"iata": 7}, max_payload_bytes=100)
    assert refused.value.pointer == "/iata"
    with pytest.raises(PayloadTooLarge):
        edited(TaskType(name="a.b"), "x" * 99, max_payload_bytes=100)


def test_a_letter_that_can_t_be_read_is_not_replayable() -> None:
    row, task = dead()
    whole = dead_letter(task, NOW)
    assert letter_in(row, on_dlq(whole), CODEC) == (whole, task)
    for record in (on_dlq(b"garbage"), on_dlq(replace(whole, submission=b"garbage"))):
        with pytest.raises(NotReplayable):
            letter_in(row, record, CODEC)


# ---- raw bytes -------------------------------------------------------------------------------------------------


def raw(source: Position | None) -> Letter:
    return replace(letter(1, tenant=""), source=source)


def raw_record(value: bytes | None, key: bytes | None = b"k") -> InRecord:
    told = {HEADER_CAUSE: b"c", HEADER_SOURCE: b"s", "taskline-task-id": b"x", "own": b"1"}
    return on_dlq(value, key=key, headers=told)


def test_raw_bytes_go_back_as_they_came() -> None:
    out = raw_replay(raw(SOURCE), raw_record(b"v"), codec=CODEC, settings=SETTINGS)
    assert (out.topic, out.key, out.value, out.partition) == ("tasks.low", b"k", b"v", None)
    assert out.headers == {"taskline-task-id": b"x", "own": b"1"}


def test_onto_the_lifecycle_topic_they_go_into_their_lane() -> None:
    source = Position(topic="tasks.lifecycle", partition=4, offset=1)
    out = raw_replay(raw(source), raw_record(b"garbage", None), codec=CODEC, settings=SETTINGS)
    assert (out.topic, out.partition, out.value) == ("tasks.lifecycle", 4, b"garbage")


def test_an_event_that_was_taken_out_of_its_batch_goes_as_a_batch() -> None:
    task = submission(NOW)
    data = CODEC.encode(event(Started, task, NOW))
    source = Position(topic="tasks.lifecycle", partition=0, offset=1)
    out = raw_replay(raw(source), raw_record(data), codec=CODEC, settings=SETTINGS)
    assert out.partition == lane_of(task.task_id, SETTINGS.topics.lanes)
    (entry,) = CODEC.decode(out.value, LifecycleBatch).events
    assert (entry.task_id, entry.event, entry.retain_until) == (task.task_id, data, task.retain_until)


@pytest.mark.parametrize("topic", [None, "tasks.dlq", "payments", "tasks.other.low"])
def test_they_go_to_no_topic_that_is_not_taskline_s(topic: str | None) -> None:
    source = None if topic is None else Position(topic=topic, partition=0, offset=0)
    with pytest.raises(NotReplayable):
        raw_replay(raw(source), raw_record(b"v"), codec=CODEC, settings=SETTINGS)


# ---- the rate --------------------------------------------------------------------------------------------------


@given(
    st.floats(0.5, 2_000),
    st.floats(0, 3),
    st.lists(st.floats(0, 2, allow_subnormal=False), min_size=1, max_size=200),
)
def test_no_more_pass_than_the_rate_and_what_may_be_made_up_for(
    rate: float, burst_seconds: float, pauses: list[float]
) -> None:
    bucket = TokenBucket(rate, burst_seconds=burst_seconds, now=0.0)
    now, passed = 0.0, []
    for pause in pauses:
        now += pause
        now += bucket.reserve(now)
        passed.append(now)
    assert passed == sorted(passed)
    for first in range(0, len(passed), 7):
        for last in range(first, len(passed), 11):
            seconds = passed[last] - passed[first]
            assert last - first + 1 <= (seconds + burst_seconds) * rate + 1 + 1e-6 * (last + 1)


def test_a_steady_stream_gets_the_whole_rate() -> None:
    bucket = TokenBucket(500, burst_seconds=0.5, now=100.0)
    now = 100.0
    for number in range(5_000):
        # Now and then something takes its time.
        now += 0.1 if number % 200 == 199 else 0.0
        now += bucket.reserve(now)
    assert 9.9 < now - 100 < 10.1
    with pytest.raises(ValueError, match="rate"):
        TokenBucket(0, burst_seconds=1, now=0)


# ---- in memory -------------------------------------------------------------------------------------------------

mended: set[str] = set()
registry = Registry()


@registry.task("replay.flaky", max_retries=0)
async def flaky(payload: Any) -> Any:
    if "flaky" not in mended:
        raise ValueError(f"broken for {payload}")
    return payload


@registry.task("replay.other", max_retries=0)
async def other(payload: Any) -> None:
    raise KeyError("always")


@pytest.fixture
def tl() -> Iterator[InMemoryTaskline]:
    mended.clear()
    with InMemoryTaskline(registry) as made:
        yield made


def die(tl: InMemoryTaskline, count: int, task_type: str = "replay.flaky", **options: Any) -> list[uuid.UUID]:
    ids = [tl.submit(task_type, number, **options).task_id for number in range(count)]
    tl.run_until_idle()
    return ids


def bulk(tl: InMemoryTaskline, stop: asyncio.Event | None = None, **changes: Any) -> BulkReport:
    values: dict[str, Any] = {"wanted": LetterFilter(), "rate": 1_000.0} | changes

    async def run() -> BulkReport:
        return await Bulk(tl._letters, tl._replayer, BulkOrder(**values), clock=tl.clock).run(
            stop or asyncio.Event()
        )

    return tl._call(run())


def test_a_dead_task_completes_when_it_is_replayed_after_a_fix(tl: InMemoryTaskline) -> None:
    (task_id,) = die(tl, 1)
    (row,) = tl.letters()
    assert (row.letter_id, row.reason) == (task_id, "exhausted")
    mended.add("flaky")
    handled = tl.replay(task_id)
    assert handled.done is Done.REPLAYED
    assert handled.replayed_as is not None
    tl.run_until_idle()
    state, old = tl.status(handled.replayed_as), tl.status(task_id)
    assert (state.status, state.replay_of, state.root_id, state.generation) == (
        TaskStatus.COMPLETED,
        task_id,
        task_id,
        1,
    )
    assert (old.status, old.replayed_as) == (TaskStatus.DEAD, handled.replayed_as)
    assert tl.letters() == ()
    (row,) = tl.letters(LetterFilter(resolved=True))
    assert row.resolution is not None
    assert (row.resolution.action, row.resolution.replayed_as, row.resolution.by) == (
        LetterAction.REPLAYED,
        handled.replayed_as,
        "memory-operator",
    )
    with pytest.raises(LetterResolved) as refused:
        tl.replay(task_id)
    assert refused.value.replayed_as == handled.replayed_as
    with pytest.raises(LetterResolved):
        tl.discard(task_id)


def test_a_chain_of_replays_ends(tl: InMemoryTaskline) -> None:
    (task_id,) = die(tl, 1)
    root = task_id
    for generation in range(1, tl.settings.dlq.max_generations + 1):
        handled = tl.replay(task_id)
        tl.run_until_idle()
        assert handled.replayed_as is not None
        state = tl.status(handled.replayed_as)
        assert (state.status, state.generation, state.root_id) == (TaskStatus.DEAD, generation, root)
        task_id = handled.replayed_as
    with pytest.raises(GenerationsExhausted):
        tl.replay(task_id)
    # It can still be put away.
    tl.discard(task_id, note="enough")
    tl.run_until_idle()
    assert tl.letters() == ()


@pytest.mark.parametrize("fault", [Fault.ACK_LOST, Fault.RECORD_LOST])
def test_a_replay_that_was_broken_off_is_the_same_task_again(tl: InMemoryTaskline, fault: Fault) -> None:
    (task_id,) = die(tl, 1)
    mended.add("flaky")
    # The task is in the log; that it was replayed is, or is not.
    tl.broker.fail_next(fault, topic=tl.topics.dlq)
    with pytest.raises(Exception, match="injected"):
        tl.replay(task_id)
    tl.run_until_idle()
    if fault is Fault.RECORD_LOST:
        handled = tl.replay(task_id)
        assert handled.done is Done.RESUMED
        tl.run_until_idle()
    submitted = [
        task
        for record in tl.records("tasks.normal")
        if (task := Codec().decode(record.value, TaskSubmitted)).replay_of == task_id
    ]
    assert len(submitted) == 1
    assert tl.status(submitted[0].task_id).status is TaskStatus.COMPLETED
    assert tl.letters() == ()


def test_a_letter_that_the_log_has_deleted_is_gone(tl: InMemoryTaskline) -> None:
    (task_id,) = die(tl, 1)

    async def nothing(places: object) -> dict[Position, InRecord]:
        return {}

    tl._replayer._records.fetch = nothing  # type: ignore[assignment, method-assign]
    with pytest.raises(LetterGone):
        tl.replay(task_id)
    assert bulk(tl).refused == 1
    with pytest.raises(LetterNotFound):
        tl.replay(task_id_of(NOW, 1))


def test_bulk_replays_what_the_filter_takes_at_the_rate_and_nothing_else(tl: InMemoryTaskline) -> None:
    mine, others = die(tl, 300), die(tl, 20, "replay.other")
    mended.add("flaky")
    began = tl.elapsed_seconds
    dry = bulk(tl, wanted=LetterFilter(task_type="replay.flaky"), dry_run=True, limit=250)
    assert (dry.counts, tl.elapsed_seconds) == ({"matched": 250}, began)
    assert tl._call(count_matching(tl._letters, LetterFilter(), at_most=310)) == (310, False)
    assert tl._call(count_matching(tl._letters, LetterFilter(), at_most=1_000)) == (320, True)
    report = bulk(tl, wanted=LetterFilter(task_type="replay.flaky"), rate=50.0)
    assert (report.counts, report.refused, report.stopped) == ({"replayed": 300}, 0, False)
    assert 5.9 <= tl.elapsed_seconds - began <= 6.1
    tl.run_until_idle()
    replays = [tl.status(task_id).replayed_as for task_id in mine]
    assert len(set(replays)) == 300
    assert all(tl.status(each).status is TaskStatus.COMPLETED for each in replays if each)
    assert {row.letter_id for row in tl.letters()} == set(others)
    # Nothing is left for a second run.
    assert bulk(tl, wanted=LetterFilter(task_type="replay.flaky")).counts == {}


def test_tasks_that_die_again_do_not_keep_a_bulk_going(tl: InMemoryTaskline) -> None:
    die(tl, 5, "replay.other")
    assert bulk(tl).counts == {"replayed": 5}
    tl.run_until_idle()
    assert len(tl.letters()) == 5
    assert {row.generation for row in tl.letters()} == {1}


def test_a_bulk_that_is_stopped_goes_on_where_it_was(tl: InMemoryTaskline) -> None:
    die(tl, 100)
    mended.add("flaky")
    stop = asyncio.Event()
    tl._loop.call_later(1.0, stop.set)
    first = bulk(tl, stop, rate=30.0)
    assert first.stopped
    assert 25 <= first.counts["replayed"] <= 35
    tl.run_until_idle()
    second = bulk(tl)
    assert (second.counts["replayed"], second.stopped) == (100 - first.counts["replayed"], False)
    tl.run_until_idle()
    submissions = [Codec().decode(each.value, TaskSubmitted) for each in tl.records("tasks.normal")]
    assert len({each.replay_of for each in submissions if each.replay_of}) == 100
    assert len(submissions) == 200


def test_a_server_that_goes_away_ends_a_bulk_with_its_words(tl: InMemoryTaskline) -> None:
    die(tl, 20)
    tl.broker.fail_next(Fault.REFUSED, topic="tasks.normal", times=1)
    report = bulk(tl, rate=5.0)
    assert report.stopped
    assert "injected" in (report.error or "")
    assert report.handled < 20


def test_bulk_discards_and_keeps_the_reason(tl: InMemoryTaskline) -> None:
    die(tl, 5)
    report = bulk(tl, action=LetterAction.DISCARDED, note="stale", limit=3)
    assert report.counts == {"discarded": 3}
    tl.run_until_idle()
    assert len(tl.letters()) == 2
    notes = [each.resolution.note for each in tl.letters(LetterFilter(resolved=True)) if each.resolution]
    assert notes == ["stale"] * 3
    assert tl.records("tasks.normal")[5:] == ()


def test_garbage_can_be_replayed_after_a_fix(tl: InMemoryTaskline) -> None:
    tl.inject("tasks.low", b"garbage", key=b"k")
    tl.run_until_idle()
    (row,) = tl.letters()
    assert row.kind is LetterKind.RAW
    assert tl.replay(row.letter_id).task is None
    tl.run_until_idle()
    assert [each.value for each in tl.records("tasks.low")] == [b"garbage"] * 2
    # It is as bad as before, at another place: another letter.
    (again,) = tl.letters()
    assert again.letter_id != row.letter_id
    assert again.source is not None
    assert again.source.topic == "tasks.low"


def test_the_resolution_is_on_the_log_under_the_letter_s_id(tl: InMemoryTaskline) -> None:
    (task_id,) = die(tl, 1)
    tl.discard(task_id)
    record = tl.records(tl.topics.dlq)[-1]
    told = Codec().decode(record.value, DeadLetterResolved)
    assert (record.key, told.letter_id, told.tenant) == (task_id.bytes, task_id, "default")
    # What the kit lists as dead letters are the letters.
    assert [each.task_id for each in tl.dead_letters()] == [task_id]


# ---- what people see -------------------------------------------------------------------------------------------


def test_a_letter_is_shown_with_its_payload_and_all_errors() -> None:
    row, task = dead(payload=b'{"iata":"LAX"}')
    whole = dead_letter(task, NOW, message="m" * 2_000, traceback="Traceback\n  boom")

    class Types:
        def get(self, name: str) -> TaskType:
            return TaskType(name=name)

        def writer_schema(self, fingerprint: bytes) -> None:
            return None

    document = task_document(row, whole, task, Types(), None)
    assert (document["payload"], document["payload_unread"], document["attempts"]) == (
        {"iata": "LAX"},
        None,
        None,
    )
    assert len(document["message"]) == 2_000
    lines = lines_of(document)
    assert "payload:" in lines
    assert '    "iata": "LAX"' in lines
    assert "  Traceback" in lines
    unread = task_document(row, whole, replace(task, payload_fingerprint=b"12345678"), Types(), None)
    assert unread["payload"] == "eyJpYXRhIjoiTEFYIn0="
    assert "any JSON" in unread["payload_unread"]
    assert letter_document(row)["source"] == "tasks.low/0/1"


def test_bytes_are_shown_as_hex_and_text() -> None:
    assert hex_lines(b"ab\x00\xff") == ["000000  61 62 00 ff                                      ab.."]
    assert hex_lines(None) == ["(null)"]
    assert hex_lines(b"") == ["(zero bytes)"]
    assert hex_lines(bytes(600))[-1] == "… 88 more bytes"
    assert plain({"at": from_ms(0), "b": b"\xfb\xff", "l": [uuid.UUID(int=0)]}) == {
        "at": "1970-01-01T00:00:00Z",
        "b": "+/8=",
        "l": ["00000000-0000-0000-0000-000000000000"],
    }
