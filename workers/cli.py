"""`taskline worker`: run the handlers of a registry."""

from __future__ import annotations

import click

from taskline.errors import did_you_mean, nearest
from taskline.infra.topics import DEFAULT_QUEUE
from taskline.schemas.events import Priority
from taskline.settings import Settings
from taskline.workers.registry import load_registry
from taskline.workers.role import main

# As worker.concurrency in taskline.settings.
_MOST_SLOTS = 10_000


def _priorities(context: click.Context, parameter: click.Parameter, value: str) -> frozenset[Priority]:
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if name not in tuple(Priority):
            raise click.BadParameter(
                f"{name!r} is no priority: {', '.join(Priority)}{did_you_mean(nearest(name, Priority))}"
            )
    return frozenset(map(Priority, names))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("registry", metavar="MODULE:REGISTRY")
@click.option("--queue", default=DEFAULT_QUEUE, show_default=True, help="The queue to serve.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, _MOST_SLOTS),
    help="Handlers that run at once. [default: worker.concurrency]",
)
@click.option(
    "--priorities",
    default=",".join(Priority),
    show_default=True,
    callback=_priorities,
    help="The priorities to serve, as a comma-separated list: a pool of its own for high, say.",
)
@click.pass_obj
def worker(
    settings: Settings, /, registry: str, queue: str, concurrency: int | None, priorities: frozenset[Priority]
) -> None:
    """Run the handlers of a registry until SIGTERM, which drains: running handlers may finish.

    MODULE:REGISTRY names a taskline.Registry, e.g. shop.tasks:registry; the working directory is searched first. Several
    processes share a queue by partitions.
    """
    if concurrency is not None:
        chosen = settings.worker.model_copy(update={"concurrency": concurrency})
        settings = settings.model_copy(update={"worker": chosen})
    main(settings, load_registry(registry), queue, reference=registry, priorities=priorities)
