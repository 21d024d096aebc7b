"""`taskline submit`: one task from a shell."""

from __future__ import annotations

import json
from typing import Any

import click
import orjson

from taskline.infra.instants import INSTANT
from taskline.producers.producer import TaskProducer
from taskline.producers.submission import OptionFields
from taskline.schemas.events import Priority
from taskline.settings import Settings


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("task_type", metavar="TYPE")
@click.argument("payload", default="null", metavar="[PAYLOAD-JSON|-]")
@click.option(
    "--priority", type=click.Choice([each.value for each in Priority]), help="[default: the task type's]"
)
@click.option("--timeout", "timeout_seconds", type=float, help="Seconds that one execution may take.")
@click.option("--max-retries", type=int, help="Attempts that may follow the first.")
@click.option("--delay", type=float, help="Seconds before which it does not start.")
@click.option("--not-before", type=INSTANT, help="An instant (ISO 8601) before which it does not start.")
@click.option("--start-by", type=INSTANT, help="An instant after which it is not worth starting.")
@click.option("--tenant", default="default", show_default=True, help="Who the task belongs to.")
@click.option("--affinity-key", help="Tasks with one key go to one worker.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the id alone.")
@click.pass_obj
def submit(settings: Settings, /, task_type: str, payload: str, as_json: bool, **options: Any) -> None:  # noqa: ANN401 - click's
    """Submit one task and print its id once Kafka has acknowledged it.

    The payload is JSON; `-` reads it from standard input. Without one it is null.
    """
    text = click.get_text_stream("stdin").read() if payload == "-" else payload
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise click.BadParameter(f"not JSON: {error}", param_hint="PAYLOAD-JSON") from error
    chosen: OptionFields = {name: each for name, each in options.items() if each is not None}  # type: ignore[assignment]
    with TaskProducer(settings, client_id="taskline-submit") as producer:
        handle = producer.submit(task_type, value, **chosen)
    if as_json:
        position = handle.position
        described = {
            "task_id": str(handle.task_id),
            "created_at": handle.created_at.isoformat(),
            "status": handle.status,
            "topic": position.topic,
            "partition": position.partition,
            "offset": position.offset,
        }
        click.echo(json.dumps(described))
    else:
        click.echo(str(handle.task_id))
