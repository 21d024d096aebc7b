from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from taskline.infra.holes import (
    MAX_METADATA_BYTES,
    UnreadableMetadata,
    decode_holes,
    decode_running,
    encode_holes,
)
from taskline.infra.intake import TopicPartition
from taskline.infra.watermark import WatermarkTracker

# Offsets of a partition's records: mostly contiguous, some with gaps as transaction markers and compaction leave them.
gaps = st.one_of(st.just(1), st.integers(1, 3), st.integers(1, 5_000))


@st.composite
def records(draw: st.DrawFn, most: int = 60) -> list[int]:
    at = draw(st.integers(0, 2**40))
    found = []
    for gap in draw(st.lists(gaps, min_size=1, max_size=most)):
        at += gap
        found.append(at)
    return found


def naive_watermark(taken: list[int], done: set[int]) -> int:
    return next((offset for offset in taken if offset not in done), taken[-1] + 1)


@given(records(), st.randoms(use_true_random=False))
def test_any_order_of_completion_gives_the_watermark_of_the_plain_definition(
    offsets: list[int], rng: random.Random
) -> None:
    tracker = WatermarkTracker(offsets[0])
    waiting: list[int] = []
    to_take = list(offsets)
    done: set[int] = set()
    taken: list[int] = []
    last = tracker.watermark
    while to_take or waiting:
        if to_take and (not waiting or rng.random() < 0.5):
            offset = to_take.pop(0)
            assert tracker.take(offset)
            taken.append(offset)
            waiting.append(offset)
        else:
            offset = waiting.pop(rng.randrange(len(waiting)))
            tracker.complete(offset)
            done.add(offset)
        assert tracker.watermark >= last
        last = tracker.watermark
        expected = naive_watermark(taken, done)
        # It may also stand below, where no record is: what counts is that the same records are still to be read.
        assert tracker.watermark <= expected
        assert not [offset for offset in taken if tracker.watermark <= offset < expected]
        assert tracker.unfinished == len(taken) - len(done)
        assert tracker.window == len([offset for offset in taken if offset >= tracker.watermark])
    assert tracker.watermark == offsets[-1] + 1
    assert tracker.commit().metadata == ""


@given(st.data())
def test_owners_that_crash_at_any_point_run_everything_and_nothing_that_a_commit_says_is_done(
    data: st.DataObject,
) -> None:
    offsets = data.draw(records())
    rng = data.draw(st.randoms(use_true_random=False))
    runs: dict[int, int] = dict.fromkeys(offsets, 0)
    done_at_commit: set[int] = set()
    committed, metadata = offsets[0], ""
    for _ in range(data.draw(st.integers(1, 5))):
        ranges = decode_holes(committed, metadata)
        tracker = WatermarkTracker(committed, ranges)
        assert tracker.watermark >= committed
        running: list[int] = []
        done = set(done_at_commit)
        for offset in [offset for offset in offsets if offset >= committed]:
            if rng.random() < 0.1:
                break
            takes = tracker.take(offset)
            assert takes == (offset not in done_at_commit), offset
            if takes:
                running.append(offset)
            while running and rng.random() < 0.6:
                ended = running.pop(rng.randrange(len(running)))
                runs[ended] += 1
                tracker.complete(ended)
                done.add(ended)
            if rng.random() < 0.3:
                commit = tracker.commit()
                assert commit.offset >= committed
                committed, metadata, done_at_commit = commit.offset, commit.metadata, set(done)
                covered = decode_holes(committed, metadata)
                for each in offsets:
                    skipped = each < committed or any(start <= each < stop for start, stop in covered)
                    assert skipped == (each in done), each
    # The last owner does not crash.
    tracker = WatermarkTracker(committed, decode_holes(committed, metadata))
    for offset in [offset for offset in offsets if offset >= committed]:
        if tracker.take(offset):
            runs[offset] += 1
            tracker.complete(offset)
    assert all(count >= 1 for count in runs.values())
    assert tracker.commit().offset >= offsets[-1] + 1
    assert tracker.commit().metadata == ""


def test_misuse_is_loud() -> None:
    tracker = WatermarkTracker(5)
    tracker.take(5)
    tracker.take(8)
    with pytest.raises(ValueError, match="taken already"):
        tracker.take(8)
    with pytest.raises(ValueError, match="never taken"):
        tracker.complete(9)
    with pytest.raises(ValueError, match="not waiting"):
        tracker.complete(6)
    tracker.complete(8)
    with pytest.raises(ValueError, match="not waiting"):
        tracker.complete(8)
    tracker.complete(5)
    with pytest.raises(ValueError, match="not waiting"):
        tracker.complete(5)


def test_what_an_earlier_owner_did_is_carried_on_although_it_has_not_come_again() -> None:
    tracker = WatermarkTracker(100, ((105, 111), (120, 121)))
    assert tracker.take(100)
    assert tracker.take(101)
    tracker.complete(101)
    commit = tracker.commit()
    assert commit.offset == 100
    assert decode_holes(100, commit.metadata) == ((101, 102), (105, 111), (120, 121))


def test_the_watermark_passes_what_an_earlier_owner_did_and_its_records_are_still_skipped() -> None:
    tracker = WatermarkTracker(100, ((101, 104),))
    tracker.take(100)
    tracker.complete(100)
    assert tracker.watermark == 104
    assert [tracker.take(offset) for offset in range(101, 106)] == [False, False, False, True, True]
    assert tracker.watermark == 104
    assert tracker.window == 2


# ---- the codec ------------------------------------------------------------------------------------------------


@st.composite
def holes(draw: st.DrawFn, runs: st.SearchStrategy[int], most: int) -> tuple[int, list[tuple[int, int]]]:
    watermark = draw(st.integers(0, 2**62))
    at, found = watermark, []
    for waiting, done in draw(st.lists(st.tuples(runs, runs), max_size=most)):
        found.append((at + waiting, at + waiting + done))
        at += waiting + done
    return watermark, found


@given(holes(st.integers(1, 10_000), 50))
def test_holes_come_back_as_they_were(case: tuple[int, list[tuple[int, int]]]) -> None:
    watermark, ranges = case
    text = encode_holes(watermark, ranges)
    assert decode_holes(watermark, text) == tuple(ranges)
    assert (text == "") == (not ranges)


@given(
    st.lists(st.integers(1, 12), min_size=1).filter(lambda lengths: len(lengths) % 2 == 0),
    st.integers(0, 2**62),
)
@example([1] * 4_000, 2**62)
@example([2] * 2_000, 0)
@example([3] * 1_332, 0)
@example([2, 1] * 1_333, 0)
def test_a_window_of_4000_records_without_gaps_always_fits_whole(pattern: list[int], watermark: int) -> None:
    lengths, total = [], 0
    while total + pattern[len(lengths) % len(pattern)] <= 4_000:
        lengths.append(pattern[len(lengths) % len(pattern)])
        total += lengths[-1]
    lengths = lengths[: len(lengths) // 2 * 2]
    at, ranges = watermark, []
    for waiting, done in zip(lengths[::2], lengths[1::2], strict=True):
        ranges.append((at + waiting, at + waiting + done))
        at += waiting + done
    text = encode_holes(watermark, ranges)
    assert len(text) <= MAX_METADATA_BYTES
    assert decode_holes(watermark, text) == tuple(ranges)


@given(st.integers(1, 2**40), st.integers(0, 2**50))
def test_any_gaps_fit_and_what_is_left_out_is_only_the_highest_runs(gap: int, watermark: int) -> None:
    ranges = [(watermark + gap * (2 * n + 1), watermark + gap * (2 * n + 2)) for n in range(2_000)]
    text = encode_holes(watermark, ranges)
    assert len(text) <= MAX_METADATA_BYTES
    kept = decode_holes(watermark, text)
    assert kept == tuple(ranges[: len(kept)])
    # Up to 7 offsets a record (a transaction around each, say), nothing is left out.
    assert len(kept) == len(ranges) or gap > 7
    assert len(kept) > 100


def test_metadata_of_another_offset_or_hand_is_refused() -> None:
    text = encode_holes(100, [(105, 111)])
    assert decode_holes(100, text) == ((105, 111),)
    for watermark, metadata in (
        (99, text),
        (100, text[:-4]),
        (100, "x" + text[1:]),
        (100, "not ours"),
        (100, "é"),
        (100, "AAAA"),
        (100, '{"generation": 4}'),
    ):
        with pytest.raises(UnreadableMetadata):
            decode_holes(watermark, metadata)


@given(st.binary(max_size=40))
def test_bytes_of_any_kind_are_read_or_refused(data: bytes) -> None:
    import base64

    try:
        decode_holes(7, base64.urlsafe_b64encode(data).decode())
    except UnreadableMetadata:
        return
    assert data == b""


def test_runs_that_touch_or_go_back_are_misuse() -> None:
    for ranges in ([(100, 101)], [(99, 101)], [(101, 103), (103, 104)], [(101, 101)]):
        with pytest.raises(ValueError, match="does not follow"):
            encode_holes(100, ranges)


@given(holes(st.integers(1, 10_000), 30), st.sets(st.integers(0, 100_000), max_size=300))
def test_what_runs_comes_back_beside_what_is_done(
    case: tuple[int, list[tuple[int, int]]], distances: set[int]
) -> None:
    watermark, ranges = case
    running = {watermark + distance for distance in distances}
    text = encode_holes(watermark, ranges, running)
    assert len(text) <= MAX_METADATA_BYTES
    assert decode_running(watermark, text) == tuple(sorted(running))
    assert decode_holes(watermark, text) == tuple(ranges)


@given(st.integers(1, 2**40), st.integers(1, 3_000), st.integers(0, 2**50))
def test_what_runs_never_crowds_out_what_is_done(gap: int, count: int, watermark: int) -> None:
    ranges = [(watermark + 2 * n + 1, watermark + 2 * n + 2) for n in range(1_000)]
    text = encode_holes(watermark, ranges, [watermark + gap * n for n in range(count)])
    assert len(text) <= MAX_METADATA_BYTES
    assert decode_holes(watermark, text) == tuple(ranges)
    listed = decode_running(watermark, text)
    assert listed == tuple(watermark + gap * n for n in range(len(listed)))
    assert len(listed) >= min(count, 100)


def test_what_runs_is_told_of_until_it_is_done_or_handed_over() -> None:
    tracker = WatermarkTracker(100)
    for offset in range(100, 104):
        tracker.take(offset)
    tracker.begin(101)
    tracker.begin(102)
    tracker.complete(102)
    # Of another partition's time, or done already.
    tracker.begin(102)
    commit = tracker.commit()
    assert decode_running(100, commit.metadata) == (101,)
    assert decode_holes(100, commit.metadata) == ((102, 103),)
    name = TopicPartition("tasks.low", 0)
    assert WatermarkTracker.resumed(name, commit).suspects == {101}
    left = tracker.commit(leaving=True)
    assert WatermarkTracker.resumed(name, left).suspects == frozenset()
    tracker.complete(101)
    assert decode_running(100, tracker.commit().metadata) == ()
