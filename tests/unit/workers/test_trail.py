from __future__ import annotations

import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskline.infra.log import InRecord, OutRecord, Position
from taskline.infra.tiers import Tiers, delayed
from taskline.infra.topics import Topics
from taskline.producers.submission import RECORD_ROOM_BYTES
from taskline.schemas.codec import Codec
from taskline.schemas.events import AttemptError, DeadLetter, ErrorCategory
from taskline.schemas.ids import new_task_id
from taskline.settings import DelaySettings, Settings
from taskline.workers.outcome import describe_error
from taskline.workers.redispatch import next_attempt
from taskline.workers.trail import EMPTY, MAX_TRAIL_BYTES, Trail, decode_trail

NOW = 1_800_000_000_000
TASK = new_task_id(NOW)
# Kafka's own framing of a header: two lengths; of a record: offsets, lengths, a timestamp (and a batch of one around it).
FRAME_PER_HEADER, FRAME_PER_RECORD = 10, 100

texts = st.text(max_size=600)
errors = st.builds(
    AttemptError,
    attempt=st.integers(1, 2**31 - 1),
    at=st.integers(-(2**63), 2**63 - 1),
    worker=texts,
    category=st.sampled_from(ErrorCategory),
    error_class=texts,
    message=texts,
)


def trail_of(*appended: AttemptError) -> Trail:
    trail = EMPTY
    for error in appended:
        trail = trail.append(error)
    return trail


def worst(attempt: int) -> AttemptError:
    return AttemptError(
        attempt=attempt,
        at=-(2**63),
        worker='"' * 10_000,
        category=ErrorCategory.RATE_LIMITED,
        error_class="\\" * 10_000,
        message="\x00" * 10_000 + '"' * 10_000,
    )


@given(st.lists(errors, max_size=30))
def test_a_trail_is_bounded_keeps_the_first_and_the_newest_and_comes_back_from_its_header(
    appended: list[AttemptError],
) -> None:
    trail = trail_of(*appended)
    header = trail.encode()
    assert len(header) <= MAX_TRAIL_BYTES
    assert decode_trail(header) == trail
    if appended:
        assert [trail.errors[0].attempt, trail.errors[-1].attempt] == [
            appended[0].attempt,
            appended[-1].attempt,
        ]
        kept = [error.attempt for error in trail.errors]
        newest = [error.attempt for error in appended]
        # What is missing is one run after the first.
        assert kept[1:] == newest[len(newest) - len(kept) + 1 :]


def test_a_usual_trail_is_whole() -> None:
    appended = [
        AttemptError(
            attempt=number,
            at=NOW,
            worker="host-4711-ab12cd",
            category=ErrorCategory.SERVER,
            error_class="httpx.HTTPStatusError",
            message="Server error '503 Service Unavailable' for url 'https://example.org/hook'",
        )
        for number in range(1, 11)
    ]
    assert trail_of(*appended).errors == tuple(appended)


def test_the_worst_errors_fit_too() -> None:
    trail = trail_of(*(worst(number) for number in range(1, 60)))
    assert len(trail.encode()) <= MAX_TRAIL_BYTES
    assert (trail.errors[0].attempt, trail.errors[-1].attempt) == (1, 59)


@given(st.lists(st.sampled_from(ErrorCategory), max_size=101))
def test_server_errors_in_a_row_are_counted_although_errors_are_missing(
    categories: list[ErrorCategory],
) -> None:
    trail = EMPTY
    row = 0
    for number, category in enumerate(categories, start=1):
        row = row + 1 if category is ErrorCategory.SERVER else 0
        trail = decode_trail(trail.encode()).append(
            AttemptError(
                attempt=number, at=NOW, worker="w", category=category, error_class="E", message="m" * 200
            )
        )
        assert trail.server_errors == row


@given(st.binary(max_size=3_000))
def test_bytes_that_are_no_trail_are_an_empty_one(header: bytes) -> None:
    # The lucky one that is a trail can be used like one.
    decode_trail(header).append(worst(1)).encode()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(json_values)
def test_json_that_is_no_trail_is_an_empty_one(value: Any) -> None:
    for document in (value, [0, value], [0, [value]], [value, []], [0, [[value] * 6]]):
        found = decode_trail(orjson.dumps(document, default=str))
        assert len(found.append(worst(1)).encode()) <= MAX_TRAIL_BYTES


@pytest.mark.parametrize(
    "row",
    [
        [0, NOW, "w", "unknown", "E", "m"],
        [2**31, NOW, "w", "unknown", "E", "m"],
        [1, 2**63, "w", "unknown", "E", "m"],
        [True, NOW, "w", "unknown", "E", "m"],
        [1, NOW, None, "unknown", "E", "m"],
        [1, NOW, "w", "unknown", "E"],
        [1, NOW, "w", "unknown", "E", "m", "more"],
    ],
)
def test_what_a_dead_letter_could_not_hold_is_no_trail(row: list[Any]) -> None:
    assert decode_trail(orjson.dumps([0, [row]])) == EMPTY


def test_a_kind_of_error_that_only_newer_workers_know_is_unknown() -> None:
    (error,) = decode_trail(orjson.dumps([0, [[1, NOW, "w", "cosmic", "E", "m"]]])).errors
    assert error.category is ErrorCategory.UNKNOWN


def test_a_header_over_the_limit_is_not_read() -> None:
    row = [1, NOW, "w", "unknown", "E", "m" * MAX_TRAIL_BYTES]
    assert decode_trail(orjson.dumps([0, [row]])) == EMPTY
    assert decode_trail(None) == decode_trail(b"") == EMPTY


def test_a_long_error_that_came_in_a_header_does_not_push_out_the_newest() -> None:
    row = [1, NOW, "w", "unknown", "E", "m" * 1_900]
    trail = decode_trail(orjson.dumps([0, [row]])).append(worst(2))
    assert [error.attempt for error in trail.errors] == [1, 2]


# ---- what has to have room -------------------------------------------------------------------------------------


def size(record: OutRecord) -> int:
    headers = sum(len(name) + len(value) + FRAME_PER_HEADER for name, value in record.headers.items())
    return len(record.value or b"") + len(record.key or b"") + headers + FRAME_PER_RECORD


def test_all_that_a_retry_adds_fits_into_the_room_that_the_producer_leaves() -> None:
    record = InRecord(
        # The longest name that Kafka allows a topic.
        position=Position(topic="t" * 249, partition=0, offset=0),
        value=b"v" * 1_000,
        key=b"k" * 100,
        # What others put there does not grow from attempt to attempt: it is not taken over.
        headers={"x-theirs": b"x" * 100_000},
        timestamp_ms=NOW,
    )
    trail = trail_of(*(worst(number) for number in range(1, 100)))
    following = next_attempt(record, TASK, attempt=999_999_999, deaths=999_999_999, trail=trail)
    waiting = delayed(
        following,
        due_ms=2**62,
        now_ms=0,
        topics=Topics(namespace="n."),
        tiers=Tiers.of(DelaySettings().tiers),
    )
    assert set(waiting.headers) == {
        "taskline-task-id",
        "taskline-attempt",
        "taskline-deaths",
        "taskline-trail",
        "taskline-due",
        "taskline-target",
    }
    assert size(waiting) - len(record.value or b"") - len(record.key or b"") <= RECORD_ROOM_BYTES


@pytest.mark.parametrize("max_record_bytes", [16_384, 1_048_576])
def test_a_dead_letter_of_the_largest_record_with_the_worst_errors_fits_its_topic(
    max_record_bytes: int,
) -> None:
    def fail(depth: int) -> None:
        if depth:
            fail(depth - 1)
        raise ValueError("\x00" * 100_000)

    try:
        fail(40)
    except ValueError as error:
        info = describe_error(error)
    name = "n" * 200
    letter = DeadLetter(
        task_id=TASK,
        # Names of 200 characters, of four bytes each.
        tenant="\U0001f600" * 200,
        task_type=name,
        reason="payload_undecodable",
        attempt=2**31 - 1,
        error_class=info.error_class,
        message=info.message,
        traceback=info.traceback,
        worker=name,
        at=NOW,
        category=ErrorCategory.RATE_LIMITED,
        errors=trail_of(*(worst(number) for number in range(1, 100))).errors,
        source_topic="t" * 249,
        source_partition=2**31 - 1,
        source_offset=2**63 - 1,
        submission=random.Random(0).randbytes(max_record_bytes - RECORD_ROOM_BYTES),
    )
    record = OutRecord(
        topic="dlq",
        key=TASK.bytes,
        value=Codec().encode(letter),
        headers={"taskline-task-id": TASK.bytes},
    )
    assert size(record) <= 2 * max_record_bytes
    assert Settings().topics.max_record_bytes == 1_048_576
