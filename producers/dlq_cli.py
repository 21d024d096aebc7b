"""`taskline dlq`: look at dead letters, replay them, discard them."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from taskline.errors import TaskNotFound, Unavailable
from taskline.infra.role import SystemClock
from taskline.infra.tables import print_table
from taskline.producers.dlq_actions import handle, one_edited, payload_given
from taskline.producers.dlq_session import Session, run_session
from taskline.producers.dlq_show import (
    HEADINGS,
    hex_lines,
    instant,
    letter_document,
    lines_of,
    raw_document,
    table_row,
    task_document,
)
from taskline.producers.replay import letter_in
from taskline.producers.replay_bulk import DEFAULT_CONCURRENCY, BulkOrder
from taskline.schemas.events import LetterAction
from taskline.schemas.ids import from_ms, to_ms
from taskline.settings import Settings, duration_ms
from taskline.state.dead_letters import MAX_PAGE, LetterFilter, Order
from taskline.state.letter_row import NOBODY, Letter, LetterKind

F = TypeVar("F", bound=Callable[..., Any])

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")


class _Instant(click.ParamType):
    """An ISO 8601 instant, or a duration that counts back from now."""

    name = "instant"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401
        if isinstance(value, int):
            return value
        with suppress(ValueError):
            return SystemClock().now_ms() - duration_ms(value)
        try:
            at = datetime.fromisoformat(value)
        except ValueError:
            self.fail(
                f"{value!r} is neither an instant (2026-11-29T15:04:05Z) nor a duration (2h)", param, ctx
            )
        return to_ms(at if at.tzinfo is not None else at.replace(tzinfo=UTC))


def _filters(reason_option: str = "--reason") -> Callable[[F], F]:
    """The options that choose letters."""
    options = (
        click.option("--tenant", help="Whose letters. [default: everybody's]"),
        click.option("--type", "task_type", help="Of one task type."),
        click.option(
            reason_option,
            "reason",
            help="Given up for: exhausted, permanent, poison, unregistered, payload_undecodable, …",
        ),
        click.option("--error", help="Part of the error's class or message."),
        click.option("--after", "after_ms", type=_Instant(), help="Died at or after: an instant, or 2h ago."),
        click.option("--before", "before_ms", type=_Instant(), help="Died before: an instant, or 2h ago."),
        click.option(
            "--raw/--tasks", "raw", default=None, help="Only bytes that could not be read, or only tasks."
        ),
    )

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def dlq() -> None:
    """Look at dead letters, replay them, discard them.

    A dead letter is a task that was given up, or bytes that could not be read. It is kept for topics.dlq_retention_days.
    """


@dlq.command("list")
@_filters()
@click.option("--resolved", is_flag=True, help="Those too that were replayed or discarded.")
@click.option("--oldest-first", is_flag=True, help="[default: newest first]")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True)
@click.option("--cursor", help="Where an earlier listing left off.")
@_as_json
@click.pass_obj
def list_(
    settings: Settings,
    /,
    *,
    resolved: bool,
    oldest_first: bool,
    limit: int,
    cursor: str | None,
    as_json: bool,
    **chosen: Any,  # noqa: ANN401 - the filters
) -> None:
    """List dead letters by day, newest first."""
    wanted = replace(_wanted(chosen), resolved=resolved)
    order = Order.OLDEST_FIRST if oldest_first else Order.NEWEST_FIRST

    async def body(session: Session, stop: asyncio.Event) -> tuple[list[Letter], str | None]:
        found: list[Letter] = []
        at = cursor
        while not stop.is_set():
            page = await session.letters.list(
                wanted, order=order, limit=min(MAX_PAGE, limit - len(found)), cursor=at
            )
            found += page.letters
            at = page.cursor
            if at is None or len(found) >= limit:
                break
        return found, at

    found, at = run_session(settings, body)
    if as_json:
        for letter in found:
            click.echo(json.dumps(letter_document(letter)))
    else:
        print_table(HEADINGS, [table_row(letter) for letter in found])
    if at is not None:
        click.echo(f"there may be more: --cursor {at}", err=True)


@dlq.command()
@click.argument("letter_id", type=click.UUID)
@_as_json
@click.pass_obj
def show(settings: Settings, letter_id: uuid.UUID, as_json: bool) -> None:
    """Show a dead letter with its payload, all errors, its attempts and where it came from."""

    async def body(session: Session, stop: asyncio.Event) -> tuple[dict[str, Any], list[str]]:
        letter = await session.letters.get(letter_id)
        record = await session.replayer.read_one(letter)
        if letter.kind is LetterKind.RAW:
            return raw_document(letter, record), hex_lines(record.value)
        whole, submission = letter_in(letter, record, session.codec)
        told = None
        with suppress(TaskNotFound):
            told = await session.tasks.history(letter_id, tenant=letter.key.tenant)
        try:
            async with session.types() as types:
                return task_document(letter, whole, submission, types, told), []
        except Unavailable:
            return task_document(letter, whole, submission, None, told), []

    document, preview = run_session(settings, body)
    if as_json:
        click.echo(json.dumps(document, default=str))
        return
    if preview:
        document = {name: value for name, value in document.items() if name not in ("value", "message")}
    for line in [*lines_of(document), *preview]:
        click.echo(line)


@dlq.command()
@click.option("--tenant", help="Whose letters. [default: everybody's]")
@_as_json
@click.pass_obj
def stats(settings: Settings, tenant: str | None, as_json: bool) -> None:
    """Count the open letters and show how old the oldest is."""

    async def body(session: Session, stop: asyncio.Event) -> Any:  # noqa: ANN401
        return await session.letters.stats(tenant=tenant)

    found = run_session(settings, body)
    oldest = None if found.oldest_open_ms is None else instant(from_ms(found.oldest_open_ms))
    if as_json:
        click.echo(
            json.dumps({"open": found.open_letters, "oldest_open_at": oldest, "complete": found.complete})
        )
        return
    more = "" if found.complete else " or more"
    click.echo(f"{found.open_letters}{more} open" + ("" if oldest is None else f", the oldest of {oldest}"))


@dlq.command("replay")
@click.argument("letter_ids", nargs=-1, type=click.UUID)
@click.option("--all", "every", is_flag=True, help="All open letters, if no filter chooses among them.")
@_filters()
@click.option("--limit", type=click.IntRange(1), help="At most so many.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="A second. [default: dlq.replay_rate]")
@click.option("--newest-first", is_flag=True, help="[default: oldest first]")
@click.option("--concurrency", type=click.IntRange(1, 1_000), default=DEFAULT_CONCURRENCY, show_default=True)
@click.option("--dry-run", is_flag=True, help="Only say which.")
@click.option("--edit", "in_editor", is_flag=True, help="Change the payload in $EDITOR first (one letter).")
@click.option("--payload", help="Another payload for one letter: JSON, or @FILE.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_as_json
@click.pass_obj
def replay_command(
    settings: Settings,
    /,
    *,
    letter_ids: tuple[uuid.UUID, ...],
    every: bool,
    limit: int | None,
    rate: float | None,
    newest_first: bool,
    concurrency: int,
    dry_run: bool,
    in_editor: bool,
    payload: str | None,
    yes: bool,
    as_json: bool,
    **chosen: Any,  # noqa: ANN401 - the filters
) -> None:
    """Submit dead tasks again, as new tasks, and put raw bytes back where they came from.

    Name the letters, choose open ones by filters, or take --all. A run that was broken off is simply run again: what is done is not
    done twice.
    """
    _check_choice(letter_ids, every, chosen, limit)
    if in_editor or payload is not None:
        if len(letter_ids) != 1 or (in_editor and payload is not None):
            raise click.UsageError("--edit and --payload change one letter: name it, and use one of them")
        given = None if payload is None else payload_given(payload)
        one_edited(settings, letter_ids[0], given, dry_run=dry_run, as_json=as_json)
        return
    order = BulkOrder(
        wanted=_wanted(chosen),
        order=Order.NEWEST_FIRST if newest_first else Order.OLDEST_FIRST,
        rate=rate or settings.dlq.replay_rate,
        limit=limit,
        dry_run=dry_run,
        concurrency=concurrency,
    )
    handle(settings, order, letter_ids, ask=not yes, as_json=as_json)


@dlq.command()
@click.argument("letter_ids", nargs=-1, type=click.UUID)
@click.option("--all", "every", is_flag=True, help="All open letters, if no filter chooses among them.")
@_filters("--dead-reason")
@click.option("--limit", type=click.IntRange(1), help="At most so many.")
@click.option("--reason", "note", help="Why, for whoever looks at it later.")
@click.option("--dry-run", is_flag=True, help="Only say which.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_as_json
@click.pass_obj
def discard(
    settings: Settings,
    /,
    *,
    letter_ids: tuple[uuid.UUID, ...],
    every: bool,
    limit: int | None,
    note: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **chosen: Any,  # noqa: ANN401 - the filters
) -> None:
    """Note that nothing will be done about dead letters. They stay readable until their retention is over."""
    _check_choice(letter_ids, every, chosen, limit)
    order = BulkOrder(
        wanted=_wanted(chosen),
        action=LetterAction.DISCARDED,
        # Nothing runs because of it.
        rate=10_000,
        limit=limit,
        dry_run=dry_run,
        note=note,
    )
    handle(settings, order, letter_ids, ask=not yes, as_json=as_json)


def _wanted(chosen: Mapping[str, Any]) -> LetterFilter:
    values = dict(chosen)
    raw = values.pop("raw")
    kind = None if raw is None else LetterKind.RAW if raw else LetterKind.TASK
    if raw and values["tenant"] is None:
        # Raw bytes are nobody's: no need to look through anybody's.
        values["tenant"] = NOBODY
    return LetterFilter(kind=kind, **values)


def _check_choice(
    letter_ids: Sequence[uuid.UUID], every: bool, chosen: Mapping[str, Any], limit: int | None
) -> None:
    filtered = any(value is not None for value in chosen.values())
    if letter_ids and (every or filtered or limit is not None):
        raise click.UsageError("name letters, or choose them by filters: not both")
    if not letter_ids and not filtered and not every:
        raise click.UsageError("name letters, choose them by filters, or take --all")
