"""`taskline status`, `wait`, `list` and `cancel`: tasks over the HTTP API, from a shell."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from taskline.client.calls import MAX_PAGE, ListFields
from taskline.client.errors import NotEnded
from taskline.client.options import DEFAULT_URL, KEY_VARIABLE, URL_VARIABLE
from taskline.client.results import Attempt, Progress, TaskSnapshot
from taskline.client.sync import Client
from taskline.infra.instants import INSTANT
from taskline.schemas.events import Priority
from taskline.state.status import TaskStatus

F = TypeVar("F", bound=Callable[..., Any])

_HELP = {"help_option_names": ["-h", "--help"]}
# Exit statuses of `taskline wait`: ended, but not as completed; and timeout(1)'s for out of time.
_EXIT_NOT_COMPLETED = 1
_EXIT_NOT_ENDED = 124
_HEADINGS = ("task", "type", "status", "priority", "queue", "created", "attempt", "last error")
_ATTEMPT_HEADINGS = ("attempt", "outcome", "started", "ended", "worker", "error")
_MAX_ERROR_CHARS = 80

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, as the API has it.")


def _on_api(command: F) -> F:
    """The options that say which API."""
    for option in (
        click.option("--key", envvar=KEY_VARIABLE, help=f"API key. [default: ${KEY_VARIABLE}]"),
        click.option(
            "--url",
            envvar=URL_VARIABLE,
            default=DEFAULT_URL,
            help=f"The API's address. [default: ${URL_VARIABLE}, or {DEFAULT_URL}]",
        ),
    ):
        command = option(command)
    return command


@click.command(context_settings=_HELP)
@click.argument("task_id", type=click.UUID)
@click.option("--history", "with_history", is_flag=True, help="Show every execution, too.")
@_as_json
@_on_api
def status(task_id: Any, with_history: bool, as_json: bool, url: str, key: str | None) -> None:  # noqa: ANN401 - UUID
    """Show a task's state."""
    with Client(url, key) as client:
        task = client.get(task_id)
        history = client.history(task_id) if with_history else None
    if as_json:
        _print_json(dict(task.raw) | ({} if history is None else {"history": dict(history.raw)}))
        return
    _print_task(task)
    if history is not None:
        _print_rows(_ATTEMPT_HEADINGS, map(_attempt_row, history.attempts))


@click.command(context_settings=_HELP)
@click.argument("task_id", type=click.UUID)
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds. [default: however long it takes]")
@_as_json
@_on_api
def wait(task_id: Any, timeout: float | None, as_json: bool, url: str, key: str | None) -> None:  # noqa: ANN401
    """Wait until a task has ended, and show how.

    Exit status: 0 completed, 1 ended in another way, 124 not ended in time.
    """
    with Client(url, key) as client:
        try:
            task, code = client.wait(task_id, timeout), 0
        except NotEnded as error:
            task, code = error.task, _EXIT_NOT_ENDED
    if code == 0 and task.status is not TaskStatus.COMPLETED:
        code = _EXIT_NOT_COMPLETED
    if as_json:
        _print_json(task.raw)
    else:
        _print_task(task)
    sys.exit(code)


@click.command(name="list", context_settings=_HELP)
@click.option("--status", type=click.Choice([each.value for each in TaskStatus]), help="In this state.")
@click.option("--type", "task_type", help="Of this task type.")
@click.option("--priority", type=click.Choice([each.value for each in Priority]), help="Of this priority.")
@click.option("--queue", help="Of this queue.")
@click.option("--created-after", type=INSTANT, help="Created at this instant (ISO 8601) or later.")
@click.option("--created-before", type=INSTANT, help="Created before this instant.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Most tasks.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one task a line.")
@_on_api
def list_(limit: int, as_json: bool, url: str, key: str | None, **chosen: Any) -> None:  # noqa: ANN401 - the filters
    """List tasks, newest first."""
    filters: ListFields = {name: each for name, each in chosen.items() if each is not None}  # type: ignore[assignment]
    with Client(url, key) as client:
        # One more than shown tells whether there are more.
        size = min(limit + 1, MAX_PAGE)
        found = list(islice(client.list(page_size=size, **filters), limit + 1))
    if as_json:
        for task in found[:limit]:
            _print_json(task.raw)
    else:
        _print_rows(_HEADINGS, map(_row, found[:limit]))
    if len(found) > limit:
        click.echo("there are more: raise --limit, or narrow it down with --created-before", err=True)


@click.command(context_settings=_HELP)
@click.argument("task_id", type=click.UUID)
@click.option("--running", is_flag=True, help="Abort it if it runs.")
@_as_json
@_on_api
def cancel(task_id: Any, running: bool, as_json: bool, url: str, key: str | None) -> None:  # noqa: ANN401
    """Withdraw a task, so that its handler does not start (again)."""
    with Client(url, key) as client:
        done = client.cancel(task_id, running=running)
    if as_json:
        _print_json(done.raw)
    elif done.decided:
        click.echo(str(done.status))
    else:
        click.echo("requested")
        click.echo("it is in the log; `taskline status` tells what came of it", err=True)


def _print_json(document: Mapping[str, Any]) -> None:
    click.echo(json.dumps(document, ensure_ascii=False))


def _print_task(task: TaskSnapshot) -> None:
    """What there is of a task: a table on a terminal, name and value by a tab elsewhere."""
    told: dict[str, Any] = dict(task.raw)
    if task.progress is not None:
        told["progress"] = _progress(task.progress)
    pairs = [
        (name, _plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
        for name, value in told.items()
        if value is not None
    ]
    console = _console()
    if not console.is_terminal:
        for name, value in pairs:
            click.echo(f"{name}\t{value}")
        return
    table = Table("", "", show_header=False)
    for name, value in pairs:
        table.add_row(name, value)
    console.print(table)


def _print_rows(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    console = _console()
    plain = (tuple(map(_plain, row)) for row in rows)
    if not console.is_terminal:
        for row in plain:
            click.echo("\t".join(row))
        return
    table = Table(*headings)
    for row in plain:
        table.add_row(*row)
    console.print(table)


def _console() -> Console:
    # What tasks say is shown as it is: no colours, no brackets that mean something.
    return Console(markup=False, highlight=False, emoji=False)


def _plain(text: str) -> str:
    """Without characters that steer a terminal: names and messages are whatever somebody submitted."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def _row(task: TaskSnapshot) -> tuple[str, ...]:
    error = "" if task.last_error is None else _short(task.last_error.error_class, task.last_error.message)
    return (
        str(task.task_id),
        task.task_type,
        task.status,
        task.priority,
        task.queue,
        _instant(task.created_at),
        str(task.attempt),
        error,
    )


def _attempt_row(attempt: Attempt) -> tuple[str, ...]:
    error = (
        attempt.reason or ""
        if attempt.error is None
        else _short(attempt.error.error_class, attempt.error.message)
    )
    return (
        str(attempt.attempt),
        attempt.outcome,
        _instant(attempt.started_at),
        _instant(attempt.ended_at),
        attempt.worker,
        error,
    )


def _progress(progress: Progress) -> str:
    percent = None if progress.fraction is None else f"{progress.fraction:.0%}"
    said = " ".join(each for each in (percent, progress.message) if each)
    return f"{said} ({_instant(progress.at)})"


def _short(error_class: str, message: str) -> str:
    # One line, whatever the message has in it.
    text = " ".join(f"{error_class}: {message}".split())
    return text if len(text) <= _MAX_ERROR_CHARS else text[: _MAX_ERROR_CHARS - 1] + "…"


def _instant(at: datetime | None) -> str:
    return "" if at is None else at.isoformat(timespec="milliseconds")
