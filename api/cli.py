"""`taskline api`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from taskline.infra.role import run_role
from taskline.settings import Settings


@click.command()
@click.option("--host", help="Address to listen on. [default: api.host]")
@click.option(
    "--port", type=click.IntRange(0, 65_535), help="Port to listen on; 0: a free one. [default: api.port]"
)
@click.option(
    "--announce",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the base URL to this file once the port is open.",
)
@click.pass_obj
def api(settings: Settings, host: str | None, port: int | None, announce: Path | None) -> None:
    """Serve the HTTP API until SIGTERM or SIGINT.

    The log line `listening` has the address. /healthz, /readyz and /metrics are on the same port; /docs describes the API.
    """
    from taskline.api.role import run_api  # noqa: PLC0415 - loads clients that --help can do without

    changed = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    chosen = settings.model_copy(update={"api": settings.api.model_copy(update=changed)})

    async def body(stop: asyncio.Event) -> None:
        await run_api(chosen, stop, announce=announce)

    run_role("api", chosen.telemetry, body)
