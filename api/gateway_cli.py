"""`taskline gateway`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from taskline.infra.role import run_role
from taskline.infra.topics import DEFAULT_QUEUE
from taskline.settings import Settings


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--queue", default=DEFAULT_QUEUE, show_default=True, help="The queue to serve.")
@click.option("--host", help="Address to listen on. [default: gateway.host]")
@click.option(
    "--port", type=click.IntRange(0, 65_535), help="Port to listen on; 0: a free one. [default: gateway.port]"
)
@click.option(
    "--announce",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the base URL to this file once the port is open.",
)
@click.pass_obj
def gateway(
    settings: Settings, queue: str, host: str | None, port: int | None, announce: Path | None
) -> None:
    """Serve workers in any language over HTTP, until SIGTERM or SIGINT.

    They fetch the queue's tasks and report what became of them; API keys need the scope `work`. The log line `listening` has the
    address; /healthz, /readyz and /metrics are on the same port, /docs describes the protocol. Several processes share a queue.
    """
    from taskline.api.gateway_role import run_gateway  # noqa: PLC0415 - loads clients that --help can do without

    changed = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    chosen = settings.model_copy(update={"gateway": settings.gateway.model_copy(update=changed)})

    async def body(stop: asyncio.Event) -> None:
        await run_gateway(chosen, queue, stop, announce=announce)

    run_role("gateway", chosen.telemetry, body)
