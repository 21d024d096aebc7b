"""What a worker and its children say to each other: length-prefixed pickles of plain tuples, and how they are read.

Invariant: one frame is one message, whole or not at all. Bytes that are no frame raise `CorruptFrame`; whoever reads them gives the
other side up, since nothing after them can be trusted.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import fields
from operator import attrgetter
from typing import Any, Protocol

from taskline.schemas.events import Priority
from taskline.schemas.ids import task_id_of
from taskline.workers.context import TaskContext
from taskline.workers.line import Line

Message = tuple[Any, ...]

# To a child: (RUN, number, task name, payload, context), (CANCEL, number), (PING,)
RUN, CANCEL, PING = 1, 2, 3
# (STOP, number): come to an end of yourself
STOP = 4
# From a child: (READY, resident bytes), (BROKEN, why), (RESULT, number, JSON or None), (FAILED, number, Failure), (CANCELLED, number), (PONG,)
READY, BROKEN, RESULT, FAILED, CANCELLED, PONG = 11, 12, 13, 14, 15, 16
# (PROGRESS, number, fraction or None, message or None)
PROGRESS = 17

# Far above the largest payload and result that settings usually allow; a length beyond it is not a length.
MAX_FRAME_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct("!I")
_PROTOCOL = 5

# Its line stays where it is; the other side has one of its own.
_FIELDS = tuple(field.name for field in fields(TaskContext) if field.name != "line")
_field_values = attrgetter(*_FIELDS)
_TASK_ID, _ROOT_ID, _PRIORITY = (_FIELDS.index(name) for name in ("task_id", "root_id", "priority"))


class Stream(Protocol):
    """What frames are read from."""

    def read(self, size: int, /) -> bytes:
        """So many bytes; fewer only at the end."""
        ...


class CorruptFrame(Exception):
    """What arrived is no frame."""


def encode(message: Message) -> bytes:
    """A message as a frame.

    Raises:
        ValueError: it is too large.
        Exception: something in it can't be pickled.
    """
    data = pickle.dumps(message, _PROTOCOL)
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(data)} bytes is too large for a child process")
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Messages out of bytes that arrive in any pieces."""

    def __init__(self) -> None:
        """Begin at a frame's beginning."""
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now.

        Raises:
            CorruptFrame: these bytes are no frames.
        """
        buffer: bytes | bytearray = data
        if self._rest:
            self._rest += data
            buffer = self._rest
        messages: list[Message] = []
        start, end = 0, len(buffer)
        while end - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            _check(length)
            stop = start + _LENGTH.size + length
            if stop > end:
                break
            messages.append(_decode(memoryview(buffer)[start + _LENGTH.size : stop]))
            start = stop
        if buffer is self._rest:
            del self._rest[:start]
        elif start < end:
            self._rest += memoryview(buffer)[start:]
        return messages


def read_message(stream: Stream) -> Message | None:
    """The next message of a blocking stream; None: it has ended.

    Raises:
        CorruptFrame: what came is no frame, or ended within one.
    """
    header = stream.read(_LENGTH.size)
    if not header:
        return None
    if len(header) < _LENGTH.size:
        raise CorruptFrame("the stream ended within a frame")
    (length,) = _LENGTH.unpack(header)
    _check(length)
    data = stream.read(length)
    if len(data) < length:
        raise CorruptFrame("the stream ended within a frame")
    return _decode(data)


def context_values(ctx: TaskContext) -> list[Any]:
    """A context as plain values: ids and enums are slow to pickle."""
    values = list(_field_values(ctx))
    values[_TASK_ID] = ctx.task_id.bytes
    values[_ROOT_ID] = ctx.root_id.bytes
    values[_PRIORITY] = ctx.priority.value
    return values


def context_of(values: list[Any], line: Line) -> TaskContext:
    """The context that `context_values` was given, with this side's line."""
    named = dict(zip(_FIELDS, values, strict=True))
    named["task_id"] = task_id_of(named["task_id"])
    named["root_id"] = task_id_of(named["root_id"])
    named["priority"] = Priority(named["priority"])
    return TaskContext(**named, line=line)


def _check(length: int) -> None:
    if length > MAX_FRAME_BYTES:
        raise CorruptFrame(f"a frame of {length} bytes")


def _decode(data: bytes | memoryview) -> Message:
    try:
        # From the worker's own processes, which run the same code as this one.
        message = pickle.loads(data)  # noqa: S301
    except MemoryError:
        # The reader's own limit, and nothing is wrong with the frame.
        raise
    except Exception as error:
        raise CorruptFrame(f"not a pickle: {error}") from error
    if not (isinstance(message, tuple) and message and isinstance(message[0], int)):
        raise CorruptFrame("not a message")
    return message
