"""`taskline types`: task types from a shell."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from taskline.errors import InvalidOption, InvalidTaskType
from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.tables import print_table
from taskline.infra.topics import DEFAULT_QUEUE
from taskline.schemas.catalogue import Registration
from taskline.schemas.events import Priority
from taskline.schemas.payloads import PayloadSchema
from taskline.schemas.types import TaskType
from taskline.settings import Settings, duration_ms

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def types() -> None:
    """Register task types and look at those that are registered."""


@types.command()
@click.argument("registry", metavar="MODULE:REGISTRY")
@_as_json
@click.pass_obj
def register(settings: Settings, registry: str, as_json: bool) -> None:
    """Register the task types of a registry of handlers, e.g. `myapp.tasks:registry`.

    Safe to repeat: what is registered as it is, is not published again. If one type can't read what is queued under an
    earlier schema, none is registered.
    """
    found = _types_of(registry)
    with TypeDirectory(settings) as directory:
        _print_registrations(directory.register(found), as_json=as_json)


@types.command()
@click.argument("name")
@click.option("--queue", default=DEFAULT_QUEUE, show_default=True, help="The queue that its tasks go to.")
@click.option(
    "--schema",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the payload's Avro schema. [default: any JSON is taken]",
)
@click.option(
    "--priority",
    type=click.Choice([priority.value for priority in Priority]),
    default=Priority.NORMAL.value,
    show_default=True,
    help="Of tasks that ask for none.",
)
@click.option("--timeout", help="How long one execution may take, e.g. 90s. [default: the worker's]")
@click.option(
    "--max-retries", type=int, default=3, show_default=True, help="Attempts that may follow the first."
)
@_as_json
@click.pass_obj
def define(
    settings: Settings,
    *,
    name: str,
    queue: str,
    schema: Path | None,
    priority: str,
    timeout: str | None,
    max_retries: int,
    as_json: bool,
) -> None:
    """Register one task type without a handler in Python, for workers in other languages.

    Safe to repeat, and refused, as `register` is.
    """
    try:
        timeout_ms = None if timeout is None else duration_ms(timeout)
    except ValueError as error:
        raise InvalidOption("--timeout", str(error)) from error
    task_type = TaskType(
        name=name,
        queue=queue,
        schema=None if schema is None else PayloadSchema.parse(schema.read_text(encoding="utf-8")),
        priority=Priority(priority),
        timeout_ms=timeout_ms,
        max_retries=max_retries,
    )
    with TypeDirectory(settings) as directory:
        _print_registrations(directory.register((task_type,)), as_json=as_json)


@types.command(name="list")
@_as_json
@click.pass_obj
def list_(settings: Settings, as_json: bool) -> None:
    """List the registered types."""
    with TypeDirectory(settings) as directory:
        found = [directory.get(name) for name in directory.names()]
    if as_json:
        click.echo(json.dumps([_summary(each) for each in found]))
        return
    headings = ("task type", "queue", "priority", "timeout", "retries", "payload")
    print_table(headings, map(_row, found))


@types.command()
@click.argument("name")
@_as_json
@click.pass_obj
def show(settings: Settings, name: str, as_json: bool) -> None:
    """Show one type with its payload schema and all earlier ones."""
    with TypeDirectory(settings) as directory:
        found = directory.get(name)
        schemas = directory.catalogue.schemas(name)
    versions = [
        {"fingerprint": each.fingerprint.hex(), "schema": json.loads(each.source)} for each in schemas
    ]
    if as_json:
        click.echo(json.dumps(_summary(found) | {"schemas": versions}))
        return
    for key, value in _summary(found).items():
        click.echo(f"{key}: {'-' if value is None else value}")
    for number, version in enumerate(versions, start=1):
        click.echo(f"schema {number} ({version['fingerprint']}):\n{json.dumps(version['schema'], indent=2)}")


def _print_registrations(registrations: Iterable[Registration], *, as_json: bool) -> None:
    rows = [{"task_type": each.task_type, "outcome": each.outcome} for each in registrations]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        click.echo(f"{row['outcome']} {row['task_type']}")


def _types_of(registry: str) -> tuple[TaskType, ...]:
    """The task types of `module:attribute`; modules are also looked for in the working directory.

    Raises:
        InvalidTaskType: there is no such registry.
    """
    module_name, separator, attribute = registry.partition(":")
    if not separator or not module_name or not attribute:
        raise InvalidTaskType(
            f"{registry!r} names no registry: give module:registry, e.g. myapp.tasks:registry"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        # The module is the user's, and so is what it raises.
        raise InvalidTaskType(f"importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    found = getattr(getattr(module, attribute, None), "types", None)
    if not isinstance(found, tuple | list) or not all(isinstance(each, TaskType) for each in found):
        raise InvalidTaskType(f"{registry!r} is no registry of tasks")
    return tuple(found)


def _summary(task_type: TaskType) -> dict[str, Any]:
    return {
        "task_type": task_type.name,
        "queue": task_type.queue,
        "priority": task_type.priority.value,
        "timeout_ms": task_type.timeout_ms,
        "max_retries": task_type.max_retries,
        "fingerprint": None if task_type.schema is None else task_type.schema.fingerprint.hex(),
    }


def _row(task_type: TaskType) -> tuple[str, ...]:
    timeout = "-" if task_type.timeout_ms is None else f"{task_type.timeout_ms / 1000:g} s"
    payload = "any JSON" if task_type.schema is None else task_type.schema.fingerprint.hex()
    return (
        task_type.name,
        task_type.queue,
        task_type.priority.value,
        timeout,
        str(task_type.max_retries),
        payload,
    )
