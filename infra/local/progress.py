"""Say on stderr how a download goes: a moving line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

# A plain line at most this often: a build log shows life without being flooded. Seconds.
_PLAIN_INTERVAL_S = 10.0

_DOWNLOADED = re.compile(r"Downloaded from .*/([^/\s]+\.(?:jar|gz))\b")


class FetchProgress(Protocol):
    """What follows Maven's output."""

    def line(self, text: str) -> None:
        """Take one line of it."""


@contextmanager
def fetch_progress(title: str, megabytes: int) -> Iterator[FetchProgress]:
    """Announce a download of about so many megabytes, follow it, and say how long it took."""
    started = time.monotonic()
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TextColumn("[dim]{task.fields[last]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            yield _RichProgress(bar, f"fetching {title} (about {megabytes} MB, once)")
    else:
        click.echo(f"fetching {title} from Maven (about {megabytes} MB, once)", err=True)
        yield _PlainProgress(title)
    click.echo(f"fetched {title} in {time.monotonic() - started:.0f} s", err=True)


class _RichProgress:
    """A spinner with the number of files so far and the name of the last."""

    def __init__(self, bar: Progress, label: str) -> None:
        self._bar = bar
        self._label = label
        self._files = 0
        self._task = bar.add_task(label, total=None, last="")

    def line(self, text: str) -> None:
        match = _DOWNLOADED.search(text)
        if match is not None:
            self._files += 1
            description = f"{self._label}: {self._files} files"
            self._bar.update(self._task, description=description, last=match.group(1))


class _PlainProgress:
    """A line now and then."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._files = 0
        self._spoke_at = time.monotonic()

    def line(self, text: str) -> None:
        if _DOWNLOADED.search(text) is None:
            return
        self._files += 1
        if time.monotonic() - self._spoke_at >= _PLAIN_INTERVAL_S:
            self._spoke_at = time.monotonic()
            click.echo(f"fetching {self._title}: {self._files} files so far", err=True)
