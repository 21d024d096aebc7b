"""What becomes of a record in a delay topic: it waits, goes on to another tier, reaches its target, or is refused. Pure.

Invariants:
- A record reaches its target when the forwarder's clock has passed its due time, and never before.
- It stays in a tier of length T until T has passed since its append, or until it is due, whichever comes first. `tasks.scheduled`
  is a tier of length 0.
- A hop changes the topic and nothing else: key, value and headers are the same, so nothing grows however long a record waits. On
  delivery `taskline-target` is taken off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from taskline.infra.log import HEADER_DUE, HEADER_TARGET, InRecord, OutRecord, verbatim_dead_letter
from taskline.infra.tiers import Tier, Tiers
from taskline.infra.topics import Topics
from taskline.schemas.events import Priority

# A record that goes back into the tier that it came from has waited there, unless the broker's clock is behind this one's: then its
# wait looks over as soon as it begins, and it would go round at full speed. It stays this long in any case.
SAME_TIER_PAUSE_MS = 100
# Milliseconds since the epoch have 13 digits until the year 2286.
_MAX_DUE_DIGITS = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One delay topic, as the place where records wait."""

    topic: str
    # For metrics and logs: the tier's length, or "scheduled".
    name: str
    # How long a record stays, in ms; 0: it goes on at once.
    length_ms: int
    # True: records leave in the order in which they are due; False: in that of their appends, which is then the same order.
    near: bool = False


class Held:
    """A record that waits in memory. Not a dataclass: there are thousands, and each is looked at once per hop."""

    __slots__ = ("cause", "due_ms", "record", "size", "target", "until_ms")

    def __init__(
        self, record: InRecord, until_ms: int, due_ms: int = 0, target: str = "", cause: str | None = None
    ) -> None:
        """A record that leaves its stage at `until_ms`; `cause`: why it goes to the dead letters (None: it does not)."""
        self.record = record
        self.until_ms = until_ms
        self.due_ms = due_ms
        self.target = target
        self.cause = cause
        self.size = len(record.value or b"") + len(record.key or b"")


class Router:
    """The rules for one topology."""

    def __init__(self, topics: Topics, tiers: Tiers, queues: Iterable[str]) -> None:
        """Route to the dispatch topics of `queues`, and to their topic of lease guards, by way of `tiers`."""
        self._dlq = topics.dlq
        self._tiers = tiers
        self._tier_topics = {tier: topics.delay(tier.name) for tier in tiers.tiers}
        self._targets = frozenset(
            topic
            for queue in queues
            for topic in (
                topics.leases(queue),
                *(topics.dispatch(queue, priority) for priority in Priority),
            )
        )
        self._names = topics

    def scheduled(self) -> Stage:
        """The stage of submissions that are not in a tier yet."""
        return Stage(topic=self._names.scheduled, name="scheduled", length_ms=0)

    def stage(self, tier: Tier) -> Stage:
        """The stage of a tier, declared or retired."""
        return Stage(
            topic=self._names.delay(tier.name),
            name=tier.name,
            length_ms=tier.duration_ms,
            # The shortest one also takes what is due sooner than its length. A retired one that is as short may have done so.
            near=tier.duration_ms <= self._tiers.shortest.duration_ms,
        )

    def admit(self, record: InRecord, stage: Stage, now_ms: int) -> Held:
        """Read a record's headers and decide how long it stays in its stage; one that can't be routed stays no longer."""
        headers = record.headers
        due = headers.get(HEADER_DUE)
        if not due:
            return Held(record, now_ms, cause=f"no {HEADER_DUE} header")
        # isdigit() of bytes knows ASCII digits only.
        if not due.isdigit() or len(due) > _MAX_DUE_DIGITS:
            return Held(
                record, now_ms, cause=f"{HEADER_DUE} is no time in ms: {due[: 2 * _MAX_DUE_DIGITS]!r}"
            )
        raw = headers.get(HEADER_TARGET)
        if not raw:
            return Held(record, now_ms, cause=f"no {HEADER_TARGET} header")
        target = raw.decode("utf-8", "replace")
        if target not in self._targets:
            return Held(
                record, now_ms, cause=f"{HEADER_TARGET} is no dispatch topic of a declared queue: {target}"
            )
        due_ms = int(due)
        return Held(record, self._until(record, stage, due_ms, now_ms), due_ms, target)

    def release(self, held: Held, now_ms: int) -> OutRecord:
        """Where a record goes when it leaves its stage."""
        record = held.record
        if held.cause is not None:
            return self._dead_letter(record, held.cause)
        remaining_ms = held.due_ms - now_ms
        if remaining_ms > 0:
            topic = self._tier_topics[self._tiers.next_stop(remaining_ms)]
            return OutRecord(topic=topic, key=record.key, value=record.value, headers=record.headers)
        headers = {name: value for name, value in record.headers.items() if name != HEADER_TARGET}
        return OutRecord(topic=held.target, key=record.key, value=record.value, headers=headers)

    def _dead_letter(self, record: InRecord, cause: str) -> OutRecord:
        return verbatim_dead_letter(
            self._dlq,
            value=record.value,
            key=record.key,
            headers=record.headers,
            source=record.position,
            cause=cause,
        )

    def _until(self, record: InRecord, stage: Stage, due_ms: int, now_ms: int) -> int:
        # Nothing was appended after it was read, whatever the broker's clock says: one that is fast would keep the record, and all
        # behind it, for too long.
        entered = min(record.timestamp_ms, now_ms)
        length = stage.length_ms
        if stage.near and due_ms <= now_ms + 2 * length:
            # It would come back to this same stage for the rest of its time.
            return due_ms
        until = entered + length
        if length and due_ms > until <= now_ms + SAME_TIER_PAUSE_MS:
            next_stop = self._tiers.next_stop(max(due_ms - max(until, now_ms), 1))
            if next_stop.duration_ms == length:
                until = max(until, now_ms + min(length, SAME_TIER_PAUSE_MS))
        return min(until, due_ms)
