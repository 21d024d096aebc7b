"""What `taskline dlq replay` and `taskline dlq discard` do, and what they say about it on the way."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from taskline.errors import DeadLetterError, InvalidRequest, LetterNotFound
from taskline.producers.dlq_session import Session, run_session
from taskline.producers.dlq_show import task_document
from taskline.producers.replay import Edit, edited, letter_in
from taskline.producers.replay_bulk import Bulk, BulkOrder, BulkReport, count_matching
from taskline.producers.replayer import Handled
from taskline.schemas.events import LetterAction
from taskline.schemas.ids import TaskId
from taskline.schemas.json_values import exact_integers
from taskline.settings import Settings
from taskline.state.letter_row import Letter, LetterKind

# Before a bulk, so many are counted for the question and the progress bar; counting costs a tenth of replaying.
_MAX_COUNTED = 100_000


def handle(
    settings: Settings, order: BulkOrder, letter_ids: Sequence[TaskId], *, ask: bool, as_json: bool
) -> None:
    """Do it, say how far it came, and exit with 1 if that was not all the way."""
    console = Console(stderr=True)

    async def body(session: Session, stop: asyncio.Event) -> BulkReport | None:
        if letter_ids:
            return await _named(session, order, letter_ids, as_json=as_json)
        total, exact = None, True
        if console.is_terminal and not order.dry_run:
            at_most = _MAX_COUNTED if order.limit is None else min(_MAX_COUNTED, order.limit)
            total, exact = await count_matching(session.letters, order.wanted, at_most=at_most)
            exact = exact or total == order.limit
            what = f"{total}{'' if exact else ' or more'} dead letter(s) will be {order.action.value}. Go on?"
            if ask and not await asyncio.to_thread(click.confirm, what, err=True):
                return None
        with _progress(console, order, total if exact else None) as advance:

            def tell(letter: Letter, outcome: Handled | DeadLetterError | InvalidRequest | None) -> None:
                advance()
                if as_json or order.dry_run:
                    _say(letter, outcome, as_json=as_json)

            bulk = Bulk(session.letters, session.replayer, order, on_letter=tell)
            return await bulk.run(stop)

    report = run_session(settings, body)
    if report is None:
        raise click.Abort
    _conclude(report)


async def _named(
    session: Session, order: BulkOrder, letter_ids: Sequence[TaskId], *, as_json: bool
) -> BulkReport:
    report = BulkReport()
    for letter_id in letter_ids:
        try:
            letter = await session.letters.get(letter_id)
        except LetterNotFound as error:
            report.refused += 1
            report.refusals.append((letter_id, str(error)))
            continue
        outcome: Handled | DeadLetterError | InvalidRequest | None
        try:
            if order.dry_run:
                outcome = None
            elif order.action is LetterAction.DISCARDED:
                outcome = await session.replayer.discard(letter, note=order.note)
            else:
                outcome = await session.replayer.replay(letter)
        except (DeadLetterError, InvalidRequest) as error:
            report.refused += 1
            report.refusals.append((letter_id, str(error)))
            outcome = error
        else:
            report.counts["matched" if outcome is None else outcome.done.value] += 1
        if as_json or not isinstance(outcome, Exception):
            _say(letter, outcome, as_json=as_json)
    return report


def one_edited(
    settings: Settings, letter_id: TaskId, given: bytes | None, *, dry_run: bool, as_json: bool
) -> None:
    """Replay one letter with another payload, which is the given JSON or what an editor leaves."""

    async def body(session: Session, stop: asyncio.Event) -> None:
        letter = await session.letters.get(letter_id)
        record = await session.replayer.read_one(letter)
        if letter.kind is LetterKind.RAW:
            raise click.UsageError("raw bytes have no payload to edit")
        whole, submission = letter_in(letter, record, session.codec)
        async with session.types() as types:
            document = task_document(letter, whole, submission, types, None)
            if given is None and document["payload_unread"] is not None:
                raise click.UsageError(f"the payload can't be edited: {document['payload_unread']}")
            if given is None:
                text = await asyncio.to_thread(_edit_text, document["payload"])
            else:
                text = given
            edit = edited(
                types.get(submission.task_type),
                _json_of(text),
                max_payload_bytes=settings.producer.max_payload_bytes,
            )
        await _replay_edited(session, letter, edit, dry_run=dry_run, as_json=as_json)

    run_session(settings, body)


async def _replay_edited(
    session: Session, letter: Letter, edit: Edit, *, dry_run: bool, as_json: bool
) -> None:
    outcome = None if dry_run else await session.replayer.replay(letter, edit=edit)
    _say(letter, outcome, as_json=as_json)


def _edit_text(payload: Any) -> bytes:  # noqa: ANN401 - JSON
    text = json.dumps(payload, indent=2, ensure_ascii=False, default=str)
    changed = click.edit(text, extension=".json")
    if changed is None:
        raise click.UsageError("the editor left the payload as it was: nothing is replayed")
    return changed.encode()


def payload_given(payload: str) -> bytes:
    """The JSON that an option gives, or that the file behind its @ holds."""
    if not payload.startswith("@"):
        return payload.encode()
    try:
        return Path(payload[1:]).read_bytes()
    except OSError as error:
        raise click.BadParameter(f"{payload[1:]}: {error.strerror}", param_hint="--payload") from error


def _json_of(text: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise click.BadParameter(f"not JSON: {error}", param_hint="the payload") from error
    return exact_integers(text, value)


def _say(
    letter: Letter, outcome: Handled | DeadLetterError | InvalidRequest | None, *, as_json: bool
) -> None:
    """One line about one letter."""
    done, task, refusal = "would be taken", None, None
    if isinstance(outcome, Handled):
        done, task = outcome.done.value, outcome.replayed_as
    elif outcome is not None:
        done, refusal = "refused", str(outcome)
    if as_json:
        row = {
            "letter_id": str(letter.letter_id),
            "outcome": "matched" if outcome is None else done,
            "replayed_as": None if task is None else str(task),
            "error": refusal,
        }
        click.echo(json.dumps(row))
    else:
        told = "" if task is None else f" as {task}"
        click.echo(f"{letter.letter_id} {done}{told}" + ("" if refusal is None else f": {refusal}"))


def _conclude(report: BulkReport) -> None:
    for letter_id, why in report.refusals:
        click.echo(f"{letter_id}: {why}", err=True)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(report.counts.items())) or "none"
    refused = f", {report.refused} refused" if report.refused else ""
    click.echo(f"{counts}{refused}", err=True)
    if report.error is not None:
        click.echo(f"broken off: {report.error}. Run it again to go on.", err=True)
    elif report.stopped:
        click.echo("stopped before the end. Run it again to go on.", err=True)
    if report.refused or report.stopped:
        sys.exit(1)


class _progress:  # noqa: N801 - used as a function
    """A bar on a terminal, nothing elsewhere; gives what advances it."""

    def __init__(self, console: Console, order: BulkOrder, total: int | None) -> None:
        self._bar = Progress(
            TextColumn(order.action.value),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal or order.dry_run,
        )
        self._total = total

    def __enter__(self) -> Callable[[], None]:
        self._bar.start()
        task = self._bar.add_task("letters", total=self._total)
        return lambda: self._bar.advance(task)

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
