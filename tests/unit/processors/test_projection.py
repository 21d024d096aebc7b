"""What the projection makes of each kind of record, and that deliveries of any shape give one view."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from view_kit import (
    CODEC,
    DAY_MS,
    ModelStore,
    batch,
    dispatch,
    drive,
    event,
    folded,
    in_record,
    submission,
    task_id_of,
)

from taskline.infra.log import (
    HEADER_ATTEMPT,
    HEADER_CAUSE,
    HEADER_DUE,
    HEADER_SOURCE,
    HEADER_TASK_ID,
    InRecord,
)
from taskline.processors.projection import Layout, Projection, project
from taskline.schemas.events import (
    MAX_BATCH_EVENTS,
    DeadLettered,
    Failed,
    LifecycleEntry,
    LifecycleEvent,
    Released,
    Started,
    Succeeded,
    TaskSubmitted,
)
from taskline.schemas.ids import bucket_of, lane_of, new_task_id
from taskline.state.status import TaskStatus
from taskline.state.store import MAX_TTL_SECONDS, EventsWrite, ReplayWrite, SubmissionWrite

NOW = 1_800_000_000_000
LANES = 3
LAYOUT = Layout(
    lifecycle_topic="tasks.lifecycle",
    scheduled_topic="tasks.scheduled",
    dlq_topic="tasks.dlq",
    lanes=LANES,
    bucket_ms=600_000,
)
TASK = submission(NOW)
LANE = lane_of(TASK.task_id, LANES)
UNKNOWN_SCHEMA = b"\xc3\x01\x00\x01\x02\x03\x04\x05\x06\x07body"


def run(*records: InRecord, now_ms: int = NOW) -> Projection:
    return project(records, codec=CODEC, layout=LAYOUT, now_ms=now_ms)


def lifecycle(value: bytes | None, *, offset: int = 7, lane: int = LANE) -> InRecord:
    return in_record("tasks.lifecycle", lane, offset, value, now_ms=NOW, key=b"key")


def test_a_submission_is_stored_as_its_bytes_with_hints() -> None:
    record = dispatch("tasks.normal", 2, 40, TASK, now_ms=NOW)
    (write,) = run(record).writes
    assert write == SubmissionWrite(
        task_id=TASK.task_id,
        lane=LANE,
        bucket=bucket_of(TASK.task_id, 600_000),
        ttl_seconds=DAY_MS // 1000,
        submission=record.value or b"",
        tenant="acme",
        task_type="geo.nearest",
        queue=TASK.queue,
        priority=TASK.priority,
        status=TaskStatus.PENDING,
    )


def test_a_submission_for_later_is_hinted_as_scheduled() -> None:
    (write,) = run(dispatch("tasks.low", 0, 0, replace(TASK, not_before=NOW + 1), now_ms=NOW)).writes
    assert write.status is TaskStatus.SCHEDULED


def waited(task: TaskSubmitted) -> InRecord:
    record = dispatch("tasks.low", 0, 0, task, now_ms=NOW)
    return replace(record, headers={**record.headers, HEADER_DUE: b"%d" % (NOW + 1)})


def test_a_scheduled_task_is_stored_and_its_dispatch_marks_it() -> None:
    later = replace(TASK, not_before=NOW + 1)
    (first,) = run(dispatch("tasks.scheduled", 0, 0, later, now_ms=NOW)).writes
    assert (first.status, first.dispatched) == (TaskStatus.SCHEDULED, False)
    (second,) = run(waited(later)).writes
    assert (second.status, second.dispatched) == (TaskStatus.PENDING, True)
    assert second.submission == first.submission
    # Whichever comes last, the hint is that of the dispatched one, and below that of any event.
    assert first.timestamp_us < second.timestamp_us < NOW * 1000 + 1


@pytest.mark.parametrize("order", [1, -1])
def test_both_topics_of_a_task_that_waited_may_come_together(order: int) -> None:
    later = replace(TASK, not_before=NOW + 1)
    (write,) = run(*[dispatch("tasks.scheduled", 0, 0, later, now_ms=NOW), waited(later)][::order]).writes
    assert write.dispatched


def test_the_due_header_of_a_scheduled_record_says_nothing_about_its_dispatch() -> None:
    later = replace(TASK, not_before=NOW + 1)
    record = dispatch("tasks.scheduled", 0, 0, later, now_ms=NOW)
    (write,) = run(replace(record, headers={**record.headers, HEADER_DUE: b"%d" % (NOW + 1)})).writes
    assert not write.dispatched


def test_a_replay_marks_the_task_that_it_replays() -> None:
    dead = new_task_id(NOW - 1)
    writes = run(dispatch("tasks.low", 0, 0, replace(TASK, replay_of=dead, generation=1), now_ms=NOW)).writes
    assert isinstance(writes[0], SubmissionWrite)
    assert writes[1] == ReplayWrite(
        task_id=dead,
        lane=lane_of(dead, LANES),
        bucket=bucket_of(dead, 600_000),
        ttl_seconds=DAY_MS // 1000,
        replayed_as=TASK.task_id,
    )


def test_events_of_one_task_are_one_write_in_their_places() -> None:
    events = [event(Started, TASK, NOW), event(Succeeded, TASK, NOW)]
    (write,) = run(lifecycle(batch(events[:1]), offset=7), lifecycle(batch(events[1:]), offset=9)).writes
    assert isinstance(write, EventsWrite)
    assert write.events == {7 * 4096: CODEC.encode(events[0]), 9 * 4096: CODEC.encode(events[1])}
    assert write.status is TaskStatus.COMPLETED
    assert write.timestamp_us == NOW * 1000 + 9 + 1


def test_a_hint_of_an_event_is_written_after_that_of_the_submission() -> None:
    writes = run(
        dispatch("tasks.low", 0, 0, TASK, now_ms=NOW), lifecycle(batch([event(Started, TASK, NOW)]), offset=0)
    )
    first, second = writes.writes
    assert first.timestamp_us < second.timestamp_us


@pytest.mark.parametrize("attempt", [b"2", b"17"])
def test_redispatches_are_skipped_unread(attempt: bytes) -> None:
    record = in_record("tasks.normal", 0, 0, b"garbage", now_ms=NOW, headers={HEADER_ATTEMPT: attempt})
    projection = run(record)
    assert (projection.writes, projection.counts) == ((), {"redispatches": 1})


@pytest.mark.parametrize("attempt", [b"1", b"0", b"", b"x", b"-2"])
def test_any_other_attempt_header_is_a_first_attempt(attempt: bytes) -> None:
    record = dispatch("tasks.normal", 0, 0, TASK, now_ms=NOW)
    assert run(replace(record, headers={HEADER_ATTEMPT: attempt})).counts["submissions"] == 1


@pytest.mark.parametrize("value", [None, b"", b"garbage", b"\x00\x00\x00\x00\x01x", UNKNOWN_SCHEMA])
def test_undecodable_dispatch_records_are_left_to_the_workers(value: bytes | None) -> None:
    projection = run(in_record("tasks.high", 0, 3, value, now_ms=NOW))
    assert (projection.writes, projection.rejects, projection.halts) == ((), (), {})
    assert projection.counts["undecodable"] == 1


def test_a_submission_of_a_newer_taskline_halts_its_partition() -> None:
    record = in_record(
        "tasks.high", 1, 3, UNKNOWN_SCHEMA, now_ms=NOW, headers={HEADER_TASK_ID: TASK.task_id.bytes}
    )
    projection = run(record, dispatch("tasks.high", 1, 4, TASK, now_ms=NOW))
    assert projection.writes == ()
    assert projection.halts["tasks.high", 1].position.offset == 3


@pytest.mark.parametrize("value", [None, b"", b"garbage", CODEC.encode(TASK), b"\xc3\x01\x00"])
def test_what_is_no_lifecycle_batch_is_rejected_verbatim(value: bytes | None) -> None:
    projection = run(lifecycle(value), lifecycle(batch([event(Started, TASK, NOW)]), offset=8))
    (reject,) = projection.rejects
    assert (reject.topic, reject.value, reject.key) == ("tasks.dlq", value, b"key")
    assert reject.headers[HEADER_SOURCE] == f"tasks.lifecycle/{LANE}/7".encode()
    assert reject.headers[HEADER_CAUSE]
    assert len(projection.writes) == 1


def bad_entries() -> dict[str, LifecycleEntry]:
    good = event(Succeeded, TASK, NOW)
    entry = LifecycleEntry(task_id=TASK.task_id, retain_until=NOW + DAY_MS, event=CODEC.encode(good))
    other = next(task for task in iter(lambda: submission(NOW), None) if lane_of(task.task_id, LANES) != LANE)
    future = next(
        task_id
        for task_id in iter(lambda: new_task_id(NOW + 600_000), None)
        if lane_of(task_id, LANES) == LANE
    )
    not_v7 = uuid.UUID(int=TASK.task_id.int & ~(0xF << 76) | (4 << 76))
    return {
        "garbage": replace(entry, event=b"garbage"),
        "empty": replace(entry, event=b""),
        "cut": replace(entry, event=entry.event[:-1]),
        "not an event": replace(entry, event=CODEC.encode(TASK)),
        "another lane's": replace(
            entry, task_id=other.task_id, event=CODEC.encode(event(Succeeded, other, NOW))
        ),
        "in the future": replace(entry, task_id=future),
        "not v7": replace(entry, task_id=not_v7),
        "filed under another": replace(entry, event=CODEC.encode(replace(good, task_id=other.task_id))),
    }


@pytest.mark.parametrize("name", sorted(bad_entries()))
def test_a_bad_event_is_rejected_and_its_batch_goes_on(name: str) -> None:
    entry = bad_entries()[name]
    projection = run(lifecycle(batch([event(Started, TASK, NOW), entry, event(Succeeded, TASK, NOW)])))
    (reject,) = projection.rejects
    assert (reject.value, reject.key) == (entry.event, entry.task_id.bytes)
    assert b"event 1 of the batch" in reject.headers[HEADER_CAUSE]
    (write,) = projection.writes
    assert isinstance(write, EventsWrite)
    assert sorted(write.events) == [7 * 4096, 7 * 4096 + 2]


def test_an_unknown_kind_of_event_halts_its_lane_before_the_whole_record() -> None:
    newer = LifecycleEntry(task_id=TASK.task_id, retain_until=NOW + DAY_MS, event=UNKNOWN_SCHEMA)
    other_lane = next(
        task for task in iter(lambda: submission(NOW), None) if lane_of(task.task_id, LANES) != LANE
    )
    projection = run(
        lifecycle(batch([event(Started, TASK, NOW)]), offset=5),
        lifecycle(batch([event(Released, TASK, NOW), newer]), offset=6),
        lifecycle(batch([event(Succeeded, TASK, NOW)]), offset=7),
        lifecycle(
            batch([event(Started, other_lane, NOW)]), offset=6, lane=lane_of(other_lane.task_id, LANES)
        ),
    )
    assert projection.halts["tasks.lifecycle", LANE].position.offset == 6
    assert len(projection.halts) == 1
    assert {
        write.task_id: sorted(write.events) for write in projection.writes if isinstance(write, EventsWrite)
    } == {
        TASK.task_id: [5 * 4096],
        other_lane.task_id: [6 * 4096],
    }


def test_an_unknown_batch_halts_its_lane_and_a_halted_lane_is_passed_over() -> None:
    first = run(lifecycle(UNKNOWN_SCHEMA, offset=6))
    later = [lifecycle(batch([event(Started, TASK, NOW)]), offset=offset) for offset in (5, 6, 7)]
    second = project(later, codec=CODEC, layout=LAYOUT, now_ms=NOW, halted=first.halts)
    assert [sorted(write.events) for write in second.writes if isinstance(write, EventsWrite)] == [[5 * 4096]]


def test_a_batch_without_places_for_its_events_is_rejected() -> None:
    entry = LifecycleEntry(
        task_id=TASK.task_id, retain_until=NOW + DAY_MS, event=CODEC.encode(event(Started, TASK, NOW))
    )
    assert run(lifecycle(batch([entry] * MAX_BATCH_EVENTS))).counts["events"] == MAX_BATCH_EVENTS
    too_many = batch([entry] * (MAX_BATCH_EVENTS + 1))
    (reject,) = run(lifecycle(too_many)).rejects
    assert reject.value == too_many


@pytest.mark.parametrize(
    "task_id", [uuid.uuid4(), new_task_id(NOW + 300_001)], ids=["not v7", "in the future"]
)
def test_a_submission_under_an_impossible_id_is_rejected(task_id: uuid.UUID) -> None:
    record = dispatch("tasks.high", 0, 3, submission(NOW, task_id=task_id), now_ms=NOW)
    projection = run(record)
    (reject,) = projection.rejects
    assert (reject.value, projection.writes) == (record.value, ())


def test_what_may_be_forgotten_is_not_stored() -> None:
    records = (dispatch("tasks.low", 0, 0, TASK, now_ms=NOW), lifecycle(batch([event(Started, TASK, NOW)])))
    assert run(*records, now_ms=NOW + DAY_MS).writes == ()
    assert [write.ttl_seconds for write in run(*records, now_ms=NOW + DAY_MS - 1_000).writes] == [1, 1]


def test_a_retention_beyond_the_stores_is_cut() -> None:
    task = replace(TASK, retain_until=2**62)
    (write,) = run(dispatch("tasks.low", 0, 0, task, now_ms=NOW)).writes
    assert write.ttl_seconds == MAX_TTL_SECONDS


# ---- any delivery gives one view ---------------------------------------------------------------------------

kinds = st.sampled_from((Started, Released, Failed, Succeeded, DeadLettered))


@st.composite
def logs(draw: st.DrawFn) -> list[list[InRecord]]:
    """The log of a few tasks, by partition: each in order, as the broker has it."""
    tasks = [
        submission(NOW, task_id=task_id_of(NOW - number, draw(st.integers(0, 2 * LANES))))
        for number in range(draw(st.integers(1, 4)))
    ]
    partitions: dict[tuple[str, int], list[InRecord]] = {}
    for task in tasks:
        partition = draw(st.integers(0, 1))
        records = partitions.setdefault(("tasks.normal", partition), [])
        # A submitter that did not hear of the acknowledgement sends again.
        for _ in range(draw(st.integers(1, 2))):
            records.append(dispatch("tasks.normal", partition, len(records), task, now_ms=NOW))
    for lane in range(LANES):
        mine = [task for task in tasks if lane_of(task.task_id, LANES) == lane]
        records = partitions.setdefault(("tasks.lifecycle", lane), [])
        for _ in range(draw(st.integers(0, 5)) if mine else 0):
            events: list[LifecycleEvent] = [
                event(
                    draw(kinds),
                    draw(st.sampled_from(mine)),
                    NOW + draw(st.integers(0, 50)),
                )
                for _ in range(draw(st.integers(1, 3)))
            ]
            records.append(in_record("tasks.lifecycle", lane, len(records), batch(events), now_ms=NOW))
    return [records for records in partitions.values() if records]


async def deliver(store: ModelStore, runs: Sequence[Sequence[InRecord]]) -> None:
    for records in runs:
        await store.apply(project(records, codec=CODEC, layout=LAYOUT, now_ms=NOW).writes)


def new_store() -> ModelStore:
    return ModelStore(LANES, LAYOUT.bucket_ms)


@settings(deadline=None)
@given(logs(), st.data())
def test_duplicated_refolded_and_permuted_deliveries_give_one_view(
    partitions: list[list[InRecord]], data: st.DataObject
) -> None:
    straight = new_store()
    drive(deliver(straight, partitions))
    # Any runs of any partitions, repeated and in any order: rebalances, crashes, slow writers.
    cuts = [
        records[begin:end]
        for records in partitions
        for begin, end in itertools.combinations(range(len(records) + 1), 2)
    ]
    runs = data.draw(st.lists(st.sampled_from(cuts), max_size=8)) + partitions
    other = new_store()
    drive(deliver(other, data.draw(st.permutations(runs))))
    assert other.contents() == straight.contents()


@settings(deadline=None)
@given(logs(), st.data())
def test_a_reader_sees_only_longer_and_longer_prefixes(
    partitions: list[list[InRecord]], data: st.DataObject
) -> None:
    """Partitions move on independently, each in order, and may be read again from an earlier place."""

    async def play() -> None:
        store = new_store()
        lanes = {position: [] for position in range(len(partitions))}  # type: ignore[var-annotated]
        places = dict.fromkeys(lanes, 0)
        seen: dict[uuid.UUID, tuple[int, ...]] = {}
        ended: dict[uuid.UUID, object] = {}
        history = {
            task_id: tuple(sorted(stored.events))
            for task_id, stored in (await everything(partitions)).items()
        }
        for _ in range(data.draw(st.integers(1, 10))):
            which = data.draw(st.sampled_from(sorted(places)))
            records = partitions[which]
            begin = data.draw(st.integers(0, places[which]))
            end = data.draw(st.integers(places[which], len(records)))
            places[which] = end
            await deliver(store, [records[begin:end]])
            for task_id in store.rows:
                stored = await store.read(task_id)
                assert stored is not None
                sequences = tuple(sorted(stored.events))
                assert sequences == history[task_id][: len(sequences)]
                assert len(sequences) >= len(seen.get(task_id, ()))
                seen[task_id] = sequences
                if stored.submission is not None:
                    state = folded(stored)
                    assert ended.setdefault(task_id, state) == state or not ended[task_id].status.ended  # type: ignore[attr-defined]
                    ended[task_id] = state

    drive(play())


async def everything(partitions: list[list[InRecord]]) -> dict[uuid.UUID, object]:
    store = new_store()
    await deliver(store, partitions)
    return {task_id: await store.read(task_id) for task_id in store.rows}


def test_events_before_their_submission_are_not_visible_yet() -> None:
    store = new_store()
    drive(deliver(store, [[lifecycle(batch([event(Started, TASK, NOW)]))]]))
    stored = drive(store.read(TASK.task_id))
    assert stored is not None
    assert stored.submission is None
    drive(deliver(store, [[dispatch("tasks.normal", 0, 0, TASK, now_ms=NOW)]]))
    stored = drive(store.read(TASK.task_id))
    assert stored is not None
    assert folded(stored).status is TaskStatus.RUNNING


def test_a_submission_decodes_to_what_was_sent() -> None:
    (write,) = run(dispatch("tasks.normal", 0, 0, TASK, now_ms=NOW)).writes
    assert isinstance(write, SubmissionWrite)
    assert CODEC.decode(write.submission, TaskSubmitted) == TASK
