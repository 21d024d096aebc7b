"""The engine's promises, one by one, on fakes of its ports in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel

from taskline.errors import DeliveryFailed, DeliveryUnknown, Unavailable, WrongTopology
from taskline.infra.holes import decode_holes, encode_holes
from taskline.infra.log import HEADER_CAUSE, HEADER_SOURCE, HEADER_TASK_ID, OutRecord
from taskline.infra.watermark import WatermarkTracker
from taskline.schemas.events import (
    DeadLetter,
    DeadLettered,
    ErrorCategory,
    Failed,
    LifecycleBatch,
    Priority,
    Released,
    Started,
    Succeeded,
)
from taskline.workers.context import TaskContext
from taskline.workers.lobby import SCHEMA_PATIENCE_SECONDS
from taskline.workers.registry import Registry


class Journal:
    """Handlers that write down what happens."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self.gates: dict[Any, asyncio.Event] = {}
        self.seen: list[TaskContext] = []

        @self.registry.task("note")
        async def note(payload: Any, ctx: TaskContext) -> Any:
            self.begun.append(payload)
            self.seen.append(ctx)
            self.ended.append(payload)
            return payload

        @self.registry.task("wait")
        async def wait(payload: Any) -> None:
            self.begun.append(payload)
            await self.gate(payload).wait()
            self.ended.append(payload)

        @self.registry.task("sleep")
        async def sleep(payload: float) -> None:
            self.begun.append(payload)
            await asyncio.sleep(payload)
            self.ended.append(payload)

    def gate(self, key: Any) -> asyncio.Event:
        return self.gates.setdefault(key, asyncio.Event())


@pytest.fixture
def journal() -> Journal:
    return Journal()


# ---- the ordinary way ------------------------------------------------------------------------------------------


def test_a_task_is_started_run_recorded_and_committed_in_that_order(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0, offset=7)
            task = b.submission("note", {"a": 1})
            started_at = b.clock.now_ms()
            b.push(task)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert b.log.kinds() == ["Started"]
            assert journal.begun == []  # not acknowledged yet
            await asyncio.sleep(1)
            started, succeeded = b.log.events()
            assert isinstance(started, Started)
            assert isinstance(succeeded, Succeeded)
            assert (started.source_topic, started.source_partition, started.source_offset) == (
                "tasks.normal",
                0,
                7,
            )
            assert started.execution == succeeded.execution
            assert started.task_id == task.task_id
            assert (started.tenant, started.worker, started.attempt) == ("acme", "w1", 1)
            assert started.retain_until == task.retain_until
            assert succeeded.result == b'{"a":1}'
            ctx = journal.seen[0]
            assert (ctx.task_id, ctx.root_id, ctx.attempt, ctx.tenant) == (
                task.task_id,
                task.root_id,
                1,
                "acme",
            )
            assert ctx.deadline_ms == started_at + 1 + 300_000
            assert ctx.created_at.tzinfo is UTC
            assert ctx.deadline > ctx.created_at
            assert b.committed().offset == 8

    virtually(scenario())


def test_no_offset_is_committed_before_its_outcome_is_acknowledged(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0)
            b.log.verdict = lambda record: "hang" if len(b.log.records) >= 1 else None
            b.push(b.submission("note", 1))
            await asyncio.sleep(10)
            assert journal.ended == [1]
            assert b.progress() == (0, ())

    virtually(scenario())


def test_out_of_order_ends_are_committed_as_holes_and_the_watermark_waits(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0)
            b.push(
                b.submission("wait", 0),
                *(b.submission("note", n) for n in range(1, 5)),
                b.submission("wait", 5),
            )
            await asyncio.sleep(2)
            commit = b.committed()
            assert commit.offset == 0
            assert decode_holes(0, commit.metadata) == ((1, 5),)
            journal.gate(0).set()
            await asyncio.sleep(2)
            assert b.committed().offset == 5
            journal.gate(5).set()
            await asyncio.sleep(2)
            assert (b.committed().offset, b.committed().metadata) == (6, "")

    virtually(scenario())


def test_what_an_earlier_owner_completed_is_not_run_again(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0, metadata=encode_holes(0, [(1, 3)]))
            b.push(*(b.submission("note", n) for n in range(5)))
            await asyncio.sleep(2)
            assert journal.ended == [0, 3, 4]
            assert b.committed().offset == 5

    virtually(scenario())


@pytest.mark.parametrize("metadata", ["garbage", encode_holes(9, [(10, 12)])])
def test_metadata_that_is_not_ours_means_that_everything_runs(bench, virtually, journal, metadata) -> None:
    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0, metadata=metadata)
            b.push(*(b.submission("note", n) for n in range(3)))
            await asyncio.sleep(2)
            assert journal.ended == [0, 1, 2]

    virtually(scenario())


def test_the_most_urgent_go_first_and_many_starts_share_a_batch(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry, concurrency=4, dispatch="drain") as b:
            for priority in Priority:
                b.assign(0, priority=priority)
            for priority in reversed(Priority):
                tasks = [b.submission("note", f"{priority.value}{n}", priority=priority) for n in range(4)]
                b.push(*tasks, priority=priority)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(b.log.records) == 1
            assert b.log.kinds() == ["Started"] * 4
            await asyncio.sleep(1)
            assert [item[:-1] for item in journal.begun] == ["high"] * 4 + ["normal"] * 4 + ["low"] * 4

    virtually(scenario())


def test_a_slot_is_free_once_its_handler_is_done_and_outcomes_in_flight_are_bounded(
    bench, virtually, journal
) -> None:
    async def scenario() -> None:
        async with bench(journal.registry, concurrency=1, prefetch=1000) as b:
            b.assign(0)

            def verdict(record: OutRecord) -> str | None:
                kinds = [
                    b.codec.kind_of(entry.event)
                    for entry in b.codec.decode(record.value, LifecycleBatch).events
                ]
                return "hang" if Succeeded in kinds else None

            b.log.verdict = verdict
            b.push(*(b.submission("note", n) for n in range(600)))
            await asyncio.sleep(60)
            # 256 is the least bound on outcomes that wait for their acknowledgement; one more was started.
            assert 256 <= len(journal.begun) <= 257

    virtually(scenario())


# ---- payloads ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Point:
    x: int
    label: str = "none"


class Order(BaseModel):
    number: int
    at: datetime


def test_typed_handlers_get_instances_and_typed_results_become_json(bench, virtually) -> None:
    registry = Registry()
    seen: list[Any] = []

    @registry.task("point")
    async def point(payload: Point) -> Point:
        seen.append(payload)
        return payload

    @registry.task("order")
    async def order(payload: Order) -> Order:
        seen.append(payload)
        return payload

    async def scenario() -> None:
        async with bench(registry) as b:
            b.assign(0)
            b.push(
                b.submission("point", {"x": 3}),
                b.submission("order", {"number": 1, "at": "2026-01-02T03:04:05Z"}),
            )
            await asyncio.sleep(1)
            assert seen == [Point(x=3), Order(number=1, at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))]
            results = {event.result for event in b.log.events() if isinstance(event, Succeeded)}
            assert results == {b'{"x":3,"label":"none"}', b'{"number":1,"at":"2026-01-02T03:04:05Z"}'}

    virtually(scenario())


def test_undecodable_bytes_go_to_the_dead_letter_topic_verbatim_and_the_rest_goes_on(
    bench, virtually, journal
) -> None:
    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0, offset=40)
            good = b.codec.encode(b.submission("note", "good"))
            values: list[bytes | None] = [
                b"garbage",
                None,
                b"",
                good[:-3],
                good + b"x",
                b"\xc3\x01" + b"\0" * 20,
            ]
            b.receive([b.record(value, x_trace=b"t1") for value in values])
            b.receive([b.record(good, taskline_attempt=b"zero")])
            b.receive([b.record(good)])
            await asyncio.sleep(2)
            assert journal.ended == ["good"]
            letters = b.log.dlq()
            assert [letter.value for letter in letters] == [*values, good]
            for number, letter in enumerate(letters):
                assert letter.key == b"key"
                assert letter.headers[HEADER_SOURCE] == f"tasks.normal/0/{40 + number}".encode()
                assert letter.headers[HEADER_CAUSE]
            assert letters[0].headers["x-trace"] == b"t1"
            assert b.log.kinds() == ["Started", "Succeeded"]
            assert b.committed().offset == 48

    virtually(scenario())


def test_the_attempt_comes_from_its_header(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0)
            b.receive([b.record(b.codec.encode(b.submission("note", 1)), taskline_attempt=b"3")])
            await asyncio.sleep(1)
            assert [event.attempt for event in b.log.events()] == [3, 3]
            assert journal.seen[0].attempt == 3

    virtually(scenario())


def test_a_task_without_a_handler_is_a_dead_letter_and_was_never_started(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0)
            task = b.submission("mote", {"x": 1})
            b.push(task)
            await asyncio.sleep(2)
            (event,) = b.log.events()
            assert isinstance(event, DeadLettered)
            assert event.reason == "unregistered"
            (record,) = b.log.dlq()
            letter = b.codec.decode(record.value, DeadLetter)
            assert letter.reason == "unregistered"
            assert letter.error_class == "taskline.errors.UnknownTaskType"
            assert "did you mean 'note'" in letter.message
            assert letter.submission == b.codec.encode(task)
            assert (letter.source_topic, letter.source_partition, letter.source_offset) == (
                "tasks.normal",
                0,
                0,
            )
            assert record.key == task.task_id.bytes
            assert record.headers[HEADER_TASK_ID] == task.task_id.bytes
            assert b.committed().offset == 1

    virtually(scenario())


def test_a_payload_that_can_not_be_read_is_a_dead_letter(bench, virtually) -> None:
    registry = Registry()

    @registry.task("point")
    async def point(payload: Point) -> None:
        raise AssertionError

    @registry.task("any")
    async def anything(payload: Any) -> None:
        raise AssertionError

    async def scenario() -> None:
        async with bench(registry) as b:
            b.assign(0)
            b.push(
                dataclasses.replace(b.submission("point", {"x": 1}), payload=b"\xff"),
                dataclasses.replace(b.submission("any", 1), payload=b"{not json"),
            )
            await asyncio.sleep(2)
            assert b.log.kinds() == ["DeadLettered", "DeadLettered"]
            letters = [b.codec.decode(record.value, DeadLetter) for record in b.log.dlq()]
            assert [letter.reason for letter in letters] == ["payload_undecodable"] * 2
            assert b.committed().offset == 2

    virtually(scenario())


def test_a_schema_that_becomes_known_in_time_is_waited_for(bench, virtually) -> None:
    registry, older = Registry(), Registry()
    seen: list[Any] = []

    @registry.task("point")
    async def point(payload: Point) -> None:
        seen.append(payload)

    def under_version_0() -> None:
        @dataclasses.dataclass
        class Point:
            x: int

        @older.task("point")
        async def older_point(payload: Point) -> None: ...

    under_version_0()

    async def scenario() -> None:
        async with bench(registry) as b:
            b.assign(0)
            known: list[Any] = []
            old_schema = older.types[0].schema
            b.types.writer_schema = lambda fingerprint: known[0] if known else None
            data, fingerprint = older.types[0].encode({"x": 5})
            submission = dataclasses.replace(
                b.submission("point", {"x": 1}), payload=data, payload_fingerprint=fingerprint
            )
            b.push(submission)
            await asyncio.sleep(3)
            assert seen == []
            known.append(old_schema)
            await asyncio.sleep(1)
            assert seen == [Point(x=5)]
            known.clear()
            b.push(submission)
            await asyncio.sleep(SCHEMA_PATIENCE_SECONDS + 1)
            assert b.codec.decode(b.log.dlq()[0].value, DeadLetter).reason == "payload_undecodable"

    virtually(scenario())


# ---- failures ---------------------------------------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "error_class", "message"),
    [
        (ValueError("bad value"), "ValueError", "bad value"),
        (SystemExit(3), "SystemExit", "3"),
        (KeyboardInterrupt(), "KeyboardInterrupt", ""),
        (asyncio.CancelledError(), "asyncio.exceptions.CancelledError", ""),
        (GeneratorExit(), "GeneratorExit", ""),
        (StopAsyncIteration("x"), "RuntimeError", "async generator raised StopAsyncIteration"),
        (MemoryError(), "MemoryError", ""),
        (ValueError("é" * 5_000), "ValueError", "é" * 768),
        (ValueError("\ud800"), "ValueError", "?"),
    ],
)
def test_whatever_a_handler_raises_is_a_dead_letter_and_the_worker_goes_on(
    bench, virtually, journal, error, error_class, message
) -> None:
    @journal.registry.task("raise")
    async def raises(payload: Any) -> None:
        raise error

    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0)
            b.push(b.submission("raise", max_retries=0), b.submission("note", "after"))
            await asyncio.sleep(2)
            assert journal.ended == ["after"]
            failed = next(event for event in b.log.events() if isinstance(event, Failed))
            if not isinstance(error, StopAsyncIteration):
                assert (failed.error_class, failed.message) == (error_class, message)
            assert failed.retryable
            assert failed.traceback is not None
            assert "raises" in failed.traceback
            assert "conductor.py" not in failed.traceback
            total = (
                len(failed.error_class.encode())
                + len(failed.message.encode())
                + len(failed.traceback.encode())
            )
            assert total <= 4_096
            letter = b.codec.decode(b.log.dlq()[0].value, DeadLetter)
            deadly = isinstance(error, MemoryError)
            assert (letter.reason, letter.error_class) == (
                "poison" if deadly else "exhausted",
                failed.error_class,
            )
            category = ErrorCategory.MEMORY if deadly else ErrorCategory.UNKNOWN
            assert (letter.category, failed.category) == (category, category)
            (told,) = letter.errors
            assert (told.attempt, told.error_class, told.worker) == (1, failed.error_class, "w1")
            assert b.committed().offset == 2

    virtually(scenario())


def test_the_dead_letter_is_acknowledged_before_the_events_that_announce_it(
    bench, virtually, journal
) -> None:
    @journal.registry.task("raise")
    async def raises(payload: Any) -> None:
        raise Unprintable

    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0)
            b.log.verdict = lambda record: DeliveryFailed("no") if record.topic == "tasks.dlq" else None
            b.push(b.submission("raise", max_retries=0))
            await asyncio.sleep(60)
            assert b.log.kinds() == ["Started"]
            assert b.progress() == (0, ())
            b.log.verdict = lambda record: None
            await asyncio.sleep(6)
            assert b.log.kinds() == ["Started", "Failed", "DeadLettered"]
            # Failed and DeadLettered in one batch.
            assert len([record for record in b.log.records if record.topic == "tasks.lifecycle"]) == 2
            assert b.committed().offset == 1

    virtually(scenario())


@pytest.mark.parametrize("value", [object(), {1, 2}, {"x": float("nan")}, "x" * 100, b"bytes"])
def test_a_result_that_can_not_be_recorded_is_a_permanent_failure(bench, virtually, value) -> None:
    registry = Registry()

    @registry.task("result")
    async def result(payload: Any) -> Any:
        return value

    async def scenario() -> None:
        async with bench(registry, max_result_bytes=100) as b:
            b.assign(0)
            b.push(b.submission("result"))
            await asyncio.sleep(2)
            failed = next(event for event in b.log.events() if isinstance(event, Failed))
            assert failed.error_class == "taskline.errors.InvalidResult"
            assert not failed.retryable
            assert b.committed().offset == 1

    virtually(scenario())


def test_a_coroutine_is_stopped_at_its_time_limit(bench, virtually, journal) -> None:
    @journal.registry.task("limited", timeout=5)
    async def limited(payload: float) -> None:
        try:
            await asyncio.sleep(payload)
        finally:
            journal.ended.append("limited")

    async def scenario() -> None:
        async with bench(journal.registry, default_timeout_seconds=50) as b:
            b.assign(0)
            b.push(
                b.submission("limited", 100),
                b.submission("sleep", 100),
                b.submission("sleep", 40),
                b.submission("sleep", 10.5, timeout_ms=2_000),
            )
            await asyncio.sleep(3)
            assert b.log.kinds().count("Failed") == 1
            await asyncio.sleep(3)
            assert journal.ended == ["limited"]
            assert b.log.kinds().count("Failed") == 2
            await asyncio.sleep(50)
            assert b.log.kinds().count("Failed") == 3
            assert 40 in journal.ended
            failures = [event for event in b.log.events() if isinstance(event, Failed)]
            assert [event.error_class for event in failures] == ["TimeoutError"] * 3
            assert "2 s" in failures[0].message
            assert all(event.retryable for event in failures)

    virtually(scenario())


def test_a_coroutine_that_swallows_its_cancellation_is_left_behind(bench, virtually, journal) -> None:
    @journal.registry.task("stubborn", timeout=1)
    async def stubborn(payload: Any) -> str:
        while True:
            try:
                await asyncio.sleep(1_000)
                break
            except asyncio.CancelledError:
                journal.begun.append("cancelled")
        return "too late"

    @journal.registry.task("tidy", timeout=1)
    async def tidy(payload: Any) -> str:
        try:
            await asyncio.sleep(1_000)
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)
        return "in time"

    async def scenario() -> None:
        async with bench(journal.registry, concurrency=2) as b:
            b.assign(0)
            b.push(
                b.submission("stubborn"),
                b.submission("tidy"),
                b.submission("note", 1),
                b.submission("note", 2),
            )
            await asyncio.sleep(20)
            assert sorted(journal.ended) == [1, 2]
            assert journal.begun.count("cancelled") == 1
            kinds = b.log.kinds()
            assert kinds.count("Failed") == 1
            assert kinds.count("Succeeded") == 3
            assert b.committed().offset == 4

    virtually(scenario())


# ---- an absent log -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [DeliveryFailed("away"), DeliveryUnknown("who knows")])
def test_a_task_does_not_run_until_its_start_is_acknowledged_however_long_that_takes(
    bench, virtually, journal, error
) -> None:
    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0)
            b.log.verdict = lambda record: error
            b.push(*(b.submission("note", n) for n in range(3)))
            await asyncio.sleep(600)
            assert journal.begun == []
            assert b.progress() == (0, ())
            # Bounded pauses, but no hammering.
            assert b.log.attempts <= 3 * 600
            b.log.verdict = lambda record: None
            await asyncio.sleep(6)
            assert sorted(journal.ended) == [0, 1, 2]
            assert b.committed().offset == 3

    virtually(scenario())


def test_an_outcome_is_appended_again_until_acknowledged_and_the_handler_runs_once(
    bench, virtually, journal
) -> None:
    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0)
            b.push(b.submission("wait", 1))
            await asyncio.sleep(1)
            b.log.verdict = lambda record: DeliveryUnknown("no answer")
            journal.gate(1).set()
            await asyncio.sleep(300)
            assert b.progress() == (0, ())
            b.log.verdict = lambda record: None
            await asyncio.sleep(6)
            assert journal.begun == [1]
            assert b.committed().offset == 1
            succeeded = [event for event in b.log.events() if isinstance(event, Succeeded)]
            assert len({event.execution for event in succeeded}) == 1

    virtually(scenario())


def test_commits_that_fail_are_followed_by_newer_ones(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0, 1)
            b.intakes[Priority.NORMAL].commit_error = RuntimeError("rebalance in progress")
            b.push(b.submission("note", 1), partition=0)
            await asyncio.sleep(5)
            b.push(b.submission("note", 2), partition=0)
            await asyncio.sleep(5)
            assert b.progress() == (0, ())
            b.intakes[Priority.NORMAL].commit_error = None
            await asyncio.sleep(1)
            # What did not move is not committed.
            assert b.intakes[Priority.NORMAL].commits == [{b.name(0): b.committed(0)}]
            assert b.committed(0).offset == 2
            await asyncio.sleep(10)
            assert len(b.intakes[Priority.NORMAL].commits) == 1

    virtually(scenario())


# ---- back-pressure -------------------------------------------------------------------------------------------------


def test_a_full_buffer_pauses_its_intake_only_and_half_of_it_resumes(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry, concurrency=2, prefetch=10) as b:
            b.assign(0)
            b.assign(0, priority=Priority.HIGH)
            normal, high = b.intakes[Priority.NORMAL], b.intakes[Priority.HIGH]
            b.push(*(b.submission("wait", n) for n in range(12)))
            assert normal.paused
            assert not high.paused
            await asyncio.sleep(1)
            # Two run, ten wait.
            for number in range(4):
                journal.gate(number).set()
                await asyncio.sleep(1)
            assert normal.paused
            journal.gate(4).set()
            await asyncio.sleep(1)
            assert not normal.paused
            for number in range(5, 12):
                journal.gate(number).set()

    virtually(scenario())


def test_a_window_of_records_that_are_not_done_holds_its_own_partition_only(
    bench, virtually, journal
) -> None:
    async def scenario() -> None:
        async with bench(journal.registry, window=8, prefetch=100, high_reserve=0) as b:
            b.assign(0, 1)
            intake = b.intakes[Priority.NORMAL]
            b.push(*(b.submission("wait", n) for n in range(8)))
            assert intake.held == {b.name(0)}
            await asyncio.sleep(1)
            b.push(b.submission("note", "other"), partition=1)
            await asyncio.sleep(1)
            assert "other" in journal.ended
            assert intake.held == {b.name(0)}
            for number in range(8):
                journal.gate(number).set()
            await asyncio.sleep(1)
            assert intake.held == set()
            assert b.committed(0).offset == 8

    virtually(scenario())


def test_behind_a_long_head_thousands_complete_and_only_the_head_is_left_to_repeat(
    bench, virtually, journal
) -> None:
    async def scenario() -> None:
        async with bench(journal.registry, window=8, prefetch=100) as b:
            b.assign(0)
            b.push(b.submission("wait", "head"))
            for _ in range(500):
                b.push(*(b.submission("note", n) for n in range(7)))
                await asyncio.sleep(0.1)
            await asyncio.sleep(1)
            assert len(journal.ended) == 3_500
            assert b.intakes[Priority.NORMAL].held == set()
            commit = b.committed(0)
            tracker = WatermarkTracker.resumed(b.name(0), commit)
            again = [offset for offset in range(commit.offset, 3_501) if tracker.take(offset)]
            assert again == [0]
            journal.gate("head").set()

    virtually(scenario())


def test_a_record_delivered_twice_or_without_an_assignment_is_not_run(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0)
            record = b.record(b.codec.encode(b.submission("note", 1)))
            b.receive([record])
            b.receive([record])
            stray = dataclasses.replace(record, position=dataclasses.replace(record.position, partition=5))
            b.receive([stray])
            await asyncio.sleep(1)
            assert journal.begun == [1]

    virtually(scenario())


# ---- moves and shutdown ----------------------------------------------------------------------------------------------


def test_a_revocation_waits_for_what_runs_drops_what_is_buffered_and_commits_the_rest(
    bench, virtually, journal
) -> None:
    async def scenario() -> None:
        async with bench(journal.registry, concurrency=3, grace_seconds=30) as b:
            b.assign(0, 1)
            b.push(b.submission("sleep", 10.0), b.submission("note", "quick"), b.submission("sleep", 20.0))
            await asyncio.sleep(1)
            b.push(b.submission("wait", "kept"), partition=1)
            await asyncio.sleep(1)
            b.push(*(b.submission("note", f"buffered{n}") for n in range(5)))
            before = asyncio.get_running_loop().time()
            commits = await b.intakes[Priority.NORMAL].revoke(b.name(0))
            assert 17 < asyncio.get_running_loop().time() - before < 20
            assert dict(commits) == {b.name(0): commits[b.name(0)]}
            assert (commits[b.name(0)].offset, commits[b.name(0)].metadata) == (3, "")
            await asyncio.sleep(5)
            assert "buffered0" not in journal.begun
            assert "kept" not in journal.ended
            assert "Released" not in b.log.kinds()
            journal.gate("kept").set()
            await asyncio.sleep(1)
            assert b.committed(1).offset == 1

    virtually(scenario())


def test_what_outlasts_the_grace_is_cancelled_released_and_left_uncommitted(
    bench, virtually, journal
) -> None:
    async def scenario() -> None:
        async with bench(journal.registry, grace_seconds=5) as b:
            b.assign(0)
            slow, quick = b.submission("sleep", 60.0), b.submission("note", 1)
            b.push(slow, quick)
            await asyncio.sleep(1)
            commits = await b.intakes[Priority.NORMAL].revoke(b.name(0))
            commit = commits[b.name(0)]
            assert commit.offset == 0
            assert decode_holes(0, commit.metadata) == ((1, 2),)
            assert b.log.kinds(slow.task_id) == ["Started", "Released"]
            started, released = [event for event in b.log.events() if event.task_id == slow.task_id]
            assert isinstance(released, Released)
            assert released.execution == started.execution
            assert released.reason == "revoked"
            # The partition comes back: only the released one runs again.
            b.assign(0, offset=commit.offset, metadata=commit.metadata)
            b.push(slow, quick)
            await asyncio.sleep(100)
            assert journal.ended == [1, 60.0]
            assert b.log.kinds(slow.task_id) == ["Started", "Released", "Started", "Succeeded"]
            assert b.committed().offset == 2

    virtually(scenario())


def test_a_lost_partition_is_dropped_without_a_commit(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0)
            b.push(b.submission("sleep", 60.0), b.submission("wait", 1))
            await asyncio.sleep(0.4)
            b.intakes[Priority.NORMAL].lose(b.name(0))
            await asyncio.sleep(5)
            assert b.log.kinds() == ["Started", "Started", "Released", "Released"]
            journal.gate(1).set()
            await asyncio.sleep(60)
            assert journal.ended == []
            assert b.progress() == (0, ())
        assert b.progress() == (0, ())

    virtually(scenario())


def test_a_stop_drains_what_runs_and_hands_back_the_rest(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry, concurrency=2, grace_seconds=10) as b:
            b.assign(0)
            b.push(b.submission("sleep", 5.0), b.submission("sleep", 60.0), b.submission("note", "buffered"))
            await asyncio.sleep(1)
        assert journal.begun == [5.0, 60.0]
        assert journal.ended == [5.0]
        kinds = b.log.kinds()
        assert kinds[:2] == ["Started", "Started"]
        assert sorted(kinds[2:]) == ["Released", "Succeeded"]
        assert next(event.reason for event in b.log.events() if isinstance(event, Released)) == "shutdown"
        assert all(intake.closed for intake in b.intakes.values())
        assert b.committed().offset == 1
        # The ten seconds of grace, and not more.
        assert asyncio.get_running_loop().time() < 13

    virtually(scenario())


def test_a_stop_while_the_log_is_away_ends_in_bounded_time(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry, grace_seconds=10) as b:
            b.assign(0)
            b.push(b.submission("note", 1), b.submission("wait", 2))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            b.log.verdict = lambda record: "hang"
            await asyncio.sleep(1)
            assert journal.begun == [1, 2]
        assert asyncio.get_running_loop().time() < 20
        assert b.committed().offset == 0

    virtually(scenario())


def test_an_intake_that_can_not_go_on_ends_the_worker_after_a_drain(bench, virtually, journal) -> None:
    async def scenario() -> None:
        b = bench(journal.registry, grace_seconds=30)
        async with b:
            b.assign(0)
            b.push(b.submission("sleep", 3.0))
            await asyncio.sleep(1)
            b.intakes[Priority.LOW].sink.failed(
                WrongTopology(["offset out of range"], "taskline topics create")
            )
            with pytest.raises(WrongTopology):
                await b.running
            b.running = asyncio.ensure_future(asyncio.sleep(0))
            assert journal.ended == [3.0]
            assert b.committed().offset == 1

    virtually(scenario())


def test_an_intake_that_can_not_start_ends_the_worker(bench, virtually, journal) -> None:
    async def scenario() -> None:
        b = bench(journal.registry)
        b.intakes[Priority.NORMAL].start_error = WrongTopology(["no offsets"], "taskline topics create")
        with pytest.raises(WrongTopology):
            await b.engine.run(b.stop)
        assert b.intakes[Priority.HIGH].closed

    virtually(scenario())


# ---- all at once -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_random_durations_faults_and_moves_lose_nothing_and_repeat_only_what_was_unfinished(
    bench, virtually, seed
) -> None:
    rng = random.Random(seed)
    registry = Registry()
    runs: dict[int, int] = {}

    @registry.task("work")
    async def work(payload: int) -> None:
        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.05, 1, 8]))
        runs[payload] = runs.get(payload, 0) + 1

    async def scenario() -> None:
        tasks: list[Any] = []
        repeats_allowed = 0
        async with bench(registry, concurrency=8, prefetch=16, window=64, grace_seconds=2) as b:
            b.log.verdict = lambda record: (
                DeliveryUnknown("lost ack")
                if rng.random() < 0.05
                else DeliveryFailed("no")
                if rng.random() < 0.05
                else None
            )
            intake = b.intakes[Priority.NORMAL]
            tasks = [b.submission("work", number) for number in range(400)]
            offset, metadata, end = 0, "", len(tasks)
            while offset < end:
                b.assign(0, offset=offset, metadata=metadata)
                read = offset
                for _ in range(rng.randrange(5, 60)):
                    if not intake.paused and not intake.held and read < end:
                        batch = tasks[read : read + rng.randrange(1, 20)]
                        b.push(*batch)
                        read += len(batch)
                    await asyncio.sleep(rng.choice([0, 0.01, 0.3]))
                if rng.random() < 0.5:
                    await intake.revoke(b.name(0))
                else:
                    intake.lose(b.name(0))
                    repeats_allowed += 64
                commit = b.committed()
                if commit is not None:
                    assert commit.offset >= offset
                    offset, metadata = commit.offset, commit.metadata
        assert sorted(runs) == list(range(400))
        assert sum(count - 1 for count in runs.values()) <= repeats_allowed

    virtually(scenario())


# ---- an absent schema registry -----------------------------------------------------------------------------------------


def test_records_and_events_wait_for_a_schema_registry_that_is_away(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0)
            decode, encode, task = b.codec.decode, b.codec.encode, b.submission("note", 1)
            record = b.record(encode(task))

            def away(*_: object) -> None:
                raise Unavailable("the registry does not answer")

            b.codec.decode = away
            b.receive([record])
            await asyncio.sleep(100)
            assert b.log.records == []
            b.codec.decode, b.codec.encode = decode, away
            await asyncio.sleep(100)
            assert journal.begun == []
            b.codec.encode = encode
            await asyncio.sleep(10)
            assert journal.ended == [1]
            assert b.log.kinds() == ["Started", "Succeeded"]
            assert b.committed().offset == 1

    virtually(scenario())


def test_what_waits_for_its_schema_goes_with_its_partition(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry, prefetch=1) as b:
            b.assign(0)
            decode, record = b.codec.decode, b.record(b.codec.encode(b.submission("note", 1)))

            def away(*_: object) -> None:
                raise Unavailable("the registry does not answer")

            b.codec.decode = away
            b.receive([record])
            await asyncio.sleep(1)
            assert b.intakes[Priority.NORMAL].paused
            commits = await b.intakes[Priority.NORMAL].revoke(b.name(0))
            assert commits[b.name(0)].offset == 0
            b.codec.decode = decode
            await asyncio.sleep(5)
            assert journal.begun == []
            assert not b.intakes[Priority.NORMAL].paused

    virtually(scenario())


def test_a_start_that_is_acknowledged_as_the_partition_goes_does_not_begin(bench, virtually, journal) -> None:
    async def scenario() -> None:
        async with bench(journal.registry) as b:
            b.assign(0)
            b.log.ack_seconds = 1
            b.push(*(b.submission("note", n) for n in range(3)))
            # The revocation comes in the very turn of the loop in which the acknowledgement does.
            asyncio.get_running_loop().call_later(1, lambda: going.append(asyncio.ensure_future(revoke())))
            going: list[asyncio.Future[Any]] = []

            async def revoke() -> Any:
                return await b.intakes[Priority.NORMAL].revoke(b.name(0))

            await asyncio.sleep(30)
            commits = await going[0]
            assert journal.begun in ([], [0, 1, 2])
            assert commits[b.name(0)].offset == len(journal.begun)
            assert b.log.kinds().count("Released") == 3 - len(journal.begun)

    virtually(scenario())
