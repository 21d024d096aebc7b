"""What follows an attempt that failed: another one, and when; a dead letter, and why; or nothing, since it is too late. Pure.

The rules, in their order:

1. A permanent failure is buried at once (`permanent`).
2. A death (`crash`) is buried as `poison` when it is the task's `worker.poison_deaths`-th, whatever its retries; or when the retries are used
   up and every attempt so far was a death. A task that also failed in other ways is `exhausted` then. A handler that was out of memory
   (`memory`) counts as a death: it depends on who asked for the last bytes, Python or a library in C, whether its process survives that.
3. An attempt beyond max_retries is buried (`exhausted`): 1 + max_retries attempts are made, never more.
4. So is one more server error in a row than the policy has patience for.
5. Else another attempt follows: exactly when the handler asked for it (`Retry(after=…)`); not before the time that a Retry-After
   named; else by the policy.
6. If that is later than start_by, the task has expired.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from taskline.errors import InvalidTaskType
from taskline.infra.tiers import MAX_DELAY_SECONDS
from taskline.schemas.events import ErrorCategory
from taskline.settings import MAX_RETRY_CAP_SECONDS

if TYPE_CHECKING:
    from taskline.workers.failure import Failure

EXHAUSTED: Final = "exhausted"
PERMANENT: Final = "permanent"
POISON: Final = "poison"
# Categories that are held against a task as deaths.
DEADLY: Final = frozenset({ErrorCategory.CRASH, ErrorCategory.MEMORY})

# Others' servers may ask for anything; a day later is another day, and nobody waits for a month because of a typing error.
MAX_RETRY_AFTER_SECONDS: Final = 86_400.0
# The random factor of a delay: so many tasks that failed together don't come back together.
JITTER_LOW: Final = 0.5
JITTER_SPAN: Final = 1.0
# How far a crowd that was told the same Retry-After is spread, as a share of it (and of the policy's cap, if that is less).
RETRY_AFTER_SPREAD: Final = 0.5
_MS = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """When another attempt follows: min(cap, base * multiplier^n) * random in [0.5, 1.5), n = retries made before.

    Raises:
        InvalidTaskType: a number that can't be.
    """

    # The wait before the first retry, before jitter.
    base_seconds: float = 10.0
    # By which each further wait is longer; 1: all are the same.
    multiplier: float = 10.0
    # The longest wait, before jitter.
    cap_seconds: float = 3_600.0
    # How many retries may follow one another when somebody else's server is broken; max_retries bounds them too.
    server_max_retries: int = 5

    def __post_init__(self) -> None:
        _check("base_seconds", self.base_seconds, 0.0, MAX_RETRY_CAP_SECONDS)
        _check("multiplier", self.multiplier, 1.0, math.inf)
        _check("cap_seconds", self.cap_seconds, 0.0, MAX_RETRY_CAP_SECONDS)
        if isinstance(self.server_max_retries, bool) or not isinstance(self.server_max_retries, int):
            raise InvalidTaskType(
                f"retry policy: server_max_retries {self.server_max_retries!r} is no whole number"
            )
        _check("server_max_retries", self.server_max_retries, 0, math.inf)

    def delay(self, retries: int, rng: random.Random) -> float:
        """Seconds to wait when `retries` were made before."""
        try:
            grown = self.base_seconds * self.multiplier**retries
        except OverflowError:
            grown = math.inf if self.base_seconds else 0.0
        return min(self.cap_seconds, grown) * (JITTER_LOW + JITTER_SPAN * rng.random())


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What a task has used up with the attempt that failed, and its bounds."""

    # The attempt that failed, from 1.
    attempt: int
    # As in the submission.
    max_retries: int
    start_by: int | None = None
    # How many processes it has killed that ran nothing else, or filled to their limit, this attempt's included.
    deaths: int = 0
    # How many attempts in a row ended with a server error, this one included.
    server_errors: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryAt:
    """Another attempt, not before `due_ms`."""

    due_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bury:
    """A dead letter."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Expire:
    """Too late for another attempt."""


Decision = RetryAt | Bury | Expire


def decide(
    failure: Failure,
    spent: Spent,
    policy: RetryPolicy,
    *,
    poison_deaths: int,
    now_ms: int,
    rng: random.Random,
) -> Decision:
    """What follows; the rules stand above.

    Args:
        failure: why the attempt failed.
        spent: what the task has used up.
        policy: of its type, or the worker's.
        poison_deaths: as worker.poison_deaths.
        now_ms: the time of the failure.
        rng: for the jitter.
    """
    if not failure.retryable or failure.category is ErrorCategory.PERMANENT:
        return Bury(reason=PERMANENT)
    exhausted = spent.attempt > spent.max_retries
    if failure.category in DEADLY and (
        spent.deaths >= poison_deaths or (exhausted and spent.deaths >= spent.attempt)
    ):
        return Bury(reason=POISON)
    if exhausted or (
        failure.category is ErrorCategory.SERVER and spent.server_errors > policy.server_max_retries
    ):
        return Bury(reason=EXHAUSTED)
    due_ms = now_ms + math.ceil(_wait(failure, spent, policy, rng) * _MS)
    if spent.start_by is not None and due_ms > spent.start_by:
        return Expire()
    return RetryAt(due_ms=due_ms)


def _wait(failure: Failure, spent: Spent, policy: RetryPolicy, rng: random.Random) -> float:
    asked = failure.retry_after_seconds
    if asked is None:
        return policy.delay(spent.attempt - 1, rng)
    if failure.exact:
        return min(max(asked, 0.0), float(MAX_DELAY_SECONDS))
    if not asked > 0:
        # "At once" from a server that has just refused: to obey would use up the retries in no time.
        return policy.delay(spent.attempt - 1, rng)
    asked = min(asked, MAX_RETRY_AFTER_SECONDS)
    return asked + min(asked, policy.cap_seconds) * RETRY_AFTER_SPREAD * rng.random()


def _check(name: str, value: float, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        bounds = f"from {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
        raise InvalidTaskType(f"retry policy: {name} {value!r} is not a number {bounds}")
    if math.isinf(value):
        raise InvalidTaskType(f"retry policy: {name} is not finite")
