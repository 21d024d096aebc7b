"""What this process knows of API keys, so that a request costs no question to Cassandra.

Invariant: while Cassandra answers, what a key may do is at most `fresh_seconds` old, so a revocation is in force everywhere by then. While it does
not, what was read before stays good for `stale_seconds` in all, and a key that was never read lets nobody in.

Guesses are cheap to refuse. A wrong secret for a known prefix needs no look-up, an unknown prefix is remembered as unknown, both memories
are bounded, and so are the look-ups under way: beyond them what is not known already has to come again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from taskline.errors import Unavailable
from taskline.state.keys import ApiKey, KeyReader

log = structlog.get_logger(__name__)

# Entries of about 500 bytes each. Known prefixes are as many as there are keys; the unknown ones are somebody's guesses.
MAX_KNOWN = 10_000
MAX_UNKNOWN = 10_000
# Look-ups under way at once; a read takes a millisecond or two, so more than these means guessing, or a Cassandra that hangs.
MAX_READS = 64
# How long a request waits for a key to be read again before it goes on with what was read before.
PATIENCE_SECONDS = 0.25
# After a failed look-up the next one of that key; until then what is known has to do.
RETRY_SECONDS = 1.0

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class _Known:
    key: ApiKey
    read_at: float
    # Not asked for again before this, after a failure.
    ask_after: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    task: asyncio.Task[ApiKey | None]
    began_at: float


class KeyCache:
    """Keys by prefix, read through."""

    def __init__(
        self,
        source: KeyReader,
        *,
        fresh_seconds: float,
        stale_seconds: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read from `source`; `now` gives seconds of any clock that only goes forward."""
        self._source = source
        self._fresh = fresh_seconds
        self._stale = max(stale_seconds, fresh_seconds)
        self._now = now
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._reads: dict[str, _Read] = {}

    def fresh(self, prefix: str) -> ApiKey | None:
        """The key, if it is known and was read lately; None says nothing."""
        entry = self._known.get(prefix)
        if entry is None or self._now() - entry.read_at > self._fresh:
            return None
        return entry.key

    async def find(self, prefix: str) -> ApiKey | None:
        """The key, read if need be; None: there is no such key.

        Raises:
            Unavailable: it is not known, and can't be looked up now.
        """
        now = self._now()
        unknown_since = self._unknown.get(prefix)
        if unknown_since is not None and now - unknown_since <= self._fresh:
            self._unknown.move_to_end(prefix)
            return None
        entry = self._known.get(prefix)
        if entry is not None:
            self._known.move_to_end(prefix)
            age = now - entry.read_at
            if age <= self._fresh:
                return entry.key
            if age <= self._stale:
                return await self._refreshed(prefix, entry, now)
        return await asyncio.shield(self._read(prefix, now).task)

    async def _refreshed(self, prefix: str, entry: _Known, now: float) -> ApiKey | None:
        """What the source says within a moment, or what it said before."""
        if now < entry.ask_after:
            return entry.key
        try:
            read = self._read(prefix, now)
            patience = PATIENCE_SECONDS - (now - read.began_at)
            if patience > 0:
                await asyncio.wait((read.task,), timeout=patience)
            if not read.task.done():
                return entry.key
            return read.task.result()
        except Unavailable:
            return entry.key

    def _read(self, prefix: str, now: float) -> _Read:
        """The look-up of this prefix that is under way, or a new one."""
        read = self._reads.get(prefix)
        if read is None:
            if len(self._reads) >= MAX_READS:
                raise Unavailable(f"{MAX_READS} API keys are being looked up already")
            task = asyncio.create_task(self._ask(prefix), name="read-key")
            # Who asked may have left by the time it fails.
            task.add_done_callback(_seen)
            read = self._reads[prefix] = _Read(task=task, began_at=now)
        return read

    async def _ask(self, prefix: str) -> ApiKey | None:
        try:
            key = await self._source.find(prefix)
        except Unavailable as error:
            entry = self._known.get(prefix)
            if entry is not None:
                entry.ask_after = self._now() + RETRY_SECONDS
                log.warning("key not read again", key=prefix, error=str(error))
            raise
        finally:
            del self._reads[prefix]
        if key is None:
            self._known.pop(prefix, None)
            _put(self._unknown, prefix, self._now(), MAX_UNKNOWN)
        else:
            self._unknown.pop(prefix, None)
            _put(self._known, prefix, _Known(key=key, read_at=self._now()), MAX_KNOWN)
        return key


def _put(entries: OrderedDict[str, T], prefix: str, value: T, most: int) -> None:
    """Remember an entry as the youngest, and forget the oldest beyond the bound."""
    entries[prefix] = value
    entries.move_to_end(prefix)
    if len(entries) > most:
        entries.popitem(last=False)


def _seen(task: asyncio.Task[ApiKey | None]) -> None:
    if not task.cancelled():
        task.exception()
