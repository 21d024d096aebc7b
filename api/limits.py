"""How much a tenant and a key may do in a time, counted by the `limits` library in memory or in a Redis that all processes share.

Invariant: a request that is refused uses nothing up, so a caller who hammers at one limit does not lose the others; what is let through is
counted against all of them. The check never holds a request for longer than `api.rate_limit_timeout_ms`. When the counters don't answer,
requests pass uncounted: the limits keep tenants from crowding each other out, and a Redis that is away must not turn
that precaution into an outage of everything. A warning and a metric tell of it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from limits import RateLimitItem, parse_many
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from limits.errors import ConfigurationError
from prometheus_client import Counter

from taskline.api.limits_window import Standing, Window, policy_field, standing_field, whole_seconds
from taskline.api.metrics import ApiMetrics
from taskline.api.problems import INVALID_FIELDS, RATE_LIMITED, ProblemError
from taskline.errors import InvalidSettings, MissingExtra
from taskline.settings import ApiSettings

log = structlog.get_logger(__name__)

# The kinds of requests that are counted apart.
SUBMISSIONS = "submissions"
READS = "reads"
# Whose use is counted.
_TENANT, _KEY = "tenant", "key"
# After a failure the counters are left alone for so long: a Redis that hangs must not cost every request the whole time-out.
PAUSE_SECONDS = 1.0
# Connections to Redis: enough for some ten thousand checks a second, few enough to be made anew in no time after a failure. A check that
# finds all in use waits, within its time-out.
_CONNECTIONS = 16
_KEY_PREFIX = "taskline"
_REDIS_SCHEMES = ("redis", "rediss", "redis+unix")

T = TypeVar("T")

Header = tuple[bytes, bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Charged:
    """What came of a charge."""

    # For the answer, whatever it is.
    headers: tuple[Header, ...] = ()
    refusal: ProblemError | None = None


_FREE = Charged()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    name: str
    # Whose use is counted: a tenant's or a key's.
    per: str
    item: RateLimitItem


@dataclass(frozen=True, kw_only=True, slots=True)
class _Applied:
    """The rules of one kind of request, and the header that tells of them."""

    rules: tuple[_Rule, ...]
    policy_header: Header

    @classmethod
    def of(cls, rules: Sequence[_Rule]) -> _Applied:
        told = policy_field((rule.name, rule.item.amount, rule.item.get_expiry()) for rule in rules)
        return cls(rules=tuple(rules), policy_header=(b"ratelimit-policy", told))


class RateLimits:
    """The limits of one process's API."""

    def __init__(
        self,
        rules: Mapping[str, Sequence[_Rule]],
        storage: MemoryStorage | RedisStorage,
        *,
        timeout_ms: float,
        metrics: ApiMetrics,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Count in `storage`; use `of` to make one from settings."""
        self._applied = {
            (kind, with_key): _Applied.of([rule for rule in each if with_key or rule.per == _TENANT])
            for kind, each in rules.items()
            for with_key in (False, True)
        }
        self._storage = storage
        self._limiter = SlidingWindowCounterRateLimiter(storage)
        self._in_memory = isinstance(storage, MemoryStorage)
        self._timeout = timeout_ms / 1000
        self._now = now
        self._ask_after = 0.0
        self._limited = Counter(
            "taskline_api_rate_limited",
            "Requests refused with 429, by the limit that refused them.",
            ["policy"],
            registry=metrics.registry,
        )
        self._uncounted = Counter(
            "taskline_api_rate_limit_uncounted",
            "Requests that passed uncounted because the counters did not answer.",
            registry=metrics.registry,
        )

    @classmethod
    def of(cls, api: ApiSettings, metrics: ApiMetrics) -> RateLimits | None:
        """The limits that the settings ask for; None: none.

        Raises:
            InvalidSettings: a limit or the storage can't be read.
            MissingExtra: the storage is a Redis, and its client is not installed.
        """
        rules = {
            SUBMISSIONS: (
                *_rules(SUBMISSIONS, _TENANT, api.rate_limit_submissions_per_tenant),
                *_rules(SUBMISSIONS, _KEY, api.rate_limit_submissions_per_key),
            ),
            READS: (
                *_rules(READS, _TENANT, api.rate_limit_reads_per_tenant),
                *_rules(READS, _KEY, api.rate_limit_reads_per_key),
            ),
        }
        if not any(rules.values()):
            return None
        storage = _storage(api.rate_limit_storage.get_secret_value(), api.rate_limit_timeout_ms / 1000)
        return cls(rules, storage, timeout_ms=api.rate_limit_timeout_ms, metrics=metrics)

    async def close(self) -> None:
        """Close the connections to Redis."""
        if isinstance(self._storage, RedisStorage):
            await self._storage.bridge.get_connection().connection_pool.disconnect()  # type: ignore[attr-defined]  # typed for all clients

    async def charge(self, kind: str, tenant: str, key: str | None, cost: int) -> Charged:
        """Count `cost` of this kind for the tenant and the key (its prefix; None: there is none), or refuse it."""
        applied = self._applied[kind, key is not None]
        if not applied.rules:
            return _FREE
        for rule in applied.rules:
            if cost > rule.item.amount:
                return Charged(refusal=_never_fits(rule, cost))
        if self._now() < self._ask_after:
            self._uncounted.inc()
            return _FREE
        whose = {_TENANT: tenant, _KEY: key or ""}
        try:
            async with asyncio.timeout(self._timeout):
                return await self._counted(applied, kind, whose, cost)
        except Exception as error:
            # Whatever went wrong with the counting, it is no reason to refuse work.
            self._uncounted.inc()
            now = self._now()
            if now >= self._ask_after:
                # Said once of all that were waiting.
                self._ask_after = now + PAUSE_SECONDS
                log.warning("rate limits are not counted", error=f"{type(error).__name__}: {error}")
            return _FREE

    async def _counted(self, applied: _Applied, kind: str, whose: Mapping[str, str], cost: int) -> Charged:
        rules = applied.rules
        windows = await self._each([self._window(rule, kind, whose[rule.per]) for rule in rules])
        refused = [
            rule
            for rule, window in zip(rules, windows, strict=True)
            if window.remaining(rule.item.amount) < cost
        ]
        if not refused:
            hits = await self._each(
                [self._limiter.hit(rule.item, kind, rule.per, whose[rule.per], cost=cost) for rule in rules]
            )
            # Others may have been faster between the two steps.
            refused = [rule for rule, hit in zip(rules, hits, strict=True) if not hit]
        if not refused:
            windows = [window.after(cost) for window in windows]
        waits = {
            rule.name: whole_seconds(window.wait(rule.item.amount, cost))
            for rule, window in zip(rules, windows, strict=True)
            if rule in refused
        }
        standings = [
            Standing(
                policy=rule.name,
                remaining=window.remaining(rule.item.amount),
                seconds=waits.get(rule.name) or math.ceil(window.full_again()),
            )
            for rule, window in zip(rules, windows, strict=True)
        ]
        headers = (applied.policy_header, (b"ratelimit", standing_field(standings)))
        if not waits:
            return Charged(headers=headers)
        for name in waits:
            self._limited.labels(name).inc()
        return Charged(headers=headers, refusal=_too_many(refused, max(waits.values()), cost))

    async def _window(self, rule: _Rule, kind: str, who: str) -> Window:
        length = rule.item.get_expiry()
        previous, previous_left, current, current_left = await self._storage.get_sliding_window(
            rule.item.key_for(kind, rule.per, who), length
        )
        return Window(
            length=length,
            previous=previous,
            previous_left=previous_left,
            current=current,
            current_left=current_left,
        )

    async def _each(self, steps: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """All of them: at once over a network, one by one in memory, where a task of its own costs more than the step."""
        if self._in_memory or len(steps) == 1:
            return [await step for step in steps]
        return await asyncio.gather(*steps)


def _rules(kind: str, per: str, limits: str | None) -> tuple[_Rule, ...]:
    """The limits of a setting, shortest window first."""
    if limits is None:
        return ()
    setting = f"api.rate_limit_{kind}_per_{per}"
    try:
        items = sorted(parse_many(limits), key=lambda item: item.get_expiry())
    except ValueError as error:
        raise InvalidSettings(
            f"{setting}: {limits!r} is no list of limits such as '100/second; 5000/minute'"
        ) from error
    windows = [item.get_expiry() for item in items]
    if len(set(windows)) < len(windows):
        raise InvalidSettings(f"{setting}: two limits for the same time; the lower one is enough")
    if any(item.amount < 1 for item in items):
        raise InvalidSettings(f"{setting}: a limit of 0 would refuse everything; give keys without the scope")
    return tuple(_Rule(name=f"{kind}-{per}-{item.get_expiry()}s", per=per, item=item) for item in items)


def _storage(url: str, timeout_seconds: float) -> MemoryStorage | RedisStorage:
    scheme, _, _ = url.partition("://")
    if url == "memory://":
        return MemoryStorage()
    if scheme not in _REDIS_SCHEMES:
        raise InvalidSettings(
            f"api.rate_limit_storage: its scheme is none of memory, {', '.join(_REDIS_SCHEMES)}"
        )
    try:
        from redis.asyncio import BlockingConnectionPool  # noqa: PLC0415 - of an extra of its own
        from redis.asyncio.retry import Retry  # noqa: PLC0415
        from redis.backoff import NoBackoff  # noqa: PLC0415

        pool = BlockingConnectionPool.from_url(
            url.replace("redis+unix:", "unix:", 1),
            max_connections=_CONNECTIONS,
            timeout=timeout_seconds,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            # Once, at once: a connection of the pool may have been closed by the other side.
            retry=Retry(NoBackoff(), 1),
        )
        return RedisStorage(
            f"async+{url}",
            implementation="redispy",
            key_prefix=_KEY_PREFIX,
            connection_pool=pool,  # type: ignore[arg-type]  # passed on to the client
        )
    except (ConfigurationError, ModuleNotFoundError) as error:
        raise MissingExtra("redis", "redis") from error
    except ValueError as error:
        raise InvalidSettings(f"api.rate_limit_storage: {error}") from error


def _too_many(refused: Sequence[_Rule], seconds: int, cost: int) -> ProblemError:
    limits = " and ".join(f"{rule.item.amount} per {rule.item.get_expiry()} s" for rule in refused)
    return ProblemError(
        RATE_LIMITED,
        f"{cost} more would be over {limits}; try again in {seconds} s",
        members={"violated-policies": [rule.name for rule in refused]},
        headers={"retry-after": str(seconds)},
    )


def _never_fits(rule: _Rule, cost: int) -> ProblemError:
    detail = f"{cost} at once are over the limit of {rule.item.amount} per {rule.item.get_expiry()} s whenever they come: send fewer"
    return ProblemError(INVALID_FIELDS, detail, members={"errors": [{"pointer": "", "detail": detail}]})
