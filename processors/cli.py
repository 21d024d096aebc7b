"""`taskline projector`: the view's writer from a shell."""

from __future__ import annotations

import click

from taskline.processors.role import main
from taskline.settings import Settings


@click.command()
@click.pass_obj
def projector(settings: Settings) -> None:
    """Fold the log into the view until SIGTERM.

    Several processes share the work by partitions. Needs the topics (`taskline topics create`) and the view
    (`taskline view migrate`); waits for Kafka and Cassandra when they are away.
    """
    main(settings)
