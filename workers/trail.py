"""The errors of a task's earlier attempts, carried by its next one in a header of bounded size. Pure.

Invariant: the header never has more than MAX_TRAIL_BYTES, however many attempts fail and whatever they say: of too many errors the
first and the newest are kept. A header that is not ours is an empty trail, never an exception: it informs people, and must not stop
a task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

from taskline.schemas.events import AttemptError, ErrorCategory
from taskline.workers.outcome import head

# Half of what a dispatch record has free for headers (producers.submission.RECORD_ROOM_BYTES).
MAX_TRAIL_BYTES: Final = 2_048
# Of one error, so that the first and the newest always fit, even if JSON must escape every second byte of them.
_MAX_WORKER_BYTES: Final = 80
_MAX_CLASS_BYTES: Final = 120
_MAX_MESSAGE_BYTES: Final = 240
# The bounds of Avro's int and long, under which the errors are part of a dead letter.
_INT: Final = range(1, 2**31)
_LONG: Final = range(-(2**63), 2**63)
_FIELDS: Final = 6
# What JSON writes as six bytes: control characters.
_CONTROL: Final = dict.fromkeys((*range(0x20), 0x7F), " ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trail:
    """What went wrong so far."""

    # Oldest first.
    errors: tuple[AttemptError, ...] = ()
    # How many attempts in a row, up to the newest, ended with a server error; exact, though errors may be missing.
    server_errors: int = 0

    def append(self, error: AttemptError) -> Trail:
        """The trail with one more error, shortened until it fits."""
        # All of them: one that came with a header may be longer than ours.
        errors = [_short(each) for each in (*self.errors, error)]
        server = self.server_errors + 1 if error.category is ErrorCategory.SERVER else 0
        trail = Trail(errors=tuple(errors), server_errors=server)
        while len(trail.encode()) > MAX_TRAIL_BYTES:
            del errors[1]
            trail = Trail(errors=tuple(errors), server_errors=server)
        return trail

    def encode(self) -> bytes:
        """The header's bytes: JSON."""
        rows = [
            [each.attempt, each.at, each.worker, each.category.value, each.error_class, each.message]
            for each in self.errors
        ]
        return orjson.dumps([self.server_errors, rows])


EMPTY: Final = Trail()


def decode_trail(header: bytes | None) -> Trail:
    """The trail of a header; of none, or of one that is not ours, the empty one."""
    if not header or len(header) > MAX_TRAIL_BYTES:
        return EMPTY
    try:
        server_errors, rows = orjson.loads(header)
        if not _is_int(server_errors) or server_errors not in range(2**31):
            return EMPTY
        return Trail(errors=tuple(map(_error, rows)), server_errors=server_errors)
    except (TypeError, ValueError):
        # orjson's own error is a ValueError.
        return EMPTY


def _error(row: Any) -> AttemptError:  # noqa: ANN401 - whatever JSON held
    if not isinstance(row, list) or len(row) != _FIELDS:
        raise ValueError("no error")
    attempt, at, worker, category, error_class, message = row
    if not (_is_int(attempt) and attempt in _INT and _is_int(at) and at in _LONG):
        raise ValueError("numbers out of their range")
    if not all(isinstance(text, str) for text in (worker, category, error_class, message)):
        raise ValueError("no text")
    return AttemptError(
        attempt=attempt,
        at=at,
        worker=worker,
        category=ErrorCategory.read(category),
        error_class=error_class,
        message=message,
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(error: AttemptError) -> AttemptError:
    return AttemptError(
        attempt=error.attempt,
        at=error.at,
        worker=head(error.worker.translate(_CONTROL), _MAX_WORKER_BYTES),
        category=error.category,
        error_class=head(error.error_class.translate(_CONTROL), _MAX_CLASS_BYTES),
        message=head(error.message.translate(_CONTROL), _MAX_MESSAGE_BYTES),
    )
