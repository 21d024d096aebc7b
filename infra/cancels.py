"""Cancel notices: which tasks a worker must look up before it starts them.

Invariant: a notice is acknowledged NOTICE_SPREAD_SECONDS before the CancelRequested that it announces is appended, and what a worker knows of the notices when
its Started is acknowledged is at most NOTICE_FRESH_SECONDS old. So a worker whose Started stands behind a CancelRequested in the lane knows the notice.
A notice decides nothing: the task's lane does (taskline.state.fold). What can't be known from notices alone, since they are kept for a day
and in bounded memory, counts as named.

The two times are part of what workers and cancellers of all versions agree on: neither may change without the other's old value in mind. They are differences
on one machine each, so no clocks are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from taskline.errors import UndecodableRecord, UnknownSchema
from taskline.infra.log import HEADER_TASK_ID, OutRecord
from taskline.infra.topics import CANCEL_NOTICES_MS, Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import CancelNotice
from taskline.schemas.ids import TaskId, created_at_ms, task_id_of

# At about 200 bytes each, this is 40 MB; a queue whose tasks are cancelled more often looks more of them up in the view.
MAX_NOTICES: Final = 200_000
# A worker asks where the notices end once in half of this while tasks run, instead of once for each task.
NOTICE_FRESH_SECONDS: Final = 0.05
# What a cancel takes longer for it. Twice as long: two clocks' paces differ by far less.
NOTICE_SPREAD_SECONDS: Final = 0.1
_ID_BYTES = 16
_UUID_VERSION = 7


def notice_record(notice: CancelNotice, *, queue: str, topics: Topics, codec: Codec) -> OutRecord:
    """The record of a notice on its queue's topic."""
    key = notice.task_id.bytes
    return OutRecord(
        topic=topics.cancels(queue), key=key, value=codec.encode(notice), headers={HEADER_TASK_ID: key}
    )


def read_notice(key: bytes | None, value: bytes | None, codec: Codec) -> CancelNotice | None:
    """The notice of a record; None: it names no task.

    A value that can't be read may be a newer Taskline's: its key names the task all the same, and to look one up too many does no harm.
    """
    try:
        return codec.decode(value, CancelNotice)
    except (UndecodableRecord, UnknownSchema):
        if key is None or len(key) != _ID_BYTES:
            return None
        return CancelNotice(task_id=task_id_of(key), abort=False)


class NoticeBook:
    """The notices that were read. Pure: the time comes in (ms since the epoch)."""

    def __init__(self, max_notices: int = MAX_NOTICES) -> None:
        """Keep at most `max_notices` of them, the newest."""
        self._max_notices = max_notices
        # The task's number → when its newest notice was appended, twice, plus one for an abort; oldest first.
        self._notices: dict[int, int] = {}
        # Tasks created until then may have had a notice that is not known any more.
        self._horizon_ms = 0

    def __len__(self) -> int:
        return len(self._notices)

    def take(self, notice: CancelNotice, at_ms: int) -> None:
        """Keep a notice that was appended at `at_ms`, by the broker's clock."""
        number = notice.task_id.int
        known = self._notices.pop(number, 0)
        self._notices[number] = 2 * at_ms + (notice.abort or known & 1)
        while len(self._notices) > self._max_notices or self._oldest_ms() <= at_ms - CANCEL_NOTICES_MS:
            forgotten = next(iter(self._notices))
            del self._notices[forgotten]
            self._horizon_ms = max(self._horizon_ms, created_at_ms(TaskId(int=forgotten)))

    def restart(self, now_ms: int) -> None:
        """The log was made anew, so that nothing is known of any task that exists."""
        self._notices.clear()
        self._horizon_ms = now_ms

    def names(self, task_id: TaskId, now_ms: int) -> bool:
        """Whether a task must be looked up: it has a notice, or may have had one that is not known here."""
        if task_id.int in self._notices:
            return True
        created_ms = created_at_ms(task_id)
        if created_ms > self._horizon_ms and created_ms > now_ms - CANCEL_NOTICES_MS // 2:
            return False
        # An id that Taskline can't have minted is nobody's to cancel, and in no view.
        return task_id.version == _UUID_VERSION

    def aborts(self, task_id: TaskId) -> bool:
        """Whether a running execution of the task is to be stopped."""
        return bool(self._notices.get(task_id.int, 0) & 1)

    def _oldest_ms(self) -> int:
        return next(iter(self._notices.values())) // 2


class CancelNotices(Protocol):
    """One queue's notices, as a worker follows them; used from one event loop."""

    async def start(self, on_abort: Callable[[TaskId], None]) -> None:
        """Read what is there, then follow.

        Args:
            on_abort: called for each notice, from then on, that asks for running executions of a task to be stopped.

        Raises:
            Unavailable: the log does not answer.
            WrongTopology: there is no such topic.
        """
        ...

    def expect(self) -> None:
        """`catch_up` will be called in a moment: begin what it may have to wait for."""
        ...

    async def catch_up(self) -> None:
        """Return when every notice is known that was acknowledged NOTICE_FRESH_SECONDS before the call; waits as long as it takes."""
        ...

    def names(self, task_id: TaskId) -> bool:
        """As `NoticeBook.names`, now."""
        ...

    def aborts(self, task_id: TaskId) -> bool:
        """As `NoticeBook.aborts`."""
        ...

    async def close(self) -> None:
        """Stop following."""
        ...
