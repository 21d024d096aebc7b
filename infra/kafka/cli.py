"""`taskline topics`: the topology from a shell."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from taskline.infra.kafka.admin import TopicDescription, check_topology, create_topics, describe_topics
from taskline.infra.kafka.offsets import Seed
from taskline.infra.tables import print_table
from taskline.settings import Settings

_SECONDS_PER_DAY = 86_400
_UNLIMITED = "-1"

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def topics() -> None:
    """Create, check and describe the topics that the settings declare."""


@topics.command()
@click.option(
    "--seed",
    type=click.Choice(["earliest", "latest"]),
    help="Where worker groups begin that have no offsets on a topic with records. [default: refuse to guess]",
)
@_as_json
@click.pass_obj
def create(settings: Settings, seed: Seed | None, as_json: bool) -> None:
    """Make what is declared. Safe to repeat; never deletes, shrinks, or changes the number of lanes."""
    report = create_topics(settings, seed=seed)
    if as_json:
        click.echo(json.dumps(asdict(report)))
        return
    for name in report.created:
        click.echo(f"created {name}")
    for name, (before, after) in report.grown.items():
        click.echo(f"grown {name} from {before} to {after} partitions")
    for name, changes in report.altered.items():
        click.echo(f"changed {name}: {', '.join(f'{key}={value}' for key, value in changes.items())}")
    for group in report.seeded:
        click.echo(f"seeded {group}")
    if not (report.created or report.grown or report.altered or report.seeded):
        click.echo("everything is in place")


@topics.command()
@_as_json
@click.pass_obj
def check(settings: Settings, as_json: bool) -> None:
    """Say whether every role could start; exit status 1 and each problem in words if not."""
    check_topology(settings, queues=settings.topics.queues)
    click.echo(json.dumps({"problems": []}) if as_json else "topics and groups are as declared")


@topics.command()
@_as_json
@click.pass_obj
def describe(settings: Settings, as_json: bool) -> None:
    """Show each declared topic beside what the broker has."""
    described = describe_topics(settings)
    if as_json:
        click.echo(json.dumps([_as_dict(each) for each in described]))
        return
    headings = ("topic", "partitions", "copies", "retention", "state")
    print_table(headings, map(_row, described))


def _row(each: TopicDescription) -> tuple[str, str, str, str, str]:
    seen = each.observed
    if seen is None:
        return each.spec.name, "-", "-", "-", "missing"
    state = "; ".join(problem.what for problem in each.problems) or "ok"
    return (
        each.spec.name,
        str(seen.partitions),
        str(seen.replication_factor),
        _days(seen.config.get("retention.ms")),
        state,
    )


def _days(retention_ms: str | None) -> str:
    if retention_ms is None:
        return "?"
    return "for ever" if retention_ms == _UNLIMITED else f"{int(retention_ms) / 1000 / _SECONDS_PER_DAY:g} d"


def _as_dict(each: TopicDescription) -> dict[str, Any]:
    seen = each.observed
    return {
        "topic": each.spec.name,
        "declared": {
            "partitions": each.spec.partitions,
            "replication_factor": each.spec.replication_factor,
            "config": dict(each.spec.config),
        },
        "observed": None
        if seen is None
        else {
            "partitions": seen.partitions,
            "replication_factor": seen.replication_factor,
            "leaderless": list(seen.leaderless),
            "config": {name: seen.config.get(name) for name in each.spec.config},
        },
        "problems": [problem.what for problem in each.problems],
    }
