"""Lease tokens: what a worker of the HTTP protocol shows for the execution that it was lent. Pure.

Invariant: a token leads to its execution by hashing alone, so any replica takes it without having seen it, and nothing secret is kept
anywhere. The way back is closed: an execution's id is in the log and in the task's history for all to read, and whoever reads it
can't report an outcome.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from taskline.schemas.ids import TaskId, task_id_of

# 144 bits of randomness: nobody guesses one.
_SECRET_BYTES = 18
# Binds the token to its task, so that one of another task, or a mistyped one, is refused without a look at anything.
_CHECK_BYTES = 6
_ID_BYTES = 16
_TOKEN_CHARS = (_SECRET_BYTES + _CHECK_BYTES) // 3 * 4
_FOR_EXECUTION = b"taskline lease execution\0"
_FOR_CHECK = b"taskline lease check\0"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseToken:
    """A new lease's names."""

    # For the worker alone.
    text: str = field(repr=False)
    # For the log.
    execution: TaskId


def new_token(task_id: TaskId, random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> LeaseToken:
    """Make a token for a lease of a task; the randomness must be fit for secrets."""
    secret = random_bytes(_SECRET_BYTES)
    text = base64.urlsafe_b64encode(secret + _check(secret, task_id)).decode("ascii")
    return LeaseToken(text=text, execution=_execution(secret))


def execution_of(token: str, task_id: TaskId) -> TaskId | None:
    """The execution that a token names; None: it is no token of this task."""
    if len(token) != _TOKEN_CHARS:
        return None
    try:
        data = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error):
        return None
    secret, check = data[:_SECRET_BYTES], data[_SECRET_BYTES:]
    return _execution(secret) if check == _check(secret, task_id) else None


def _execution(secret: bytes) -> TaskId:
    return task_id_of(hashlib.sha256(_FOR_EXECUTION + secret).digest()[:_ID_BYTES])


def _check(secret: bytes, task_id: TaskId) -> bytes:
    return hashlib.sha256(_FOR_CHECK + task_id.bytes + secret).digest()[:_CHECK_BYTES]
