"""`taskline keys`: make, list and revoke API keys. They are in Cassandra, so it needs no running API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import click

from taskline.errors import InvalidOption, TasklineError
from taskline.infra.role import SystemClock
from taskline.infra.tables import print_table
from taskline.schemas.ids import from_ms
from taskline.settings import Settings, duration_ms
from taskline.state.keys import ApiKey, MintedKey, Scope, mint
from taskline.state.keys_cassandra import open_keys

# A prefix is taken with a chance of one in 10^14 per key there is.
_TRIES = 3
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def keys() -> None:
    """Make, list and revoke API keys."""


@keys.command()
@click.option("--tenant", required=True, help="Whose tasks the key's holder submits and sees.")
@click.option(
    "--scope",
    "scopes",
    required=True,
    multiple=True,
    type=click.Choice([scope.value for scope in Scope]),
    help="What the holder may do; repeat for several.",
)
@click.option(
    "--queue", "queues", multiple=True, help="With the scope work: a queue to work on. [default: all]"
)
@click.option("--name", default="", help="For people: what the key is for.")
@click.option("--expires-in", help="How long the key is good for, e.g. 12h or 90d. [default: for ever]")
@_as_json
@click.pass_obj
def create(
    settings: Settings,
    *,
    tenant: str,
    scopes: Sequence[str],
    queues: Sequence[str],
    name: str,
    expires_in: str | None,
    as_json: bool,
) -> None:
    """Make a key and print it. This is the only time: what is stored of it can't be turned back into it."""
    now_ms = SystemClock().now_ms()
    try:
        expires_at = None if expires_in is None else now_ms + duration_ms(expires_in)
    except ValueError as error:
        raise InvalidOption("--expires-in", str(error)) from error

    def new() -> MintedKey:
        return mint(
            tenant=tenant,
            scopes=map(Scope, scopes),
            queues=queues,
            name=name,
            expires_at=expires_at,
            now_ms=now_ms,
        )

    async def stored() -> MintedKey:
        async with open_keys(settings) as store:
            for _ in range(_TRIES):
                minted = new()
                if await store.add(minted.key):
                    return minted
        raise TasklineError(f"{_TRIES} new prefixes were all taken")

    # Said before anything is asked of Cassandra.
    new()
    minted = asyncio.run(stored())
    if as_json:
        click.echo(json.dumps({"key": minted.token} | _document(minted.key)))
        return
    click.echo("Keep this key now, it is not shown again:", err=True)
    click.echo(minted.token)


@keys.command(name="list")
@click.option("--tenant", help="Only this tenant's.")
@_as_json
@click.pass_obj
def list_(settings: Settings, *, tenant: str | None, as_json: bool) -> None:
    """List the keys, oldest first, by the part of them that is no secret."""

    async def read() -> Sequence[ApiKey]:
        async with open_keys(settings) as store:
            return await store.keys()

    found = [key for key in asyncio.run(read()) if tenant is None or key.tenant == tenant]
    if as_json:
        click.echo(json.dumps([_document(key) for key in found]))
        return
    headings = ("prefix", "tenant", "scopes", "queues", "created", "expires", "state", "name")
    rows = [
        (
            key.prefix,
            key.tenant,
            ",".join(sorted(key.scopes)),
            ",".join(sorted(key.queues)),
            _instant(key.created_at) or "",
            _instant(key.expires_at) or "never",
            _state(key, SystemClock().now_ms()),
            key.name,
        )
        for key in found
    ]
    print_table(headings, rows)


@keys.command()
@click.argument("prefix")
@_as_json
@click.pass_obj
def revoke(settings: Settings, *, prefix: str, as_json: bool) -> None:
    """Revoke the key with this PREFIX. Each API process goes on with it for up to api.key_cache_seconds."""

    async def stored() -> ApiKey | None:
        async with open_keys(settings) as store:
            return await store.revoke(prefix, SystemClock().now_ms())

    key = asyncio.run(stored())
    if key is None:
        raise InvalidOption("prefix", f"there is no key {prefix!r}; give the 8 characters after `tk_`")
    if as_json:
        click.echo(json.dumps(_document(key)))
        return
    click.echo(f"revoked {key.prefix} at {_instant(key.revoked_at)}")


def _document(key: ApiKey) -> dict[str, Any]:
    return {
        "prefix": key.prefix,
        "tenant": key.tenant,
        "scopes": sorted(key.scopes),
        "queues": sorted(key.queues),
        "name": key.name,
        "created_at": _instant(key.created_at),
        "expires_at": _instant(key.expires_at),
        "revoked_at": _instant(key.revoked_at),
    }


def _state(key: ApiKey, now_ms: int) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "good" if key.usable(now_ms) else "expired"


def _instant(at_ms: int | None) -> str | None:
    return None if at_ms is None else from_ms(at_ms).isoformat(timespec="seconds")
