"""Frames between a worker and its children, whole or not at all."""

from __future__ import annotations

import io
import struct
from typing import Any

import pytest
from child_kit import context
from hypothesis import given
from hypothesis import strategies as st

from taskline.schemas.events import Priority
from taskline.workers.child_frames import (
    MAX_FRAME_BYTES,
    CorruptFrame,
    FrameReader,
    context_of,
    context_values,
    encode,
    read_message,
)
from taskline.workers.line import NOWHERE

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.binary(max_size=200),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
messages = st.tuples(st.integers(0, 20), values)


@given(st.lists(messages, max_size=6), st.data())
def test_messages_arrive_whole_and_in_order_however_the_bytes_are_cut(
    sent: list[tuple[int, Any]], data: st.DataObject
) -> None:
    stream = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = FrameReader()
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += reader.feed(stream[start:end])
    assert received == sent


@given(st.lists(messages, max_size=6))
def test_a_blocking_reader_reads_the_same(sent: list[tuple[int, Any]]) -> None:
    stream = io.BytesIO(b"".join(map(encode, sent)))
    received = []
    while (message := read_message(stream)) is not None:
        received.append(message)
    assert received == sent


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("!I", MAX_FRAME_BYTES + 1) + b"x",
        struct.pack("!I", 3) + b"abc",
        struct.pack("!I", 0),
        encode((1,))[:4] + b"\x00" * (len(encode((1,))) - 4),
        # A pickle, but of something else.
        struct.pack("!I", 4) + b"\x80\x05N.",
        struct.pack("!I", 5) + b"\x80\x05)\x85.",
    ],
)
def test_what_is_no_frame_is_refused(garbage: bytes) -> None:
    with pytest.raises(CorruptFrame):
        FrameReader().feed(garbage)
    with pytest.raises(CorruptFrame):
        read_message(io.BytesIO(garbage))


@given(st.integers(1, 30))
def test_a_stream_that_ends_within_a_frame_is_corrupt(missing: int) -> None:
    frame = encode((1, "some text that is long enough"))
    with pytest.raises(CorruptFrame, match="ended within"):
        read_message(io.BytesIO(frame[:-missing]))


@pytest.mark.parametrize("priority", Priority)
def test_a_context_crosses_unchanged(priority: Priority) -> None:
    for ctx in (context(priority=priority), context(soft_seconds=3, attempt=7, traceparent="00-a-b-01")):
        message = encode((1, context_values(ctx)))
        ((_, read),) = FrameReader().feed(message)
        assert context_of(read, NOWHERE) == ctx
        assert type(context_of(read, NOWHERE).priority) is Priority
