"""`taskline view`: the view's tables, and one task as the view has it."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import datetime
from typing import Any

import click
from rich.console import Console

from taskline.infra.role import SystemClock
from taskline.infra.tables import print_table
from taskline.schemas.confluent import codec_for
from taskline.schemas.ids import from_ms, parse_task_id
from taskline.settings import Settings
from taskline.state.cassandra import CassandraStore
from taskline.state.fold import TaskHistory
from taskline.state.migrations import check_view, migrate
from taskline.state.reader import StatusReader

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def view() -> None:
    """Create and check the view's tables; look at a task."""


@view.command("migrate")
@_as_json
@click.pass_obj
def migrate_command(settings: Settings, as_json: bool) -> None:
    """Make the keyspace and bring its tables up to date. Safe to repeat, also by several at once."""
    report = migrate(settings)
    if as_json:
        click.echo(json.dumps(asdict(report)))
        return
    for name in report.newly_applied:
        click.echo(f"applied {name}")
    if not report.newly_applied:
        click.echo(f"keyspace {report.keyspace} is up to date")


@view.command("check")
@_as_json
@click.pass_obj
def check_command(settings: Settings, as_json: bool) -> None:
    """Say whether every role could use the view; exit status 1 and each problem in words if not."""
    report = check_view(settings)
    if as_json:
        click.echo(json.dumps(asdict(report)))
        return
    click.echo(
        f"keyspace {report.keyspace} is as declared: {len(report.applied)} migration(s), "
        f"{report.lanes} lanes, buckets of {report.bucket_seconds} s"
    )


@view.command()
@click.argument("task_id")
@click.option("--tenant", default="default", show_default=True, help="Whose task it is.")
@_as_json
@click.pass_obj
def show(settings: Settings, task_id: str, tenant: str, as_json: bool) -> None:
    """Print a task's state, its attempts and its events."""
    parsed = parse_task_id(task_id, SystemClock().now_ms())
    told = asyncio.run(_history(settings, parsed, tenant))
    if as_json:
        click.echo(json.dumps(as_document(told)))
        return
    _print(Console(), told)


async def _history(settings: Settings, task_id: uuid.UUID, tenant: str) -> TaskHistory:
    store = await CassandraStore.connect(settings)
    try:
        reader = StatusReader(store, codec_for(settings.schemas), settings.api)
        return await reader.history(task_id, tenant=tenant)
    finally:
        await store.close()


def as_document(told: TaskHistory) -> dict[str, Any]:
    """A history as JSON takes it: instants in ISO 8601, bytes as text or base64."""
    return {
        "task": _plain(told.state) | {"retry_count": told.state.retry_count},
        "attempts": [_plain(attempt) for attempt in told.attempts],
        "events": [
            {"offset": each.offset, "index": each.index, "kind": type(each.event).__name__}
            | _plain(each.event)
            for each in told.events
        ],
    }


def _plain(value: Any) -> Any:  # noqa: ANN401 - any value of a record
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value


def _print(console: Console, told: TaskHistory) -> None:
    document = as_document(told)
    state: Mapping[str, Any] = document["task"]
    for name, value in state.items():
        if value is not None:
            console.print(f"{name:14} {value}", highlight=False, soft_wrap=True, markup=False)
    print_table(
        ("attempt", "outcome", "worker", "started", "ended", "error"),
        [
            (
                str(attempt.attempt),
                attempt.outcome.value,
                attempt.worker,
                attempt.started_at.isoformat(),
                "" if attempt.ended_at is None else attempt.ended_at.isoformat(),
                "" if attempt.error is None else f"{attempt.error.error_class}: {attempt.error.message}",
            )
            for attempt in told.attempts
        ],
    )
    print_table(
        ("place", "event", "at", "worker"),
        [
            (
                f"{each.offset}.{each.index}",
                type(each.event).__name__,
                from_ms(each.event.at).isoformat(),
                each.event.worker,
            )
            for each in told.events
        ],
    )
