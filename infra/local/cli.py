"""`taskline local`: the local stack from a shell."""

from __future__ import annotations

import json
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from taskline.infra.local.config import (
    CASSANDRA_HEAP_MB,
    DEFAULT_DIRECTORY,
    KAFKA_HEAP_MB,
    SERVICES,
    START_TIMEOUT_S,
    STOP_GRACE_S,
    CassandraConfig,
    KafkaConfig,
    ServiceName,
    StackConfig,
)
from taskline.infra.local.logs import follow, tail
from taskline.infra.local.stack import LocalStack
from taskline.infra.local.status import StackStatus

_Command = TypeVar("_Command", bound=Callable[..., Any])

# Exit status of `status` when a server does not answer, as the LSB has it for a service that is not running.
_EXIT_NOT_RUNNING = 3

_LOG_LINES = 50

_PORT = click.IntRange(1, 65_535)
_SECONDS = click.FloatRange(min=0)


def _directory_option(command: _Command) -> _Command:
    return click.option(
        "--dir",
        "directory",
        type=click.Path(file_okay=False, path_type=Path),
        help=f"The stack's folder. [default: {DEFAULT_DIRECTORY}]",
    )(command)


def _json_option(command: _Command) -> _Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def _only_option(command: _Command) -> _Command:
    return click.option("--only", type=click.Choice(SERVICES), help="Just this server.")(command)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def local() -> None:
    """Run Kafka and Cassandra on this machine, on Java, without Docker.

    They listen on 127.0.0.1 only. Their jars come from Maven at the first run and are then cached
    (TASKLINE_CACHE_DIR, or the user's cache folder).
    """


@local.command()
@_directory_option
@_only_option
@_json_option
@click.option("--kafka-port", type=_PORT, help="Kafka's port. [default: the last one, else any free one]")
@click.option(
    "--cassandra-port", type=_PORT, help="Cassandra's port. [default: the last one, else any free one]"
)
@click.option(
    "--kafka-heap-mb",
    type=click.IntRange(min=64),
    default=KAFKA_HEAP_MB,
    show_default=True,
    help="Kafka's Java heap.",
)
@click.option(
    "--cassandra-heap-mb",
    type=click.IntRange(min=256),
    default=CASSANDRA_HEAP_MB,
    show_default=True,
    help="Cassandra's Java heap.",
)
@click.option(
    "--ephemeral",
    is_flag=True,
    help="Stay in the foreground in a temporary folder; Ctrl-C ends the servers and removes it.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=START_TIMEOUT_S,
    show_default=True,
    help="Seconds until all must answer; downloads do not count.",
)
def up(
    *,
    directory: Path | None,
    only: ServiceName | None,
    as_json: bool,
    kafka_port: int | None,
    cassandra_port: int | None,
    kafka_heap_mb: int,
    cassandra_heap_mb: int,
    ephemeral: bool,
    timeout_s: float,
) -> None:
    """Start the servers and print their addresses; those that run already are left alone."""
    stack = LocalStack(
        StackConfig(
            directory=directory,
            ephemeral=ephemeral,
            services=SERVICES if only is None else (only,),
            kafka=KafkaConfig(port=kafka_port, heap_mb=kafka_heap_mb),
            cassandra=CassandraConfig(port=cassandra_port, heap_mb=cassandra_heap_mb),
            start_timeout_s=timeout_s,
        )
    )
    stack.fetch()
    if ephemeral:
        with ExitStack() as cleanup:
            with _waiting(stack):
                cleanup.enter_context(stack.running())
            ended = _on_signal()
            _print_up(stack, as_json=as_json)
            ended.wait()
    else:
        with _waiting(stack):
            stack.start()
        _print_up(stack, as_json=as_json)


@local.command()
@_directory_option
@_only_option
@_json_option
@click.option(
    "--grace",
    "grace_s",
    type=_SECONDS,
    default=STOP_GRACE_S,
    show_default=True,
    help="Seconds to wait before a server is killed.",
)
def down(*, directory: Path | None, only: ServiceName | None, as_json: bool, grace_s: float) -> None:
    """Stop the servers; their data stay."""
    stopped = LocalStack(StackConfig(directory=directory, stop_grace_s=grace_s)).stop(only)
    if as_json:
        click.echo(json.dumps({"stopped": sorted(stopped)}))
    else:
        click.echo(f"stopped {' and '.join(sorted(stopped))}" if stopped else "nothing was running")


@local.command()
@_directory_option
@_json_option
def status(*, directory: Path | None, as_json: bool) -> None:
    """Show how the servers are; exit status 3 unless all of them answer."""
    found = LocalStack(StackConfig(directory=directory)).status()
    if as_json:
        click.echo(json.dumps(found.to_json()))
    elif not found.services:
        click.echo(f"no stack was ever started in {found.directory}")
    else:
        _print_table(found)
    if not found.running:
        raise click.exceptions.Exit(_EXIT_NOT_RUNNING)


@local.command()
@_directory_option
@click.argument("service", type=click.Choice(SERVICES), required=False)
@click.option("-f", "--follow", "following", is_flag=True, help="Go on as lines are added; name one server.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    default=_LOG_LINES,
    show_default=True,
    help="How many of the last lines.",
)
def logs(*, directory: Path | None, service: ServiceName | None, following: bool, lines: int) -> None:
    """Print the end of a server's log, or of both."""
    stack = LocalStack(StackConfig(directory=directory))
    if not following:
        for name in SERVICES if service is None else (service,):
            if service is None:
                click.secho(f"== {name}: {stack.log_file(name)}", bold=True)
            for line in tail(stack.log_file(name), lines):
                click.echo(line)
        return
    if service is None:
        raise click.UsageError(f"--follow needs one of: {', '.join(SERVICES)}")
    for line in follow(stack.log_file(service), lines):
        click.echo(line)


@local.command()
@_directory_option
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def reset(*, directory: Path | None, yes: bool) -> None:
    """Kill the servers and delete their data and logs."""
    stack = LocalStack(StackConfig(directory=directory))
    if not yes:
        click.confirm(f"Delete all data of the local stack in {stack.directory}?", abort=True)
    stack.reset()
    click.echo(f"the stack in {stack.directory} is empty")


@contextmanager
def _waiting(stack: LocalStack) -> Iterator[None]:
    """Show on stderr that a start takes its time."""
    text = f"waiting for {' and '.join(stack.config.services)} to answer"
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        click.echo(text, err=True)
        yield


def _on_signal() -> threading.Event:
    """An event that SIGINT or SIGTERM sets."""
    ended = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: ended.set())
    return ended


def _environment(found: StackStatus) -> dict[str, str]:
    """The settings that point Taskline at the stack."""
    variables: dict[str, str] = {}
    for service in found.services:
        host, _, port = service.address.rpartition(":")
        if service.name == "kafka":
            variables["TASKLINE_KAFKA__BOOTSTRAP_SERVERS"] = service.address
        else:
            variables |= {"TASKLINE_CASSANDRA__CONTACT_POINTS": host, "TASKLINE_CASSANDRA__PORT": port}
    return variables


def _print_up(stack: LocalStack, *, as_json: bool) -> None:
    found = stack.status()
    variables = _environment(found)
    if as_json:
        click.echo(json.dumps({**found.to_json(), "environment": variables}))
        return
    _print_table(found)
    click.echo()
    for name, value in variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")


def _print_table(found: StackStatus) -> None:
    """One line a server."""
    click.echo(f"in {found.directory}")
    for service in found.services:
        detail = ""
        if service.pid is not None:
            detail = f"pid {service.pid}, {service.resident_mb} MB, up {service.uptime_s} s"
        title = f"{service.name} {service.version}"
        click.echo(f"{title:<18}{service.condition:<9}{service.address:<17} {detail}".rstrip())
