"""Rows on standard output: a table for people at a terminal, tab-separated lines for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click
from rich.console import Console
from rich.table import Table


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under their headings, which only a terminal shows."""
    console = Console()
    if not console.is_terminal:
        for row in rows:
            click.echo("\t".join(row))
        return
    table = Table(*headings)
    for row in rows:
        table.add_row(*row)
    console.print(table)
