"""The `taskline` command. Subcommands load on use, so that each needs only its own extra."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

from taskline import __version__
from taskline.errors import InvalidSettings, MissingExtra, TasklineError
from taskline.infra.telemetry import configure_logging
from taskline.settings import load_settings

# command → (module that defines it, its attribute there, the extra it needs, one line of help)
_COMMANDS: dict[str, tuple[str, str, str, str]] = {
    "api": ("taskline.api.cli", "api", "api", "Serve the HTTP API."),
    "cancel": ("taskline.client.cli", "cancel", "client", "Withdraw a task (HTTP API)."),
    "delay": ("taskline.processors.delay_cli", "delay", "", "Move what waits to where it is due."),
    "dlq": ("taskline.producers.dlq_cli", "dlq", "view", "Look at dead letters, replay and discard them."),
    "gateway": ("taskline.api.gateway_cli", "gateway", "api", "Serve workers in any language over HTTP."),
    "keys": ("taskline.api.keys_cli", "keys", "api", "Make, list and revoke API keys."),
    "list": ("taskline.client.cli", "list_", "client", "List tasks, newest first (HTTP API)."),
    "local": ("taskline.infra.local.cli", "local", "local", "Run Kafka and Cassandra on this machine."),
    "projector": ("taskline.processors.cli", "projector", "projector", "Fold the log into the view."),
    "status": ("taskline.client.cli", "status", "client", "Show a task's state (HTTP API)."),
    "submit": ("taskline.producers.cli", "submit", "", "Submit one task."),
    "topics": ("taskline.infra.kafka.cli", "topics", "", "Create, check and describe the topics."),
    "types": ("taskline.infra.kafka.types_cli", "types", "", "Register and list task types."),
    "view": ("taskline.state.cli", "view", "view", "Create and check the view's tables."),
    "wait": ("taskline.client.cli", "wait", "client", "Wait until a task has ended (HTTP API)."),
    "worker": ("taskline.workers.cli", "worker", "", "Run the handlers of a registry."),
}
# Exit status of a command line or a setting that can't be right (sysexits: EX_USAGE is 64; click uses 2).
_EXIT_USAGE = 2


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, extra, _ = _COMMANDS[cmd_name]
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if not extra or (error.name or "").startswith("taskline"):
                raise
            raise MissingExtra(extra, error.name or module) from error
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # From the table, so that --help imports nothing and works without any extra.
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry[3]) for name, entry in sorted(_COMMANDS.items())])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="taskline")
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Settings file (TOML). [default: taskline.toml, if there is one]",
)
@click.pass_context
def cli(ctx: click.Context, config: Path | None) -> None:
    """Taskline: a distributed task queue whose truth is a Kafka log.

    Settings come from TASKLINE_<SECTION>__<NAME> variables and a TOML file; docs/settings.md lists them.
    """
    settings = ctx.obj = load_settings(config_file=config)
    # Lines on stderr: standard output is the command's answer, for people and for pipes.
    configure_logging(settings.telemetry)


def main() -> None:
    """Run the command line; errors that Taskline raises on purpose are one line on stderr and a non-zero exit."""
    try:
        cli(prog_name="taskline")
    except InvalidSettings as error:
        click.echo(f"taskline: {error}", err=True)
        sys.exit(_EXIT_USAGE)
    except TasklineError as error:
        click.echo(f"taskline: {error}", err=True)
        sys.exit(1)
