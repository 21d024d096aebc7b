"""`taskline worker`: run the handlers of a registry."""

from __future__ import annotations

import click

from taskline.infra.topics import DEFAULT_QUEUE
from taskline.settings import Settings
from taskline.workers.registry import load_registry
from taskline.workers.role import main

# As worker.concurrency in taskline.settings.
_MOST_SLOTS = 10_000


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("registry", metavar="MODULE:REGISTRY")
@click.option("--queue", default=DEFAULT_QUEUE, show_default=True, help="The queue to serve.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, _MOST_SLOTS),
    help="Handlers that run at once. [default: worker.concurrency]",
)
@click.pass_obj
def worker(settings: Settings, /, registry: str, queue: str, concurrency: int | None) -> None:
    """Run the handlers of a registry until SIGTERM, which drains: running handlers may finish.

    MODULE:REGISTRY names a taskline.Registry, e.g. shop.tasks:registry; the working directory is searched first. Several
    processes share a queue by partitions.
    """
    if concurrency is not None:
        chosen = settings.worker.model_copy(update={"concurrency": concurrency})
        settings = settings.model_copy(update={"worker": chosen})
    main(settings, load_registry(registry), queue, reference=registry)
