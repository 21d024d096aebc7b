"""`taskline delay`: the forwarder of what waits, from a shell."""

from __future__ import annotations

import click

from taskline.processors.delay_role import main
from taskline.settings import Settings


@click.command()
@click.pass_obj
def delay(settings: Settings) -> None:
    """Forward delayed tasks and retries when they are due, until SIGTERM.

    Several processes share the work by partitions. Needs the topics (`taskline topics create`); waits for Kafka when it is away.
    A tier that is not declared any more is emptied into the others.
    """
    main(settings)
