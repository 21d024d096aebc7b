"""Who makes a request, and whether they may: the API key in `Authorization: Bearer …` (RFC 6750).

Invariant: nothing is looked up, read or produced on behalf of a caller whose key was not checked. Whether a key is unknown, wrong,
expired or revoked is for the operator's numbers; the caller hears the same of all four.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog
from prometheus_client import Counter, Gauge
from starlette.requests import Request

from taskline.api.auth_cache import KeyCache
from taskline.api.limits import READS, SUBMISSIONS, RateLimits
from taskline.api.metrics import ApiMetrics
from taskline.api.middleware import MORE_HEADERS
from taskline.api.problems import FORBIDDEN, KEYS_UNAVAILABLE, UNAUTHORIZED, ProblemError
from taskline.errors import Unavailable
from taskline.infra.role import Clock
from taskline.settings import ApiSettings
from taskline.state.keys import ApiKey, KeyReader, Scope, parse_key

log = structlog.get_logger(__name__)

_AUTHORIZATION = b"authorization"
_SCHEME = "bearer"
_REALM = 'Bearer realm="taskline"'
_RETRY_AFTER_SECONDS = "2"
# Which rate limits a scope's requests count against; the others are for operators and workers, who bring their own pace.
_COUNTED_AS = {Scope.SUBMIT: SUBMISSIONS, Scope.READ: READS}
# What a wrong key is called in the numbers.
_MISSING, _MALFORMED, _UNKNOWN, _WRONG, _OVER, _SCOPE = (
    "missing",
    "malformed",
    "unknown",
    "wrong-secret",
    "revoked-or-expired",
    "scope",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """On whose behalf a request is made."""

    tenant: str
    # None: authentication is off.
    key: ApiKey | None = None


class Access:
    """The check that every request passes, but for the operations and the pages that describe the API."""

    def __init__(
        self,
        api: ApiSettings,
        keys: KeyReader,
        *,
        metrics: ApiMetrics,
        clock: Clock,
        limits: RateLimits | None = None,
    ) -> None:
        """Check against `keys`; None for `limits`: nothing is limited."""
        self._open = api.auth == "off"
        self._anonymous = Caller(tenant=api.anonymous_tenant)
        self._keys = KeyCache(keys, fresh_seconds=api.key_cache_seconds, stale_seconds=api.key_stale_seconds)
        self._patience = api.request_timeout_seconds
        self._clock = clock
        self._limits = limits
        self._refusals = Counter(
            "taskline_api_refused",
            "Requests refused for want of a key that may do it, by reason.",
            ["reason"],
            registry=metrics.registry,
        )
        off = Gauge(
            "taskline_api_authentication_off",
            "1: every caller is let in (api.auth = off); alert on it.",
            registry=metrics.registry,
        )
        off.set(self._open)
        if self._open:
            log.warning(
                "authentication is off: whoever reaches this process may do everything",
                tenant=api.anonymous_tenant,
                setting="api.auth",
            )

    async def admit(self, request: Request, scope: Scope, cost: int) -> Caller:
        """The caller, if they may do what needs this scope; their rate limits are charged `cost`.

        Raises:
            ProblemError: no usable key (401), one without the scope (403), too many requests (429), or no way to tell (503).
        """
        caller = self._anonymous if self._open else await self._identify(request, scope)
        if self._limits is not None and cost:
            await self.charge(request, caller, scope, cost)
        return caller

    async def charge(self, request: Request, caller: Caller, scope: Scope, cost: int) -> None:
        """Charge the caller's rate limits, and note what is left for the answer's headers.

        Raises:
            ProblemError: there is not enough left (429), or the cost is over what a limit ever allows (422).
        """
        kind = _COUNTED_AS.get(scope)
        if self._limits is None or kind is None:
            return
        charged = await self._limits.charge(
            kind, caller.tenant, None if caller.key is None else caller.key.prefix, cost
        )
        if charged.headers:
            request.scope[MORE_HEADERS] = charged.headers
        if charged.refusal is not None:
            raise charged.refusal

    async def _identify(self, request: Request, scope: Scope) -> Caller:
        presented = parse_key(self._token(request))
        if presented is None:
            raise self._unauthorized(_MALFORMED)
        prefix, secret = presented
        key = self._keys.fresh(prefix)
        if key is None:
            key = await self._find(prefix)
            if key is None:
                raise self._unauthorized(_UNKNOWN)
        if not key.matches(secret):
            raise self._unauthorized(_WRONG, prefix)
        if not key.usable(self._clock.now_ms()):
            raise self._unauthorized(_OVER, prefix)
        if scope not in key.scopes:
            self._refusals.labels(_SCOPE).inc()
            raise ProblemError(
                FORBIDDEN,
                f"this needs a key with the scope {scope.value}",
                members={"scope": scope.value},
                headers={"www-authenticate": f'{_REALM}, error="insufficient_scope", scope="{scope.value}"'},
            )
        return Caller(tenant=key.tenant, key=key)

    async def _find(self, prefix: str) -> ApiKey | None:
        try:
            async with asyncio.timeout(self._patience):
                return await self._keys.find(prefix)
        except (Unavailable, TimeoutError) as error:
            raise ProblemError(
                KEYS_UNAVAILABLE,
                "the API key can't be looked up now",
                headers={"retry-after": _RETRY_AFTER_SECONDS},
            ) from error

    def _token(self, request: Request) -> str:
        """The bearer token; every other thing in its place is as good as none."""
        name: bytes
        value: bytes
        for name, value in request.scope["headers"]:
            if name == _AUTHORIZATION:
                scheme, _, token = value.decode("latin-1").partition(" ")
                if scheme.lower() == _SCHEME:
                    return token.strip(" ")
        raise self._unauthorized(_MISSING)

    def _unauthorized(self, reason: str, prefix: str | None = None) -> ProblemError:
        self._refusals.labels(reason).inc()
        if prefix is not None:
            log.info("key refused", key=prefix, reason=reason)
        if reason == _MISSING:
            # Without an error code, as RFC 6750 §3.1 has it for a caller who showed nothing.
            return ProblemError(
                UNAUTHORIZED,
                "send an API key in the header Authorization: Bearer tk_…",
                headers={"www-authenticate": _REALM},
            )
        return ProblemError(
            UNAUTHORIZED,
            "this API key is not valid",
            headers={"www-authenticate": f'{_REALM}, error="invalid_token"'},
        )
