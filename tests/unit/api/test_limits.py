"""Rate limits: the windows' arithmetic, what is counted, and what the caller is told."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest
from api_kit import NOW_MS, Api, slug
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from structlog.testing import capture_logs

from taskline.api.limits import PAUSE_SECONDS, READS, SUBMISSIONS, RateLimits
from taskline.api.limits_window import Standing, Window, policy_field, standing_field, whole_seconds
from taskline.api.metrics import ApiMetrics
from taskline.api.tenancy import charge, require
from taskline.errors import InvalidSettings
from taskline.settings import ApiSettings
from taskline.state.keys import MintedKey, Scope, mint
from taskline.state.keys_memory import MemoryKeys

BODY = orjson.dumps({"task_type": "any.json", "payload": {}})
# A structured-field list of strings with integer parameters (RFC 9651), as far as these fields use it.
ITEM = re.compile(r'"([a-z0-9-]+)"((?:;[a-z]+=\d+)+)')


def fields(response: httpx.Response, name: str) -> dict[str, dict[str, int]]:
    found = {}
    for item in response.headers[name].split(", "):
        matched = ITEM.fullmatch(item)
        assert matched, item
        parameters = (each.partition("=") for each in matched[2].removeprefix(";").split(";"))
        found[matched[1]] = {parameter: int(value) for parameter, _, value in parameters}
    return found


def minted(tenant: str) -> MintedKey:
    return mint(tenant=tenant, scopes=Scope, now_ms=NOW_MS)


def submit(api: Api, key: MintedKey) -> httpx.Response:
    return api.submit(BODY, headers={"authorization": f"Bearer {key.token}"})


def read(api: Api, key: MintedKey) -> httpx.Response:
    return api.request("GET", "/task-types", headers={"authorization": f"Bearer {key.token}"})


# ---- arithmetic -------------------------------------------------------------------------------------------


@st.composite
def windows(draw: st.DrawFn) -> Window:
    length = draw(st.sampled_from([1, 60, 3_600, 86_400]))
    turn = draw(st.floats(0, 1)) * length
    previous, current = draw(st.integers(0, 1_000)), draw(st.integers(0, 1_000))
    return Window(
        length=length,
        previous=previous,
        previous_left=turn if previous else 0.0,
        current=current,
        current_left=turn + length if current else 0.0,
    )


@given(windows(), st.integers(1, 2_000), st.data())
def test_after_its_wait_a_cost_fits_and_not_long_before(
    window: Window, limit: int, data: st.DataObject
) -> None:
    cost = data.draw(st.integers(1, limit))
    wait = window.wait(limit, cost)
    assert wait >= 0
    later = data.draw(st.floats(0, 2)) * window.length
    slack = window.length * 1e-6
    assert window.used(wait + slack + later) + cost <= limit
    if wait > slack:
        assert window.used(wait - slack) + cost > limit


@given(windows(), st.floats(0, 3), st.floats(0, 3))
def test_what_is_used_only_fades(window: Window, first: float, second: float) -> None:
    earlier, later = sorted((first * window.length, second * window.length))
    assert window.used(later) <= window.used(earlier)
    assert window.used(window.full_again()) == 0


@given(windows(), st.integers(1, 500))
def test_a_cost_counts_in_full_at_first(window: Window, cost: int) -> None:
    assert window.after(cost).used() == window.used() + cost


@given(st.floats(0, 1e6))
def test_whole_seconds_are_more_than_the_wait(seconds: float) -> None:
    assert seconds < whole_seconds(seconds) <= seconds + 1


def test_the_fields_are_written_as_the_draft_has_them() -> None:
    assert policy_field([("burst", 100, 60), ("daily", 1_000, 86_400)]) == (
        b'"burst";q=100;w=60, "daily";q=1000;w=86400'
    )
    assert standing_field([Standing(policy="default", remaining=50, seconds=30)]) == b'"default";r=50;t=30'


# ---- over HTTP --------------------------------------------------------------------------------------------


def test_nothing_is_limited_or_told_by_default(make_api: Callable[..., Api]) -> None:
    key = minted("acme")
    api = make_api(auth="keys", keys=MemoryKeys([key.key]))
    answer = submit(api, key)
    assert answer.status_code == 201
    assert not [name for name in answer.headers if name.startswith("ratelimit")]


def test_a_tenant_s_limit_is_told_and_kept_whatever_the_key(make_api: Callable[..., Api]) -> None:
    first, second, other = minted("acme"), minted("acme"), minted("else")
    api = make_api(
        auth="keys",
        keys=MemoryKeys(each.key for each in (first, second, other)),
        rate_limit_submissions_per_tenant="3/hour",
    )
    name = "submissions-tenant-3600s"
    for key, left in ((first, 2), (second, 1), (first, 0)):
        answer = submit(api, key)
        assert answer.status_code == 201
        assert fields(answer, "ratelimit-policy") == {name: {"q": 3, "w": 3_600}}
        assert fields(answer, "ratelimit")[name]["r"] == left
    for key in (first, second):
        refused = submit(api, key)
        assert (refused.status_code, slug(refused)) == (429, "rate-limited")
        assert refused.json()["violated-policies"] == [name]
        retry = int(refused.headers["retry-after"])
        assert 1 <= retry <= 7_200
        assert fields(refused, "ratelimit")[name] == {"r": 0, "t": retry}
    assert submit(api, other).status_code == 201
    assert read(api, first).status_code == 200
    assert len(api.log.records) == 4
    page = api.request("GET", "/metrics").text
    assert f'taskline_api_rate_limited_total{{policy="{name}"}} 2.0' in page


def test_a_key_s_limit_is_its_own_and_a_refusal_costs_the_tenant_nothing(
    make_api: Callable[..., Api],
) -> None:
    first, second = minted("acme"), minted("acme")
    api = make_api(
        auth="keys",
        keys=MemoryKeys([first.key, second.key]),
        rate_limit_reads_per_key="2/hour; 100/day",
        rate_limit_reads_per_tenant="4/hour",
    )
    for _ in range(2):
        assert read(api, first).status_code == 200
    for _ in range(10):
        refused = read(api, first)
        assert refused.json()["violated-policies"] == ["reads-key-3600s"]
        assert fields(refused, "ratelimit")["reads-tenant-3600s"]["r"] == 2
        assert fields(refused, "ratelimit")["reads-key-86400s"]["r"] == 98
    for _ in range(2):
        assert read(api, second).status_code == 200
    assert read(api, second).json()["violated-policies"] == ["reads-tenant-3600s", "reads-key-3600s"]


def test_what_is_not_found_counts_and_tells_of_the_limit_too(make_api: Callable[..., Api]) -> None:
    key = minted("acme")
    api = make_api(auth="keys", keys=MemoryKeys([key.key]), rate_limit_reads_per_key="1/hour")
    answer = api.request("GET", "/tasks/nonsense", headers={"authorization": f"Bearer {key.token}"})
    assert answer.status_code == 400
    assert fields(answer, "ratelimit")["reads-key-3600s"]["r"] == 0
    assert read(api, key).status_code == 429


def test_without_authentication_the_anonymous_tenant_is_limited(make_api: Callable[..., Api]) -> None:
    api = make_api(
        auth="off", rate_limit_submissions_per_tenant="1/hour", rate_limit_submissions_per_key="1/hour"
    )
    answer = api.submit(BODY)
    assert list(fields(answer, "ratelimit")) == ["submissions-tenant-3600s"]
    assert api.submit(BODY).status_code == 429


def test_a_batch_counts_each_of_its_tasks_or_none(make_api: Callable[..., Api]) -> None:
    """Through the seam that a batch route uses."""
    api = make_api(auth="off", rate_limit_submissions_per_tenant="10/hour")
    sizes = iter((7, 7, 3, 11))

    async def batch(request: Request) -> Any:
        from starlette.responses import JSONResponse

        await require(request, Scope.SUBMIT, cost=0)
        await charge(request, Scope.SUBMIT, next(sizes))
        return JSONResponse({})

    api.app.router.add_api_route("/batch", batch, methods=["POST"])
    answers = [api.request_raw("POST", "/batch") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 429, 200, 422]
    name = "submissions-tenant-3600s"
    assert [fields(answer, "ratelimit")[name]["r"] for answer in answers[:3]] == [3, 3, 0]
    assert answers[3].json()["errors"][0]["detail"].startswith("11 at once are over the limit of 10")


# ---- settings and failures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rate_limit_reads_per_key": "often"}, "api.rate_limit_reads_per_key"),
        ({"rate_limit_submissions_per_tenant": "0/second"}, "api.rate_limit_submissions_per_tenant"),
        ({"rate_limit_reads_per_tenant": "5/second; 6/second"}, "two limits for the same time"),
        ({"rate_limit_reads_per_key": "1/hour", "rate_limit_storage": "ftp://x"}, "api.rate_limit_storage"),
        ({"rate_limit_reads_per_key": "1/hour", "rate_limit_storage": "memory"}, "api.rate_limit_storage"),
    ],
)
def test_limits_that_make_no_sense_are_refused_at_start(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSettings, match=re.escape(named)):
        RateLimits.of(ApiSettings(**settings), ApiMetrics())


def test_a_password_in_the_storage_s_url_is_not_shown() -> None:
    settings = ApiSettings(rate_limit_storage="redis://:hunter2@127.0.0.1:6379")
    assert "hunter2" not in repr(settings)


def with_limits(body: Callable[[RateLimits, ApiMetrics], Any], **settings: Any) -> None:
    async def run() -> None:
        metrics = ApiMetrics()
        limits = RateLimits.of(ApiSettings(**settings), metrics)
        assert limits is not None
        await body(limits, metrics)
        await limits.close()

    asyncio.run(run())


def test_refusals_among_many_at_once_are_exact_in_memory() -> None:
    async def body(limits: RateLimits, metrics: ApiMetrics) -> None:
        charged = await asyncio.gather(*(limits.charge(READS, "acme", "k", 1) for _ in range(200)))
        assert sum(each.refusal is None for each in charged) == 100

    with_limits(body, rate_limit_reads_per_tenant="100/day")


def test_an_absent_redis_lets_everything_through_and_it_is_told() -> None:
    async def body(limits: RateLimits, metrics: ApiMetrics) -> None:
        loop = asyncio.get_running_loop()
        before = loop.time()
        with capture_logs() as logged:
            for _ in range(50):
                charged = await limits.charge(SUBMISSIONS, "acme", "k", 1)
                assert charged.refusal is None
                assert not charged.headers
        assert loop.time() - before < 0.5
        assert [entry["event"] for entry in logged] == ["rate limits are not counted"] * math.ceil(
            0.5 / PAUSE_SECONDS
        )
        assert metrics.registry.get_sample_value("taskline_api_rate_limit_uncounted_total") == 50

    with_limits(body, rate_limit_submissions_per_key="1/hour", rate_limit_storage="redis://127.0.0.1:1")
