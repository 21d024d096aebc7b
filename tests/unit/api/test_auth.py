"""API keys: what they are, whom they let in, and what a process remembers of them."""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_kit import NOW_MS, Api, slug
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from taskline.api import auth_cache
from taskline.api.auth_cache import KeyCache
from taskline.errors import InvalidOption, Unavailable
from taskline.schemas.ids import new_task_id
from taskline.state import keys as keys_module
from taskline.state.keys import SECRET_CHARS, ApiKey, MintedKey, Scope, digest, mint, parse_key
from taskline.state.keys_memory import MemoryKeys

# What needs which scope. An operation that is not here must be of the operators' (tag `operations`).
SCOPES = {
    "submitTask": Scope.SUBMIT,
    "getTask": Scope.READ,
    "getTaskHistory": Scope.READ,
    "listTaskTypes": Scope.READ,
    "submitTasks": Scope.SUBMIT,
    "listDeadLetters": Scope.READ,
    "getDeadLetter": Scope.READ,
    "replayDeadLetters": Scope.ADMIN,
    "replayDeadLetter": Scope.ADMIN,
    "discardDeadLetter": Scope.ADMIN,
}
OPEN_PATHS = {"/healthz", "/readyz", "/metrics"}


def minted(tenant: str = "acme", *scopes: Scope, **options: Any) -> MintedKey:
    return mint(tenant=tenant, scopes=scopes or tuple(Scope), now_ms=NOW_MS - 1_000, **options)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def operations(api: Api) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, a path of it, and its description, of every documented operation that needs a key."""
    for template, described in api.app.openapi()["paths"].items():
        for method, operation in described.items():
            if template not in OPEN_PATHS:
                yield method.upper(), re.sub(r"\{\w+\}", str(new_task_id(NOW_MS)), template), operation


def guarded(api: Api) -> list[tuple[str, str, Scope]]:
    return [
        (method, path, Scope(operation["security"][0]["apiKey"][0]))
        for method, path, operation in operations(api)
    ]


# ---- keys -------------------------------------------------------------------------------------------------


@given(tenant=st.text(min_size=1, max_size=200), scopes=st.sets(st.sampled_from(Scope), min_size=1))
def test_a_key_that_was_made_is_read_back_and_fits_itself_alone(tenant: str, scopes: set[Scope]) -> None:
    first = mint(tenant=tenant, scopes=scopes, now_ms=NOW_MS)
    second = mint(tenant=tenant, scopes=scopes, now_ms=NOW_MS)
    parsed = parse_key(first.token)
    assert parsed is not None
    prefix, secret = parsed
    assert prefix == first.key.prefix
    assert len(prefix) == 8
    assert len(secret) == SECRET_CHARS
    assert first.key.matches(secret)
    assert not second.key.matches(secret)
    assert (first.key.tenant, first.key.scopes) == (tenant, scopes)


@given(st.text())
def test_any_text_can_be_looked_at(text: str) -> None:
    parsed = parse_key(text)
    assert parsed is None or text == "tk_" + "_".join(parsed)


@given(st.integers(0, SECRET_CHARS - 1), st.sampled_from("Aa0_-"))
def test_one_wrong_character_is_wrong(at: int, other: str) -> None:
    made = minted()
    _, secret = parse_key(made.token) or ("", "")
    changed = secret[:at] + other + secret[at + 1 :]
    assert made.key.matches(changed) == (changed == secret)


@pytest.mark.parametrize(
    "token",
    ["", "tk_", "tk_abcdefgh", "tk_abcdefgh_short", f"tk_abcdefg_{'a' * 43}", f"tk_abcdefgh_{'a' * 43}\n",
     f"sk_abcdefgh_{'a' * 43}", f"tk_abcdefgh_{'a' * 44}", f"tk_abcdefgh_{'ä' * 43}", f"tk_abcdefg٣_{'a' * 43}"],
)  # fmt: skip
def test_what_is_no_key(token: str) -> None:
    assert parse_key(token) is None


def test_a_secret_has_256_random_bits_and_only_its_hash_is_kept() -> None:
    asked: list[int] = []

    def zeros(size: int) -> bytes:
        asked.append(size)
        return bytes(size)

    made = minted(random_bytes=zeros)
    assert asked[-1] == 32
    assert made.token == f"tk_aaaaaaaa_{'A' * 43}"
    assert made.key.secret_hash == digest("A" * 43)
    assert len(made.key.secret_hash) == 32


def test_neither_secret_nor_hash_is_in_what_a_debugger_prints() -> None:
    made = minted()
    _, secret = parse_key(made.token) or ("", "")
    for shown in (repr(made), str(made), repr(made.key), f"{made.key!r}"):
        assert secret not in shown
        assert str(made.key.secret_hash) not in shown
        assert made.key.prefix in shown


def test_the_comparison_takes_as_long_for_every_wrong_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    made = minted()
    compared: list[tuple[Any, Any]] = []

    def watched(left: Any, right: Any) -> bool:
        compared.append((left, right))
        return hmac.compare_digest(left, right)

    class Watched:
        compare_digest = staticmethod(watched)

    monkeypatch.setattr(keys_module, "hmac", Watched)
    assert not made.key.matches("x" * SECRET_CHARS)
    assert compared == [(made.key.secret_hash, digest("x" * SECRET_CHARS))]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"scopes": ()}, "scopes"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "x" * 201}, "tenant"),
        ({"name": "x" * 201}, "name"),
        ({"scopes": (Scope.READ,), "queues": ("geo",)}, "queues"),
        ({"expires_at": NOW_MS}, "expires_at"),
    ],
)
def test_a_key_that_makes_no_sense_is_not_made(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        mint(**{"tenant": "acme", "scopes": (Scope.WORK,), "now_ms": NOW_MS} | options)
    assert refused.value.option == named


async def _memory_store() -> None:
    store, made = MemoryKeys(), minted().key
    assert await store.add(made)
    assert not await store.add(replace(made, tenant="thief"))
    assert await store.find(made.prefix) == made
    revoked = await store.revoke(made.prefix, 7)
    assert revoked is not None
    assert revoked.revoked_at == 7
    assert await store.revoke(made.prefix, 8) == revoked
    assert await store.revoke("nobody00", 8) is None
    assert list(await store.keys()) == [revoked]


def test_the_store_in_memory_keeps_what_it_was_given() -> None:
    asyncio.run(_memory_store())


# ---- every route ------------------------------------------------------------------------------------------


def test_every_operation_has_its_scope(make_api: Callable[..., Api]) -> None:
    api = make_api()
    documented = {operation["operationId"]: operation.get("security") for _, _, operation in operations(api)}
    assert all(security is not None for security in documented.values()), documented
    for name, scope in SCOPES.items():
        assert documented[name] == [{"apiKey": [scope.value]}]
    scheme = api.app.openapi()["components"]["securitySchemes"]["apiKey"]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")


def test_no_route_answers_without_a_key_that_holds(make_api: Callable[..., Api]) -> None:
    good = minted()
    revoked, expired = minted(), minted(expires_at=NOW_MS)
    stored = [good.key, replace(revoked.key, revoked_at=NOW_MS - 1), expired.key]
    api = make_api(auth="keys", keys=MemoryKeys(stored))
    prefix, _ = parse_key(good.token) or ("", "")
    wrong = {
        "unknown": minted().token,
        "of another key": f"tk_{prefix}_{(parse_key(revoked.token) or ('', ''))[1]}",
        "revoked": revoked.token,
        "expired": expired.token,
        "no key at all": "letmein",
        "empty": "",
    }
    for method, path, _ in guarded(api):
        nothing = api.request(method, path)
        assert (nothing.status_code, slug(nothing)) == (401, "unauthorized")
        assert nothing.headers["www-authenticate"] == 'Bearer realm="taskline"'
        basic = api.request(method, path, headers={"authorization": "Basic YTpi"})
        assert basic.headers["www-authenticate"] == 'Bearer realm="taskline"'
        said = set()
        for token in wrong.values():
            refused = api.request(method, path, headers=bearer(token))
            assert refused.status_code == 401, path
            assert refused.headers["www-authenticate"] == 'Bearer realm="taskline", error="invalid_token"'
            said.add(str(refused.json() | {"instance": ""}))
        assert len(said) == 1, "the caller learns which of them it is"
    assert not api.log.records


def test_every_route_wants_its_own_scope_and_no_other(make_api: Callable[..., Api]) -> None:
    of_scope = {scope: minted("acme", scope) for scope in Scope}
    api = make_api(auth="keys", keys=MemoryKeys(each.key for each in of_scope.values()))
    for method, path, needed in guarded(api):
        for scope, key in of_scope.items():
            answer = api.request(method, path, headers=bearer(key.token))
            if scope is needed:
                assert answer.status_code not in (401, 403), (method, path)
                continue
            assert (answer.status_code, slug(answer)) == (403, "forbidden")
            assert answer.json()["scope"] == needed.value
            assert answer.headers["www-authenticate"] == (
                f'Bearer realm="taskline", error="insufficient_scope", scope="{needed.value}"'
            )
    assert not api.log.records


def test_an_id_that_is_none_is_not_discussed_with_strangers(make_api: Callable[..., Api]) -> None:
    api = make_api(auth="keys")
    assert api.request("GET", "/tasks/nonsense").status_code == 401


def test_probes_metrics_and_the_description_need_no_key(make_api: Callable[..., Api]) -> None:
    api = make_api(auth="keys")
    for path in ("/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"):
        assert api.request_raw("GET", path).status_code == 200


@pytest.mark.parametrize("header", ["Bearer {}", "bearer {}", "BEARER   {}"])
def test_the_scheme_is_written_in_any_case(make_api: Callable[..., Api], header: str) -> None:
    key = minted()
    api = make_api(auth="keys", keys=MemoryKeys([key.key]))
    answer = api.request("GET", "/task-types", headers={"authorization": header.format(key.token)})
    assert answer.status_code == 200


# ---- tenants ----------------------------------------------------------------------------------------------


def test_a_task_is_its_tenant_s_alone(make_api: Callable[..., Api]) -> None:
    ours, theirs = minted("ours"), minted("theirs")
    api = make_api(auth="keys", keys=MemoryKeys([ours.key, theirs.key]))
    accepted = api.submit({"task_type": "any.json", "payload": {}}, headers=bearer(ours.token))
    assert accepted.status_code == 201
    (submission,) = api.log.submissions()
    assert submission.tenant == "ours"
    api.store.put(submission)
    unknown = new_task_id(NOW_MS)
    for path in ("/tasks/{}", "/tasks/{}/history"):
        found = api.request("GET", path.format(submission.task_id), headers=bearer(ours.token))
        assert found.status_code == 200
        hidden = api.request("GET", path.format(submission.task_id), headers=bearer(theirs.token))
        absent = api.request("GET", path.format(unknown), headers=bearer(theirs.token))
        assert (hidden.status_code, slug(hidden)) == (404, "task-not-found")
        # Not a word's difference between another's task and none.
        assert text_of(hidden, submission.task_id) == text_of(absent, unknown)


def text_of(response: httpx.Response, task_id: object) -> str:
    document = response.json() | {"instance": ""}
    return str(document).replace(str(task_id), "ID")


# ---- without the store, and without a lock ----------------------------------------------------------------


class Away:
    """A store that does not answer."""

    def __init__(self, *known: ApiKey) -> None:
        self.known = MemoryKeys(known)
        self.away = False
        self.asked = 0
        self.hangs: asyncio.Event | None = None

    async def find(self, prefix: str) -> ApiKey | None:
        self.asked += 1
        if self.hangs is not None:
            await self.hangs.wait()
        if self.away:
            raise Unavailable("away")
        return await self.known.find(prefix)


def test_keys_seen_before_outlast_the_store_and_others_are_told_to_wait(
    make_api: Callable[..., Api],
) -> None:
    seen, unseen = minted(), minted()
    store = Away(seen.key, unseen.key)
    api = make_api(auth="keys", keys=store, key_cache_seconds=0.0)
    body = {"task_type": "any.json", "payload": {}}
    assert api.submit(body, headers=bearer(seen.token)).status_code == 201
    store.away = True
    assert api.submit(body, headers=bearer(seen.token)).status_code == 201
    waits = api.submit(body, headers=bearer(unseen.token))
    assert (waits.status_code, slug(waits)) == (503, "keys-unavailable")
    assert len(api.log.records) == 2
    wrong = f"tk_{seen.key.prefix}_{'x' * SECRET_CHARS}"
    assert api.submit(body, headers=bearer(wrong)).status_code == 401


def test_without_authentication_everybody_is_the_anonymous_tenant_and_it_is_said_aloud(
    make_api: Callable[..., Api],
) -> None:
    with capture_logs() as logged:
        api = make_api(auth="off", anonymous_tenant="nobody")
    assert [entry["setting"] for entry in logged if entry["log_level"] == "warning"] == ["api.auth"]
    assert b"taskline_api_authentication_off 1.0" in api.request("GET", "/metrics").content
    api.submit({"task_type": "any.json", "payload": {}}, headers=bearer("tk_whatever"))
    assert [each.tenant for each in api.log.submissions()] == ["nobody"]
    with capture_logs() as logged:
        locked = make_api(auth="keys")
    assert not [entry for entry in logged if entry["log_level"] == "warning"]
    assert b"taskline_api_authentication_off 0.0" in locked.request("GET", "/metrics").content


def test_refusals_are_counted_by_reason(make_api: Callable[..., Api]) -> None:
    key = minted("acme", Scope.READ)
    api = make_api(auth="keys", keys=MemoryKeys([key.key]))
    api.request("GET", "/task-types")
    api.submit(b"{}", headers=bearer(key.token))
    api.request("GET", "/task-types", headers=bearer(minted().token))
    page = api.request("GET", "/metrics").text
    for reason in ("missing", "scope", "unknown"):
        assert f'taskline_api_refused_total{{reason="{reason}"}} 1.0' in page


# A process of its own: how logs are written is set once for all, and not as tests have it.
LOGGING_PROCESS = """
import sys
from dataclasses import replace
from api_kit import NOW_MS, Api
from taskline.infra.telemetry import configure_logging
from taskline.schemas.ids import new_task_id
from taskline.settings import TelemetrySettings
from taskline.state.keys import Scope, mint
from taskline.state.keys_memory import MemoryKeys

configure_logging(TelemetrySettings(log_level="debug", log_format=sys.argv[1]))
good, revoked, unknown = (mint(tenant="acme", scopes=Scope, now_ms=NOW_MS - 1) for _ in range(3))
api = Api(auth="keys", keys=MemoryKeys([good.key, replace(revoked.key, revoked_at=1)]))
wrong = f"tk_{good.key.prefix}_{'x' * 43}"
tokens = [good.token, revoked.token, wrong, unknown.token, "tk_malformed_hunter2"]
api.store.failure = RuntimeError("a fault of the server")
for token in tokens:
    answer = api.request("GET", f"/tasks/{new_task_id(NOW_MS)}", headers={"authorization": f"Bearer {token}"})
    sys.stderr.write(answer.text)
sys.stderr.write(api.request("GET", "/metrics").text)
print(" ".join(tokens))
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_secret_is_in_no_log_line_no_answer_and_no_metric(log_format: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", LOGGING_PROCESS, log_format],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "support")},
    )
    for line in ("key refused", "a fault of the server", "answered", "taskline_api_refused_total"):
        assert line in said.stderr
    tokens = said.stdout.split()
    assert len(tokens) == 5
    for token in tokens:
        assert token not in said.stderr
        assert token.split("_", 2)[2] not in said.stderr


# ---- what a process remembers -----------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


Cached = Callable[[KeyCache, Away, Clock], Awaitable[None]]


def with_cache(body: Cached, *known: ApiKey) -> None:
    async def run() -> None:
        clock, store = Clock(), Away(*known)
        cache = KeyCache(store, fresh_seconds=30, stale_seconds=3_600, now=clock)
        async with asyncio.timeout(10):
            await body(cache, store, clock)

    asyncio.run(run())


KEY = minted().key


def test_a_key_is_read_once_in_its_time_and_a_revocation_is_seen_after_it() -> None:
    async def body(cache: KeyCache, store: Away, clock: Clock) -> None:
        assert cache.fresh(KEY.prefix) is None
        assert await cache.find(KEY.prefix) == KEY
        revoked = await store.known.revoke(KEY.prefix, 5)
        clock.seconds += 30
        assert cache.fresh(KEY.prefix) == KEY
        assert await cache.find(KEY.prefix) == KEY
        assert store.asked == 1
        clock.seconds += 0.1
        assert cache.fresh(KEY.prefix) is None
        assert await cache.find(KEY.prefix) == revoked
        assert cache.fresh(KEY.prefix) == revoked

    with_cache(body, KEY)


def test_the_unknown_are_remembered_but_not_for_ever_and_not_all() -> None:
    async def body(cache: KeyCache, store: Away, clock: Clock) -> None:
        for _ in range(3):
            assert await cache.find("nobody00") is None
        assert store.asked == 1
        clock.seconds += 31
        assert await cache.find("nobody00") is None
        assert store.asked == 2
        for number in range(auth_cache.MAX_UNKNOWN + 10):
            await cache.find(f"{number:08}")
        assert len(cache._unknown) == auth_cache.MAX_UNKNOWN
        assert await cache.find(KEY.prefix) == KEY

    with_cache(body, KEY)


def test_many_who_ask_at_once_ask_the_store_once() -> None:
    async def body(cache: KeyCache, store: Away, clock: Clock) -> None:
        store.hangs = asyncio.Event()
        asking = [asyncio.create_task(cache.find(KEY.prefix)) for _ in range(50)]
        await asyncio.sleep(0)
        asking[0].cancel()
        store.hangs.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert answers[1:] == [KEY] * 49
        assert store.asked == 1

    with_cache(body, KEY)


def test_a_store_that_hangs_delays_a_known_key_by_a_moment_and_once() -> None:
    async def body(cache: KeyCache, store: Away, clock: Clock) -> None:
        await cache.find(KEY.prefix)
        clock.seconds += 31
        store.hangs = asyncio.Event()
        loop = asyncio.get_running_loop()
        before = loop.time()
        assert await cache.find(KEY.prefix) == KEY
        assert loop.time() - before < 5 * auth_cache.PATIENCE_SECONDS
        clock.seconds += 1
        before = loop.time()
        assert await cache.find(KEY.prefix) == KEY
        assert loop.time() - before < auth_cache.PATIENCE_SECONDS / 2
        store.hangs.set()

    with_cache(body, KEY)


def test_an_absent_store_is_asked_once_a_second_and_its_last_word_holds_for_a_while_only() -> None:
    async def body(cache: KeyCache, store: Away, clock: Clock) -> None:
        await cache.find(KEY.prefix)
        store.away = True
        clock.seconds += 31
        for _ in range(10):
            assert await cache.find(KEY.prefix) == KEY
        assert store.asked == 2
        clock.seconds += 1.1
        assert await cache.find(KEY.prefix) == KEY
        assert store.asked == 3
        clock.seconds += 3_600
        with pytest.raises(Unavailable):
            await cache.find(KEY.prefix)
        store.away = False
        assert await cache.find(KEY.prefix) == KEY

    with_cache(body, KEY)


def test_guesses_do_not_pile_up_at_the_store_and_do_not_hold_up_the_known() -> None:
    async def body(cache: KeyCache, store: Away, clock: Clock) -> None:
        await cache.find(KEY.prefix)
        clock.seconds += 31
        store.hangs = asyncio.Event()
        guesses = [asyncio.create_task(cache.find(f"{number:08}")) for number in range(200)]
        await asyncio.sleep(0.01)
        assert store.asked == 1 + auth_cache.MAX_READS
        assert await cache.find(KEY.prefix) == KEY
        store.hangs.set()
        answers = await asyncio.gather(*guesses, return_exceptions=True)
        assert answers.count(None) == auth_cache.MAX_READS
        refused = [answer for answer in answers if answer is not None]
        assert all(isinstance(answer, Unavailable) for answer in refused)
        assert len(refused) == 200 - auth_cache.MAX_READS

    with_cache(body, KEY)
