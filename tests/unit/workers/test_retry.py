from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskline.errors import InvalidTaskType
from taskline.infra.tiers import MAX_DELAY_SECONDS
from taskline.schemas.events import ErrorCategory
from taskline.settings import WorkerSettings
from taskline.workers import Registry, RetryPolicy, task
from taskline.workers.failure import Failure
from taskline.workers.outcome import ErrorInfo
from taskline.workers.retry import (
    EXHAUSTED,
    MAX_RETRY_AFTER_SECONDS,
    PERMANENT,
    POISON,
    Bury,
    Decision,
    Expire,
    RetryAt,
    Spent,
    decide,
)

NOW = 1_800_000_000_000
INFO = ErrorInfo(error_class="ValueError", message="no")
POLICY = RetryPolicy()

policies = st.builds(
    RetryPolicy,
    base_seconds=st.floats(0, 1e6),
    multiplier=st.floats(1, 1e9),
    cap_seconds=st.floats(0, 1e7),
    server_max_retries=st.integers(0, 20),
)
# Another attempt may help, and nothing but the budget decides.
ordinary = st.sampled_from(
    [ErrorCategory.TRANSIENT, ErrorCategory.RATE_LIMITED, ErrorCategory.TIMEOUT, ErrorCategory.UNKNOWN]
)


def failure(category: ErrorCategory = ErrorCategory.UNKNOWN, **values: Any) -> Failure:
    return Failure(info=INFO, category=category, **values)


def decided(fault: Failure, policy: RetryPolicy = POLICY, *, seed: int = 0, **spent: Any) -> Decision:
    values = {"attempt": 1, "max_retries": 3} | spent
    return decide(fault, Spent(**values), policy, poison_deaths=3, now_ms=NOW, rng=random.Random(seed))


# ---- the policy ------------------------------------------------------------------------------------------------


@given(policies, st.integers(0, 100), st.randoms(use_true_random=False))
def test_a_delay_is_the_capped_power_within_its_jitter(
    policy: RetryPolicy, retries: int, rng: random.Random
) -> None:
    try:
        nominal = min(policy.cap_seconds, policy.base_seconds * policy.multiplier**retries)
    except OverflowError:
        nominal = policy.cap_seconds if policy.base_seconds else 0.0
    delay = policy.delay(retries, rng)
    assert 0.5 * nominal <= delay
    assert delay < 1.5 * nominal or nominal == delay == 0 or math.isclose(delay, 1.5 * nominal)
    assert delay <= MAX_DELAY_SECONDS


@given(policies, st.integers(0, 100), st.integers())
def test_the_same_randomness_gives_the_same_delay(policy: RetryPolicy, retries: int, seed: int) -> None:
    assert policy.delay(retries, random.Random(seed)) == policy.delay(retries, random.Random(seed))


def test_the_defaults_are_ten_seconds_times_ten_up_to_an_hour_in_policy_and_settings() -> None:
    middle = random.Random()
    middle.random = lambda: 0.5  # type: ignore[method-assign]
    assert [POLICY.delay(n, middle) for n in range(5)] == [10, 100, 1_000, 3_600, 3_600]
    settings = WorkerSettings()
    assert (settings.retry_base_seconds, settings.retry_multiplier, settings.retry_cap_seconds) == (
        POLICY.base_seconds,
        POLICY.multiplier,
        POLICY.cap_seconds,
    )


def test_the_jitter_uses_its_whole_range() -> None:
    rng = random.Random(1)
    factors = [RetryPolicy(base_seconds=1, cap_seconds=1).delay(0, rng) for _ in range(2_000)]
    assert 0.5 <= min(factors) < 0.51
    assert 1.49 < max(factors) < 1.5
    assert sum(factors) / len(factors) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(
    "values",
    [
        {"base_seconds": -1},
        {"base_seconds": math.nan},
        {"base_seconds": math.inf},
        {"base_seconds": "10"},
        {"base_seconds": True},
        {"multiplier": 0.5},
        {"multiplier": math.inf},
        {"cap_seconds": -1},
        {"cap_seconds": MAX_DELAY_SECONDS},
        {"server_max_retries": -1},
        {"server_max_retries": 1.5},
    ],
)
def test_a_policy_that_can_not_be_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidTaskType, match=next(iter(values))):
        RetryPolicy(**values)


# ---- how many attempts -----------------------------------------------------------------------------------------


@given(ordinary, st.integers(0, 100), policies)
def test_exactly_one_and_max_retries_attempts_are_made(
    category: ErrorCategory, max_retries: int, policy: RetryPolicy
) -> None:
    attempt = 1
    while isinstance(decided(failure(category), policy, attempt=attempt, max_retries=max_retries), RetryAt):
        attempt += 1
    last = decided(failure(category), policy, attempt=attempt, max_retries=max_retries)
    assert last == Bury(reason=EXHAUSTED)
    assert attempt == 1 + max_retries


@given(st.integers(1, 100), st.integers(0, 100))
def test_what_is_permanent_is_buried_at_once(attempt: int, max_retries: int) -> None:
    buried = Bury(reason=PERMANENT)
    spent = {"attempt": attempt, "max_retries": max_retries}
    assert decided(failure(ErrorCategory.PERMANENT, retryable=False), **spent) == buried
    assert decided(failure(ErrorCategory.UNKNOWN, retryable=False), **spent) == buried
    assert decided(failure(ErrorCategory.PERMANENT), **spent) == buried


def test_server_errors_in_a_row_are_limited_by_the_policy() -> None:
    policy, fault = RetryPolicy(server_max_retries=2), failure(ErrorCategory.SERVER)
    for row in (1, 2):
        assert isinstance(decided(fault, policy, attempt=5, max_retries=9, server_errors=row), RetryAt)
    assert decided(fault, policy, attempt=5, max_retries=9, server_errors=3) == Bury(reason=EXHAUSTED)
    # Another kind of error is not held against it.
    assert isinstance(decided(failure(), policy, attempt=5, max_retries=9), RetryAt)


# ---- deaths ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "max_retries", "deaths", "expected"),
    [
        # The budget is spent by deaths alone.
        (1, 0, 1, POISON),
        (2, 1, 2, POISON),
        # By deaths and other failures.
        (2, 1, 1, EXHAUSTED),
        (4, 3, 2, EXHAUSTED),
        # The limit of deaths, whatever is left.
        (3, 100, 3, POISON),
        (9, 100, 3, POISON),
        (9, 100, 4, POISON),
        # Neither.
        (1, 1, 1, None),
        (2, 100, 2, None),
        (50, 100, 2, None),
    ],
)
@pytest.mark.parametrize("category", [ErrorCategory.CRASH, ErrorCategory.MEMORY])
def test_deaths_are_poison_at_their_limit_or_when_nothing_else_was_seen(
    category: ErrorCategory, attempt: int, max_retries: int, deaths: int, expected: str | None
) -> None:
    decision = decided(failure(category), attempt=attempt, max_retries=max_retries, deaths=deaths)
    if expected is None:
        assert isinstance(decision, RetryAt)
    else:
        assert decision == Bury(reason=expected)


def test_an_ordinary_failure_after_deaths_is_not_poison() -> None:
    assert isinstance(decided(failure(), attempt=3, max_retries=5, deaths=2), RetryAt)
    assert decided(failure(), attempt=3, max_retries=2, deaths=2) == Bury(reason=EXHAUSTED)


# ---- at decoration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"timeout": 5, "soft_timeout": 5}, "not below the timeout"),
        ({"timeout": 5, "soft_timeout": 6}, "not below the timeout"),
        ({"soft_timeout": 0}, "no time to run"),
        ({"soft_timeout": math.nan}, "no time to run"),
        ({"retry": 3}, "no RetryPolicy"),
        ({"classify": "permanent"}, "can't be called"),
    ],
)
def test_what_can_not_be_is_refused_where_the_task_is_declared(options: dict[str, Any], match: str) -> None:
    for declare in (task, Registry().task):
        with pytest.raises(InvalidTaskType, match=match):

            @declare("x", **options)
            async def handler(payload: Any) -> None: ...


def test_a_task_carries_how_its_attempts_are_run_and_judged() -> None:
    def judge(error: BaseException) -> None: ...

    registry = Registry()
    for declare in (task, registry.task):

        @declare("x", timeout=5, soft_timeout=4, retry=POLICY, classify=judge)
        async def handler(payload: Any) -> None: ...

        conduct = handler.conduct
        assert (conduct.soft_timeout, conduct.retry, conduct.classify) == (4, POLICY, judge)

    @task("y", soft_timeout=1_000)
    async def without_a_hard_limit_of_its_own(payload: Any) -> None: ...

    assert without_a_hard_limit_of_its_own.conduct.soft_timeout == 1_000


# ---- when ------------------------------------------------------------------------------------------------------


def seconds(decision: Decision) -> float:
    assert isinstance(decision, RetryAt)
    return (decision.due_ms - NOW) / 1_000


@given(st.integers(1, 3), st.integers())
def test_a_retry_is_due_after_the_policys_delay(attempt: int, seed: int) -> None:
    waited = seconds(decided(failure(), attempt=attempt, seed=seed))
    nominal = min(3_600, 10 * 10 ** (attempt - 1))
    assert 0.5 * nominal <= waited <= 1.5 * nominal


@given(st.floats(0, MAX_DELAY_SECONDS), st.integers())
def test_what_a_handler_asks_for_is_kept_to_exactly(after: float, seed: int) -> None:
    fault = failure(ErrorCategory.RATE_LIMITED, retry_after_seconds=after, exact=True)
    assert seconds(decided(fault, seed=seed)) == math.ceil(after * 1_000) / 1_000


def test_what_a_handler_asks_for_counts_as_a_retry_and_is_bounded() -> None:
    fault = failure(ErrorCategory.RATE_LIMITED, retry_after_seconds=1.0, exact=True)
    assert decided(fault, attempt=4, max_retries=3) == Bury(reason=EXHAUSTED)
    for_ever = failure(ErrorCategory.RATE_LIMITED, retry_after_seconds=1e12, exact=True)
    assert seconds(decided(for_ever)) == MAX_DELAY_SECONDS


@given(
    st.sampled_from([ErrorCategory.RATE_LIMITED, ErrorCategory.SERVER]), st.floats(0.001, 1e9), st.integers()
)
def test_a_retry_after_is_never_undercut_and_spreads_the_crowd(
    category: ErrorCategory, after: float, seed: int
) -> None:
    waited = seconds(decided(failure(category, retry_after_seconds=after), seed=seed))
    asked = min(after, MAX_RETRY_AFTER_SECONDS)
    assert asked <= waited <= asked + 0.5 * min(asked, POLICY.cap_seconds) + 0.001


def test_a_crowd_that_was_told_the_same_does_not_return_together() -> None:
    fault = failure(ErrorCategory.RATE_LIMITED, retry_after_seconds=60)
    assert len({seconds(decided(fault, seed=seed)) for seed in range(50)}) > 45


def test_a_retry_after_of_nothing_does_not_use_up_the_retries_in_no_time() -> None:
    assert seconds(decided(failure(ErrorCategory.RATE_LIMITED, retry_after_seconds=0.0))) >= 5


@given(st.integers(-10_000, 200_000), st.integers())
def test_a_retry_that_would_come_after_start_by_expires(margin_ms: int, seed: int) -> None:
    free = decided(failure(), attempt=2, seed=seed)
    bounded = decided(failure(), attempt=2, seed=seed, start_by=NOW + margin_ms)
    assert isinstance(free, RetryAt)
    assert bounded == (Expire() if free.due_ms > NOW + margin_ms else free)


def test_a_dead_letter_goes_before_an_expiry() -> None:
    late = NOW - 1
    assert decided(failure(), attempt=4, start_by=late) == Bury(reason=EXHAUSTED)
    assert decided(failure(ErrorCategory.PERMANENT), start_by=late) == Bury(reason=PERMANENT)
