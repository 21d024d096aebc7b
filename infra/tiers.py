"""The delay tiers: how long each holds, and where a record that is not due goes next. Pure.

A record in a tier of length T was put there because at least T remained, and it leaves T after its append. So a tier is first in,
first out, and its forwarder needs to look at its head only, however many wait behind it. The shortest tier alone also takes
what has less than its length left; what it holds is bounded by what is due within that time.

Each hop leaves less than twice the tier's length, so a delay takes about two hops per factor of ten of its length.

A delay of just a tier's length, which people like to choose, is a few ms short of it by the time that it gets there. It is taken all the same: a
record never stays beyond its due time, so at worst it waits behind one that came within those ms, for no longer than they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from taskline.infra.log import HEADER_DUE, HEADER_TARGET, OutRecord
from taskline.infra.topics import Topics
from taskline.settings import duration_ms

# What a submitter may ask for (design: any delay from 0.1 s to 365 d).
MIN_DELAY_SECONDS = 0.1
MAX_DELAY_SECONDS = 365 * 86_400
# How much a record may be short of a tier's length: from a submission to its second append takes some 5 ms, more on a busy machine. It
# is the lateness that this can cost, so it is a small part of a short tier.
SLACK_MS = 20
_SLACK_SHARE = 100


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Tier:
    """One delay topic."""

    duration_ms: int
    # As in the topic's name: 500ms, 1s, 20m, 7d.
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiers:
    """The declared tiers, shortest first."""

    tiers: tuple[Tier, ...]

    @classmethod
    def of(cls, names: Iterable[str]) -> Tiers:
        """Tiers from their names.

        Raises:
            ValueError: a name is no duration, or there is none.
        """
        tiers = tuple(sorted(tier_of(name) for name in names))
        if not tiers:
            raise ValueError("there is no delay tier")
        return cls(tiers=tiers)

    @property
    def shortest(self) -> Tier:
        """The one that also takes what has less than its length left."""
        return self.tiers[0]

    def next_stop(self, remaining_ms: int) -> Tier:
        """Where a record waits that is due in `remaining_ms` (above 0): the longest tier that is not too long, give or take SLACK_MS."""
        index = bisect_right(self.tiers, remaining_ms, key=_least_remaining_ms)
        return self.tiers[max(index - 1, 0)]


def _least_remaining_ms(tier: Tier) -> int:
    return tier.duration_ms - min(SLACK_MS, tier.duration_ms // _SLACK_SHARE)


def tier_of(name: str) -> Tier:
    """A tier from its name.

    Raises:
        ValueError: it is no duration.
    """
    return Tier(duration_ms=duration_ms(name), name=name)


def delayed(record: OutRecord, *, due_ms: int, now_ms: int, topics: Topics, tiers: Tiers) -> OutRecord:
    """`record`, made to reach its topic no earlier than `due_ms`: as it is when that has passed, else by way of a tier."""
    if due_ms <= now_ms:
        return record
    headers = {
        **record.headers,
        HEADER_DUE: b"%d" % due_ms,
        HEADER_TARGET: record.topic.encode(),
    }
    return OutRecord(
        topic=topics.delay(tiers.next_stop(due_ms - now_ms).name),
        key=record.key,
        value=record.value,
        headers=headers,
    )
