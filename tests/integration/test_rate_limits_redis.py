"""Rate limits that several processes count together, in a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_kit import NOW_MS, Api, slug
from redis_server import RedisServer, running_redis

from taskline.api.limits import PAUSE_SECONDS, READS, SUBMISSIONS, Charged, RateLimits
from taskline.api.metrics import ApiMetrics
from taskline.settings import ApiSettings
from taskline.state.keys import Scope, mint
from taskline.state.keys_memory import MemoryKeys

TIMEOUT_MS = 250.0
# Of a machine that is busy with other things; without the time-out it would be for ever.
SLACK_SECONDS = 2.0
UNCOUNTED = "taskline_api_rate_limit_uncounted_total"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as server:
        yield server


class Process:
    """One process's limits, as the API makes them."""

    def __init__(self, redis: RedisServer, **settings: Any) -> None:
        self.metrics = ApiMetrics()
        made = RateLimits.of(
            ApiSettings(rate_limit_storage=redis.url, **{"rate_limit_timeout_ms": TIMEOUT_MS} | settings),
            self.metrics,
        )
        assert made is not None
        self.limits = made

    async def charge(self, cost: int = 1, *, tenant: str = "acme", key: str | None = "k") -> Charged:
        return await self.limits.charge(SUBMISSIONS, tenant, key, cost)

    def uncounted(self) -> float:
        return self.metrics.registry.get_sample_value(UNCOUNTED) or 0.0


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await body()

    asyncio.run(bounded())


def test_two_processes_let_through_what_one_may(redis: RedisServer) -> None:
    async def body() -> None:
        processes = [
            Process(redis, rate_limit_submissions_per_tenant="100/day", rate_limit_timeout_ms=10_000)
            for _ in range(2)
        ]
        charged = await asyncio.gather(*(processes[turn % 2].charge() for turn in range(150)))
        assert sum(each.refusal is None for each in charged) == 100
        other = await processes[0].charge(tenant="else")
        assert other.refusal is None
        assert [each.uncounted() for each in processes] == [0, 0]
        for each in processes:
            await each.limits.close()

    run(body)


def test_a_batch_is_counted_whole_or_not_at_all(redis: RedisServer) -> None:
    async def body() -> None:
        process = Process(
            redis, rate_limit_submissions_per_tenant="10/day", rate_limit_submissions_per_key="8/day"
        )
        outcomes = [(await process.charge(cost)).refusal for cost in (6, 3, 2)]
        assert [outcome is None for outcome in outcomes] == [True, False, True]
        # The key has used its 8, and what was refused cost the tenant nothing.
        assert (await process.charge(2, key="other")).refusal is None
        refused = (await process.charge(1, key="other")).refusal
        assert refused is not None
        assert refused.members["violated-policies"] == ["submissions-tenant-86400s"]
        await process.limits.close()

    run(body)


def test_after_the_time_that_was_told_there_is_room_again(redis: RedisServer) -> None:
    async def body() -> None:
        process = Process(redis, rate_limit_submissions_per_tenant="5/second")
        for _ in range(3):
            while (refused := (await process.charge()).refusal) is None:
                pass
            waited = time.monotonic() + int(refused.headers["retry-after"])
            assert int(refused.headers["retry-after"]) <= 3
            await asyncio.sleep(waited - time.monotonic())
            assert (await process.charge()).refusal is None
        assert process.uncounted() == 0
        await process.limits.close()

    run(body)


def test_a_redis_that_dies_or_hangs_lets_requests_through_soon_and_counts_again_when_it_is_back(
    redis: RedisServer,
) -> None:
    async def body() -> None:
        process = Process(redis, rate_limit_submissions_per_tenant="3/day")
        for _ in range(3):
            assert (await process.charge()).refusal is None
        assert (await process.charge()).refusal is not None

        redis.freeze()
        began = time.monotonic()
        charged = await asyncio.gather(*(process.charge() for _ in range(100)))
        assert time.monotonic() - began < TIMEOUT_MS / 1000 + SLACK_SECONDS
        assert all(each.refusal is None and not each.headers for each in charged)
        # For a second nobody waits at all.
        began = time.monotonic()
        assert (await process.charge()).refusal is None
        assert time.monotonic() - began < TIMEOUT_MS / 2000
        assert process.uncounted() == 101
        redis.thaw()
        await asyncio.sleep(PAUSE_SECONDS)
        assert (await process.charge()).refusal is not None

        redis.stop()
        assert (await process.charge()).refusal is None
        assert process.uncounted() == 102
        redis.start()
        await asyncio.sleep(PAUSE_SECONDS)
        # It forgot everything, as a Redis without a disk does.
        told = await process.charge()
        assert told.refusal is None
        assert dict(told.headers)[b"ratelimit"].startswith(b'"submissions-tenant-86400s";r=2;t=')
        assert process.uncounted() == 102
        await process.limits.close()

    run(body)


def test_reads_and_submissions_are_counted_apart_and_no_secret_reaches_redis(redis: RedisServer) -> None:
    minted = mint(tenant="acme", scopes=Scope, now_ms=NOW_MS)
    api = Api(
        auth="keys",
        keys=MemoryKeys([minted.key]),
        rate_limit_storage=redis.url,
        rate_limit_timeout_ms=TIMEOUT_MS,
        rate_limit_submissions_per_key="1/hour",
        rate_limit_reads_per_key="2/hour",
    )
    headers = {"authorization": f"Bearer {minted.token}"}
    body = {"task_type": "any.json", "payload": {}}
    assert api.submit(body, headers=headers).status_code == 201
    refused = api.submit(body, headers=headers)
    assert (refused.status_code, slug(refused)) == (429, "rate-limited")
    assert [api.request("GET", "/task-types", headers=headers).status_code for _ in range(3)] == [
        200,
        200,
        429,
    ]

    async def stored() -> list[bytes]:
        from redis.asyncio import Redis

        async with Redis.from_url(redis.url) as client:
            found: list[bytes] = await client.keys("*")
        return found

    names = api.run(stored())
    assert {kind for kind in (READS, SUBMISSIONS) for name in names if kind.encode() in name} == {
        READS,
        SUBMISSIONS,
    }
    assert all(minted.key.prefix.encode() in name for name in names)
    secret = minted.token.split("_", 2)[2].encode()
    assert not any(secret in name for name in names)
    assert api.deps.limits is not None
    api.run(api.deps.limits.close())
    api.close()
