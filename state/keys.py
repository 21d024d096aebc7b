"""API keys: what one looks like, what is stored of it, and whether a presented one is it.

Invariant: a secret exists in two places only, in the hands of its owner and, while a request is looked at, in memory. What is stored is
its SHA-256. A slow password hash (bcrypt, Argon2) buys time against guessing secrets that people chose; these are 256 random bits,
which no hardware guesses through any hash, and a slow one would cost every request tens of milliseconds.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from taskline.errors import InvalidOption

KEY_TAG = "tk"
PREFIX_CHARS = 8
# 256 bits of randomness, as URL-safe base64 writes them.
SECRET_BYTES = 32
SECRET_CHARS = 43
# No `_`, which separates the parts of a key.
_PREFIX_ALPHABET = string.ascii_letters + string.digits
_KEY = re.compile(rf"{KEY_TAG}_([A-Za-z0-9]{{{PREFIX_CHARS}}})_([A-Za-z0-9_-]{{{SECRET_CHARS}}})", re.ASCII)
# Tenant and name are shown in lists and logs.
MAX_NAME_CHARS = 200


class Scope(StrEnum):
    """What a key lets its holder do. None includes another: a key has exactly the scopes that it was given."""

    SUBMIT = "submit"  # put tasks in
    READ = "read"  # see tasks, types, dead letters
    WORK = "work"  # fetch tasks and report their outcome
    ADMIN = "admin"  # replay and discard dead letters, steer queues


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """What is stored of a key."""

    # The visible part: names the key in lists and logs.
    prefix: str
    secret_hash: bytes = field(repr=False)
    tenant: str
    scopes: frozenset[Scope]
    # With `work`: the queues that the holder may fetch from; empty: all.
    queues: frozenset[str] = frozenset()
    # For people; may be empty.
    name: str = ""
    # Instants in ms since the epoch.
    created_at: int
    expires_at: int | None = None
    revoked_at: int | None = None

    def matches(self, secret: str) -> bool:
        """Whether this is the key's secret; takes as long whatever is wrong with it."""
        return hmac.compare_digest(self.secret_hash, digest(secret))

    def usable(self, now_ms: int) -> bool:
        """Whether the key is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now_ms < self.expires_at)


@dataclass(frozen=True, kw_only=True, slots=True)
class MintedKey:
    """A new key: what to store, and what to hand to its owner, once."""

    key: ApiKey
    token: str = field(repr=False)


class KeyReader(Protocol):
    """Where keys are looked up."""

    async def find(self, prefix: str) -> ApiKey | None:
        """The key of this prefix, whether it still holds or not.

        Raises:
            Unavailable: the store does not answer.
        """
        ...


class KeyStore(KeyReader, Protocol):
    """Where keys are kept."""

    async def add(self, key: ApiKey) -> bool:
        """Store a new key; False: its prefix is taken, and nothing was stored. Raises as `find`."""
        ...

    async def revoke(self, prefix: str, at_ms: int) -> ApiKey | None:
        """Revoke a key, and return it; a second time changes nothing. None: there is none. Raises as `find`."""
        ...

    async def keys(self) -> Sequence[ApiKey]:
        """Every key, oldest first. Raises as `find`."""
        ...


def mint(
    *,
    tenant: str,
    scopes: Iterable[Scope],
    now_ms: int,
    queues: Iterable[str] = (),
    name: str = "",
    expires_at: int | None = None,
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> MintedKey:
    """Make a key.

    Args:
        tenant: whose tasks its holder submits and sees.
        scopes: what its holder may do; at least one.
        now_ms: the present, in ms since the epoch.
        queues: with the scope `work`, the queues to be worked on; none: all.
        name: for people.
        expires_at: when it ends, in ms since the epoch; None: never.
        random_bytes: the source of randomness; must be fit for secrets.

    Raises:
        InvalidOption: no scope, a text that is empty or too long, queues without `work`, or an end that has passed.
    """
    granted, bound = frozenset(scopes), frozenset(queues)
    if not granted:
        raise InvalidOption("scopes", "a key without a scope can do nothing")
    if not 1 <= len(tenant) <= MAX_NAME_CHARS:
        raise InvalidOption("tenant", f"has {len(tenant)} characters; 1 to {MAX_NAME_CHARS} are allowed")
    if len(name) > MAX_NAME_CHARS:
        raise InvalidOption("name", f"has {len(name)} characters; {MAX_NAME_CHARS} are allowed")
    if bound and Scope.WORK not in granted:
        raise InvalidOption("queues", "are for keys with the scope work")
    if expires_at is not None and expires_at <= now_ms:
        raise InvalidOption("expires_at", "has passed")
    prefix = "".join(
        # 62 letters from 16 bits: the bias is under a thousandth, and the prefix is no secret.
        _PREFIX_ALPHABET[int.from_bytes(random_bytes(2)) % len(_PREFIX_ALPHABET)]
        for _ in range(PREFIX_CHARS)
    )
    secret = _urlsafe(random_bytes(SECRET_BYTES))
    key = ApiKey(
        prefix=prefix,
        secret_hash=digest(secret),
        tenant=tenant,
        scopes=granted,
        queues=bound,
        name=name,
        created_at=now_ms,
        expires_at=expires_at,
    )
    return MintedKey(key=key, token=f"{KEY_TAG}_{prefix}_{secret}")


def parse_key(token: str) -> tuple[str, str] | None:
    """A presented key's prefix and secret; None: it is no key."""
    matched = _KEY.fullmatch(token)
    return None if matched is None else (matched[1], matched[2])


def digest(secret: str) -> bytes:
    """What is stored of a secret."""
    return hashlib.sha256(secret.encode("ascii")).digest()


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
