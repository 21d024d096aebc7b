"""What happened in a run: a digest of everything, and the last of it in words."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from taskline.errors import TasklineError
from taskline.infra.intake import Commit, TopicPartition
from taskline.infra.log import InRecord, OutRecord, Position
from taskline.schemas.codec import Codec
from taskline.schemas.events import DeadLetter, LifecycleBatch, LifecycleEvent
from taskline.testing.process import current_process

KEPT = 4_000
_codec = Codec()


class Trace:
    """Lines with the virtual time and the process; the digest is that of all."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._digest = hashlib.blake2b(digest_size=16)
        self._lines: deque[tuple[float, str, str, str | OutRecord]] = deque(maxlen=KEPT)
        # How often each kind of thing happened, over the run.
        self.seen: Counter[str] = Counter()

    def note(self, kind: str, words: str = "") -> None:
        self._keep(kind, words, words)

    def appended(self, position: Position, record: OutRecord) -> None:
        words = f"{position.topic}/{position.partition}@{position.offset}"
        self._digest.update(record.value or b"")
        self._digest.update(repr(sorted(record.headers.items())).encode())
        self._keep("append", words, record, words)

    def fetched(self, group: str, records: Sequence[InRecord]) -> None:
        first = records[0].position
        self._keep("fetch", f"{group} {len(records)} from {first.topic}/{first.partition}@{first.offset}")

    def committed(self, group: str, commits: Mapping[TopicPartition, Commit]) -> None:
        places = " ".join(
            f"{key.topic}/{key.partition}@{commit.offset}{'+holes' if commit.metadata else ''}"
            for key, commit in commits.items()
        )
        self._keep("commit", f"{group} {places}")

    def digest(self) -> str:
        return self._digest.hexdigest()

    def tail(self, count: int, about: str | None = None) -> list[str]:
        """The last lines; `about`: only those with this in them."""
        lines = []
        for at, process, kind, what in self._lines:
            words = what if isinstance(what, str) else _told(what)
            line = f"{at:10.4f} {process:22} {kind:10} {words}"
            if about is None or about in line:
                lines.append(line)
        return lines[-count:] if count else []

    def _keep(self, kind: str, words: str, what: str | OutRecord = "", place: str = "") -> None:
        process = current_process()
        name = "-" if process is None else process.name
        self.seen[kind] += 1
        self._digest.update(f"{self._now():.6f} {name} {kind} {words}".encode())
        if isinstance(what, OutRecord):
            self._lines.append((self._now(), name, f"{kind} {place}", what))
        else:
            self._lines.append((self._now(), name, kind, words))


def _told(record: OutRecord) -> str:
    headers = " ".join(
        f"{name.removeprefix('taskline-')}={value.decode(errors='replace')[:40] if value[:16].isascii() else value.hex()}"
        for name, value in record.headers.items()
        if "trail" not in name
    )
    try:
        if record.topic.endswith("lifecycle"):
            batch = _codec.decode(record.value, LifecycleBatch)
            return "; ".join(_event(_codec.decode(entry.event, LifecycleEvent)) for entry in batch.events)
        if record.topic.endswith("dlq"):
            letter = _codec.decode(record.value, DeadLetter)
            return f"{letter.task_id} {letter.reason} attempt {letter.attempt}"
    except TasklineError as error:
        return f"{headers} ({error})"
    return headers


def _event(event: LifecycleEvent) -> str:
    execution = getattr(event, "execution", None)
    place = ""
    if hasattr(event, "source_topic"):
        place = f" of {event.source_topic}/{event.source_partition}@{event.source_offset}"
    due = f" due {event.due}" if hasattr(event, "due") else ""
    return (
        f"{event.task_id} {type(event).__name__} attempt {event.attempt}"
        f"{'' if execution is None else f' run {str(execution)[:8]}'}{place}{due}"
    )
