"""Dead letters on a real log and a real view: rows, listings, single records, the command line."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer
from letter_kit import dead_letter, letter, resolution, store
from view_kit import CODEC, submission

from taskline.errors import RecordGone, TasklineError
from taskline.infra.kafka.fetch import RecordFetcher, fetch_record
from taskline.infra.kafka.requests import admin_client
from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.local.roles import Role
from taskline.infra.log import HEADER_CAUSE, HEADER_SOURCE, HEADER_TASK_ID, Position
from taskline.infra.topics import Topics
from taskline.producers.dlq_cli import dlq
from taskline.producers.replay import replay_id
from taskline.schemas.events import DeadLetter, Priority
from taskline.schemas.ids import TaskId
from taskline.schemas.types import TaskType
from taskline.settings import Settings
from taskline.state.cassandra import CassandraStore
from taskline.state.dead_letters import DeadLetters, LetterFilter, Order
from taskline.state.letter_row import DAY_MS, Letter, LetterKind, raw_letter_id
from taskline.state.migrations import migrate
from taskline.testing import MemoryView

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("view_ready")]

SECONDS = 120.0


@pytest.fixture(scope="module")
def keyspace() -> str:
    """A view of this module's own: what is said of all dead letters is about these."""
    return f"test_{secrets.token_hex(4)}"


@pytest.fixture
def view_ready(settings: Settings) -> None:
    migrate(settings)


def now() -> int:
    return time.time_ns() // 1_000_000


class Clock:
    def __init__(self, ms: int) -> None:
        self._ms = ms

    def now_ms(self) -> int:
        return self._ms


# ---- the view ------------------------------------------------------------------------------------------------


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture
def real(settings: Settings, runner: asyncio.Runner) -> Iterator[CassandraStore]:
    opened = runner.run(CassandraStore.connect(settings))
    yield opened
    runner.run(opened.close())


async def pages(
    letters: DeadLetters, wanted: LetterFilter, order: Order, limit: int
) -> list[tuple[Letter, ...]]:
    found, cursor = [], None
    while True:
        page = await letters.list(wanted, order=order, limit=limit, cursor=cursor)
        found.append(page.letters)
        cursor = page.cursor
        if cursor is None:
            return found


def population(at_ms: int, tenants: Sequence[str]) -> list[Letter]:
    """Letters of several tenants and days, many of one instant; some resolved, some copies of others."""
    made = [
        letter(
            number,
            tenant=tenants[number % len(tenants)],
            at_ms=at_ms - (number % 3) * DAY_MS - (number % 4) * 1_000,
            task_type=f"t{number % 2}",
            message="Boom" if number % 5 else "time-out",
            resolved=number % 6 == 0,
        )
        for number in range(60)
    ]
    copies = [
        replace(each, key=replace(each.key, at_ms=each.key.at_ms + 500), resolution=None)
        for each in made[::7]
    ]
    return [*copies, *made]


def test_cassandra_lists_as_the_view_in_memory_does(
    real: CassandraStore, settings: Settings, runner: asyncio.Runner
) -> None:
    at_ms, tenants = now() - 10_000, ["", f"a{os.getpid()}", f"b{os.getpid()}"]
    letters = population(at_ms, tenants)
    clock = Clock(now())
    memory = MemoryView(clock)
    for view in (real, memory):
        # Twice, and in another order: the same rows.
        runner.run(store(view, letters))
        runner.run(store(view, reversed(letters)))
    asked = [
        LetterFilter(tenant=tenants[1]),
        LetterFilter(tenant=tenants[2], resolved=True),
        LetterFilter(tenant=tenants[1], task_type="t1", error="boom", resolved=True),
        LetterFilter(tenant=tenants[2], after_ms=at_ms - DAY_MS - 1_500, before_ms=at_ms - 1_000),
        LetterFilter(tenant="", kind=LetterKind.RAW),
        LetterFilter(),
    ]
    for wanted in asked:
        for order in Order:
            for limit in (1, 7, 200):
                expected, found = (
                    runner.run(pages(DeadLetters(view, settings, clock), wanted, order, limit))
                    for view in (memory, real)
                )
                assert found == expected
    for each in letters[len(letters) - 60 :]:
        assert runner.run(DeadLetters(real, settings, clock).get(each.letter_id)) == each
    for tenant in (None, tenants[1]):
        expected_stats, stats = (
            runner.run(DeadLetters(view, settings, clock).stats(tenant=tenant)) for view in (memory, real)
        )
        assert stats == expected_stats


def test_a_resolution_may_come_first_and_the_older_one_stays(
    real: CassandraStore, settings: Settings, runner: asyncio.Runner
) -> None:
    given = letter(7_001, tenant=f"r{os.getpid()}", at_ms=now() - 1_000)
    late, early = resolution(given, now() + 50, note="too late"), resolution(given, now())
    letters = DeadLetters(real, settings)
    runner.run(real.apply([late, early]))
    assert runner.run(letters.list(LetterFilter(tenant=given.key.tenant, resolved=True))).letters == ()
    runner.run(store(real, [given]))
    assert runner.run(letters.get(given.letter_id)).resolution == early.resolution
    runner.run(real.apply([late]))
    assert runner.run(letters.get(given.letter_id)).resolution == early.resolution


# ---- single records --------------------------------------------------------------------------------------------


class Log:
    """The writing end of the log."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.topics = Topics(namespace=settings.kafka.namespace)
        self._producer = Producer({"bootstrap.servers": settings.kafka.bootstrap_servers, "acks": "all"})

    def send(self, topic: str, value: bytes | None, **options: Any) -> Position:
        reports: list[Any] = []
        self._producer.produce(topic, value, on_delivery=lambda *report: reports.append(report), **options)
        assert self._producer.flush(30) == 0
        ((error, message),) = reports
        assert error is None, error
        return Position(topic=topic, partition=message.partition(), offset=message.offset())

    def dead(self, whole: DeadLetter) -> Position:
        key = whole.task_id.bytes
        return self.send(self.topics.dlq, CODEC.encode(whole), key=key, headers={HEADER_TASK_ID: key})


@pytest.fixture
def log(topics_created: Settings) -> Log:
    return Log(topics_created)


def test_single_records_are_read_by_their_places_in_any_order(log: Log) -> None:
    topic = log.topics.dispatch("default", Priority.LOW)
    places = [log.send(topic, b"v%d" % n, partition=n % 3, headers={"n": b"%d" % n}) for n in range(60)]
    with RecordFetcher(log.settings.kafka, client_id="test-fetch") as fetcher:
        for wanted in (places[10:11], places[::-7], places, [places[3], places[57]], places[:1] * 3, []):
            found = fetcher.fetch(wanted)
            assert set(found) == set(wanted)
            for place, record in found.items():
                number = places.index(place)
                assert (record.value, record.headers) == (b"v%d" % number, {"n": b"%d" % number})
                assert record.timestamp_ms > 0
        beyond = Position(topic=topic, partition=0, offset=10_000)
        assert fetcher.fetch([places[0], beyond]).keys() == {places[0]}
        began = time.monotonic()
        for place in places[:20]:
            fetcher.fetch([place])
        assert time.monotonic() - began < 20


def test_a_record_that_retention_has_deleted_is_gone(log: Log) -> None:
    from confluent_kafka import TopicPartition

    topic = log.topics.dispatch("default", Priority.LOW)
    first, second = (log.send(topic, value, partition=0) for value in (b"old", b"new"))
    with admin_client(log.settings.kafka) as admin:
        for done in admin.delete_records([TopicPartition(topic, 0, second.offset)]).values():
            done.result(30)
    with pytest.raises(RecordGone) as gone:
        fetch_record(log.settings, first)
    assert gone.value.position == first
    assert fetch_record(log.settings, second).value == b"new"


# ---- the command line ------------------------------------------------------------------------------------------


class Shell:
    """`taskline dlq …`, with a projector at work."""

    def __init__(self, log: Log, folder: Path) -> None:
        self.log = log
        self.settings = log.settings
        self._projector = Role(("projector",), log.settings, log=folder / "projector.log")
        self._runner = asyncio.Runner()

    def __enter__(self) -> Shell:
        with TypeDirectory(self.settings) as types:
            types.register([TaskType(name="geo.nearest")])
        self._projector.start()
        self._store = self._runner.run(CassandraStore.connect(self.settings))
        self.letters = DeadLetters(self._store, self.settings)
        return self

    def __exit__(self, *error: object) -> None:
        self._projector.stop()
        self._runner.run(self._store.close())
        self._runner.close()

    def run(self, *arguments: str, status: int = 0) -> list[Any]:
        """Its lines of JSON."""
        done = CliRunner().invoke(dlq, [*arguments, "--json"], obj=self.settings)
        if done.exception is not None and not isinstance(done.exception, SystemExit | TasklineError):
            raise done.exception
        assert done.exit_code == status, done.output
        # What is logged is among them, since no role has set up its logging here.
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def wait_for(self, letter_id: TaskId, *, resolved: bool = False) -> Letter:
        deadline = time.monotonic() + SECONDS
        while True:
            page = self._runner.run(self.letters.list(LetterFilter(resolved=True), limit=500))
            for each in page.letters:
                if each.letter_id == letter_id and (not resolved or each.resolution is not None):
                    return each
            assert time.monotonic() < deadline, self._projector.tail()
            time.sleep(0.05)

    def replayed_as(self, dead: TaskId) -> TaskId | None:
        stored = self._runner.run(self._store.read(dead))
        return None if stored is None else stored.marks.replayed_as


@pytest.fixture
def shell(log: Log, tmp_path: Path) -> Iterator[Shell]:
    with Shell(log, tmp_path) as made:
        yield made


def test_letters_are_listed_shown_replayed_and_discarded_from_a_shell(shell: Shell) -> None:
    tenant = f"s{now()}"
    tasks = [submission(now() - 60_000, tenant=tenant, payload=b'{"iata":"LAX"}') for _ in range(3)]
    at_ms = now() - 1_000
    for number, task in enumerate(tasks):
        shell.log.send(
            shell.log.topics.dispatch("default", task.priority),
            CODEC.encode(task),
            key=task.task_id.bytes,
            headers={HEADER_TASK_ID: task.task_id.bytes},
        )
        shell.log.dead(dead_letter(task, at_ms + number, message=f"boom {number}"))
    for task in tasks:
        shell.wait_for(task.task_id)
    one, two, three = (str(task.task_id) for task in tasks)

    listed = shell.run("list", "--tenant", tenant)
    assert [row["letter_id"] for row in listed] == [three, two, one]
    assert [row["letter_id"] for row in shell.run("list", "--tenant", tenant, "--error", "BOOM 1")] == [two]
    (shown,) = shell.run("show", one)
    assert (shown["payload"], shown["payload_unread"]) == ({"iata": "LAX"}, None)
    assert (shown["attempts"], shown["source"]) == ([], "tasks.normal/2/40")

    assert [row["outcome"] for row in shell.run("replay", "--tenant", tenant, "--dry-run")] == ["matched"] * 3
    (done,) = shell.run("replay", one)
    assert done["replayed_as"] == str(replay_id(tasks[0].task_id, at_ms, 1))
    letter_row = shell.wait_for(tasks[0].task_id, resolved=True)
    assert letter_row.resolution is not None
    assert str(letter_row.resolution.replayed_as) == done["replayed_as"]
    assert str(shell.replayed_as(tasks[0].task_id)) == done["replayed_as"]
    # A second time it is refused, and so is a payload that is none.
    shell.run("replay", one, status=1)
    shell.run("replay", two, "--payload", "{", status=2)

    (edited,) = shell.run("replay", two, "--payload", '{"iata": "HHR"}')
    assert edited["outcome"] == "replayed"
    (discarded,) = shell.run("discard", three, "--reason", "not worth it")
    assert discarded["outcome"] == "discarded"
    kept = shell.wait_for(tasks[2].task_id, resolved=True).resolution
    assert kept is not None
    assert (kept.note, kept.action.value) == ("not worth it", "discarded")
    shell.wait_for(tasks[1].task_id, resolved=True)
    assert shell.run("list", "--tenant", tenant) == []
    assert len(shell.run("list", "--tenant", tenant, "--resolved")) == 3
    (counted,) = shell.run("stats", "--tenant", tenant)
    assert counted == {"open": 0, "oldest_open_at": None, "complete": True}


def test_raw_bytes_go_back_to_where_they_came_from(shell: Shell) -> None:
    topics = shell.log.topics
    source = f"{topics.dispatch('default', Priority.LOW)}/1/5"
    value = b"\xc3\x01not for this version"
    place = shell.log.send(
        topics.dlq,
        value,
        key=b"k",
        headers={HEADER_CAUSE: b"newer", HEADER_SOURCE: source.encode(), "x": b"y"},
    )
    letter_id = raw_letter_id(source, b"k", value)
    found = shell.wait_for(letter_id)
    assert (found.kind, found.dlq_offset) == (LetterKind.RAW, place.offset)
    (shown,) = shell.run("show", str(letter_id))
    assert (shown["cause"], shown["source"]) == ("newer", source)
    (done,) = shell.run("replay", str(letter_id))
    assert (done["outcome"], done["replayed_as"]) == ("replayed", None)
    low = topics.dispatch("default", Priority.LOW)
    with RecordFetcher(shell.settings.kafka, client_id="test-fetch") as fetcher:
        (record,) = fetcher.fetch([Position(topic=low, partition=n, offset=0) for n in range(3)]).values()
    assert (record.value, record.key, record.headers) == (value, b"k", {"x": b"y"})
    shell.wait_for(letter_id, resolved=True)
