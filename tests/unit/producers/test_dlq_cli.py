"""`taskline dlq`: what a command line may choose. What it does is tested on real servers."""

from __future__ import annotations

import time
import uuid
from typing import Any

import click
import pytest
from click.testing import CliRunner

from taskline import Settings
from taskline.producers import dlq_cli
from taskline.producers.dlq_cli import dlq
from taskline.producers.replay_bulk import BulkOrder
from taskline.schemas.events import LetterAction
from taskline.state.dead_letters import LetterFilter, Order
from taskline.state.letter_row import LetterKind

ONE, TWO = (str(uuid.UUID(int=number)) for number in (1, 2))


class Asked(Exception):
    """What a command was about to do."""

    def __init__(self, order: BulkOrder, letter_ids: Any) -> None:
        self.order, self.letter_ids = order, letter_ids


@pytest.fixture(autouse=True)
def _no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(settings: Settings, order: BulkOrder, letter_ids: Any, **_: Any) -> None:
        raise Asked(order, letter_ids)

    def no_session(*_: object) -> None:
        raise AssertionError("nothing may be connected")

    monkeypatch.setattr(dlq_cli, "handle", handle)
    monkeypatch.setattr(dlq_cli, "run_session", no_session)


def asked(*arguments: str) -> BulkOrder:
    done = CliRunner().invoke(dlq, arguments, obj=Settings())
    assert isinstance(done.exception, Asked), done.output
    return done.exception.order


@pytest.mark.parametrize(
    "arguments",
    [
        ("replay",),
        ("discard",),
        ("discard", "--reason", "why"),
        ("replay", ONE, "--all"),
        ("replay", ONE, "--type", "a.b"),
        ("replay", ONE, "--limit", "3"),
        ("replay", "--limit", "3"),
        ("replay", ONE, TWO, "--edit"),
        ("replay", "--all", "--payload", "1"),
        ("replay", ONE, "--edit", "--payload", "1"),
        ("replay", ONE, "--payload", "@/no/such/file"),
        ("replay", "--all", "--rate", "0"),
        ("replay", "--all", "--after", "yesterday"),
        ("replay", "not-an-id"),
        ("list", "--limit", "0"),
    ],
)
def test_a_command_line_that_can_t_be_meant_is_refused(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(dlq, arguments, obj=Settings())
    assert done.exit_code == 2
    assert "Error" in done.output


def test_filters_choose_open_letters() -> None:
    order = asked("replay", "--type", "a.b", "--reason", "poison", "--error", "x", "--tasks", "--rate", "7")
    assert order == BulkOrder(
        wanted=LetterFilter(task_type="a.b", reason="poison", error="x", kind=LetterKind.TASK), rate=7.0
    )
    assert order.order is Order.OLDEST_FIRST
    assert asked("replay", "--all", "--newest-first").order is Order.NEWEST_FIRST
    assert asked("replay", "--all").rate == Settings().dlq.replay_rate
    assert asked("replay", "--raw").wanted == LetterFilter(kind=LetterKind.RAW, tenant="")


def test_a_discard_has_a_reason_of_its_own() -> None:
    order = asked("discard", "--dead-reason", "poison", "--reason", "closed", "--limit", "5")
    assert (order.action, order.note, order.limit) == (LetterAction.DISCARDED, "closed", 5)
    assert order.wanted == LetterFilter(reason="poison")


def test_instants_are_iso_or_count_back_from_now() -> None:
    order = asked("replay", "--after", "2026-11-29T15:00:00+01:00", "--before", "2026-11-29T15:00:00")
    assert (order.wanted.after_ms, order.wanted.before_ms) == (1_795_960_800_000, 1_795_964_400_000)
    after_ms = asked("replay", "--after", "2h").wanted.after_ms
    assert after_ms is not None
    assert abs(time.time() * 1000 - 7_200_000 - after_ms) < 60_000


def test_every_command_has_a_help_page() -> None:
    assert isinstance(dlq, click.Group)
    for name in dlq.commands:
        done = CliRunner().invoke(dlq, [name, "--help"])
        assert done.exit_code == 0
        assert "Usage" in done.output
