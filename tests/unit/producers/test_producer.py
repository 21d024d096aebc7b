"""The sync producer against a double of the publisher, whose acknowledgements the test decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from taskline.errors import (
    DeliveryError,
    DeliveryFailed,
    DeliveryUnknown,
    InvalidPayload,
    InvalidRequest,
    ProducerClosed,
    QueueFull,
    Undelivered,
    UnknownTaskType,
)
from taskline.infra.log import OutRecord, Position
from taskline.producers import Submission, TaskFailure, TaskHandle, TaskProducer, producer
from taskline.settings import Settings


class FakePublisher:
    """Acknowledges at once, unless told to hold."""

    def __init__(self, *_: object, **__: object) -> None:
        self.hold = False
        self.failure: Exception | None = None
        self.held: list[Callable[[Position | DeliveryError], None]] = []
        self.records: list[OutRecord] = []
        self.most_held = 0
        self.full = False

    def send(self, record: OutRecord, on_ack: Callable[[Position | DeliveryError], None]) -> None:
        if self.full:
            raise QueueFull("full")
        self.records.append(record)
        self.held.append(on_ack)
        self.most_held = max(self.most_held, len(self.held))
        if not self.hold:
            self.settle()

    def settle(self, outcome: DeliveryError | None = None) -> None:
        held, self.held = self.held, []
        for number, on_ack in enumerate(held):
            on_ack(outcome or Position(topic="t", partition=0, offset=number))

    def flush(self, timeout_seconds: float) -> int:
        return len(self.held)

    def close(self, timeout_seconds: float) -> int:
        left = len(self.held)
        self.settle(DeliveryUnknown("given up"))
        return left


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakePublisher:
    made = FakePublisher()
    monkeypatch.setattr(producer, "Publisher", lambda *_, **__: made)
    return made


@pytest.fixture
def tasks(fake: FakePublisher, types: Any) -> TaskProducer:
    return TaskProducer(Settings(), types)


def items(count: int) -> Iterator[Submission]:
    return (Submission(task_type="any.json", payload=number) for number in range(count))


def abandon(tasks: TaskProducer) -> None:
    """Send a task whose outcome nobody waits for, as a caller does that leaves a `submit_many`."""
    tasks._send(tasks._preparation.prepare_item(next(items(1))), 0)


def test_a_handle_is_what_was_acknowledged(fake: FakePublisher, tasks: TaskProducer) -> None:
    handle = tasks.submit("any.json", {"a": 1}, priority="high", tenant="acme")
    assert handle.position == Position(topic="t", partition=0, offset=0)
    assert handle.status == "pending"
    assert handle.created_at.utcoffset() is not None
    (record,) = fake.records
    assert record.topic == "tasks.high"
    assert record.key == handle.task_id.bytes


def test_submit_waits_for_the_acknowledgement(fake: FakePublisher, tasks: TaskProducer) -> None:
    fake.hold = True
    handles: list[TaskHandle] = []
    submitter = threading.Thread(target=lambda: handles.append(tasks.submit("any.json", 1)))
    submitter.start()
    while not fake.held:
        submitter.join(0.001)
    assert not handles
    fake.settle()
    submitter.join(10)
    assert len(handles) == 1


def test_wrong_input_is_refused_before_anything_is_sent(fake: FakePublisher, tasks: TaskProducer) -> None:
    with pytest.raises(UnknownTaskType, match=r"did you mean 'geo\.nearest'"):
        tasks.submit("geo.neerest", {})
    with pytest.raises(InvalidPayload):
        tasks.submit("geo.nearest", {"lat": 1.0})
    with pytest.raises(TypeError, match="prioritty"):
        tasks.submit("any.json", 1, prioritty="high")  # type: ignore[call-arg]
    assert fake.records == []


@pytest.mark.parametrize("kind", [DeliveryFailed, DeliveryUnknown])
def test_a_failed_delivery_names_its_task(
    fake: FakePublisher, tasks: TaskProducer, kind: type[DeliveryError]
) -> None:
    fake.send = lambda record, on_ack: (fake.records.append(record), on_ack(kind("no")))  # type: ignore[method-assign, assignment]
    with pytest.raises(kind) as caught:
        tasks.submit("any.json", 1)
    assert caught.value.task_id is not None
    tasks.close()


def test_submit_many_keeps_the_order_and_goes_on_past_bad_items(tasks: TaskProducer) -> None:
    mixed: list[Any] = [
        Submission(task_type="any.json", payload=0),
        Submission(task_type="nobody.knows", payload=0),
        Submission(task_type="geo.nearest", payload={"lat": "x", "lon": 1.0}),
        "not a submission",
        Submission(task_type="any.json", payload=1, max_retries=1_000),
        Submission(task_type="any.json", payload=2),
    ]
    results = list(tasks.submit_many(mixed))
    assert [type(result) for result in results] == [TaskHandle] + [TaskFailure] * 4 + [TaskHandle]
    failures = [result for result in results if isinstance(result, TaskFailure)]
    assert [failure.index for failure in failures] == [1, 2, 3, 4]
    assert all(isinstance(failure.error, InvalidRequest) for failure in failures)
    assert all(failure.task_id is None for failure in failures)


def test_submit_many_is_bounded_and_takes_items_as_room_appears(fake: FakePublisher, types: Any) -> None:
    settings = Settings.model_validate({"producer": {"max_buffered_records": 10}})
    tasks = TaskProducer(settings, types)
    fake.hold = True
    taken: list[int] = []

    def endless() -> Iterator[Submission]:
        for number in range(10**9):
            taken.append(number)
            yield Submission(task_type="any.json", payload=number)

    stop = threading.Event()

    def acknowledge() -> None:
        while not stop.wait(0.001):
            fake.settle()

    acknowledger = threading.Thread(target=acknowledge)
    acknowledger.start()
    results = tasks.submit_many(endless())
    for count in range(1, 200):
        assert isinstance(next(results), TaskHandle)
        assert len(taken) <= count + 10
    stop.set()
    acknowledger.join()
    assert fake.most_held <= 10


def test_a_full_buffer_fails_the_item_not_the_rest(fake: FakePublisher, tasks: TaskProducer) -> None:
    fake.full = True
    (failure,) = tasks.submit_many(items(1))
    assert isinstance(failure, TaskFailure)
    assert isinstance(failure.error, QueueFull)


def test_closing_ends_a_pipeline_after_its_results(fake: FakePublisher, tasks: TaskProducer) -> None:
    results = tasks.submit_many(items(3))
    assert isinstance(next(results), TaskHandle)
    tasks.close()
    with pytest.raises(ProducerClosed):
        next(results)


def test_close_names_what_was_not_acknowledged(fake: FakePublisher, tasks: TaskProducer) -> None:
    fake.hold = True
    results = tasks.submit_many(items(5))
    waiting = threading.Thread(target=lambda: list(results))
    waiting.start()
    while len(fake.held) < 5:
        waiting.join(0.001)
    with pytest.raises(Undelivered) as caught:
        tasks.close(0)
    assert len(set(caught.value.task_ids)) == 5
    waiting.join(10)
    assert not waiting.is_alive()
    tasks.close()
    with pytest.raises(ProducerClosed):
        tasks.submit("any.json", 1)


def test_close_names_failures_that_nobody_has_seen(fake: FakePublisher, tasks: TaskProducer) -> None:
    results = tasks.submit_many(items(3))
    next(results)
    fake.send = lambda record, on_ack: on_ack(DeliveryUnknown("late"))  # type: ignore[method-assign, assignment]
    left = tasks.submit_many(items(4))
    assert isinstance(next(left), TaskFailure)
    left.close()  # type: ignore[attr-defined]
    abandon(tasks)
    with pytest.raises(Undelivered) as caught:
        tasks.close()
    assert len(caught.value.task_ids) == 1


def test_leaving_the_block_by_an_error_shows_that_error(fake: FakePublisher, tasks: TaskProducer) -> None:
    fake.hold = True
    abandon(tasks)
    error = ZeroDivisionError()
    with tasks:
        tasks.__exit__(ZeroDivisionError, error, None)
    assert "not acknowledged" in error.__notes__[0]


def test_leaving_the_block_with_undelivered_tasks_raises(fake: FakePublisher, tasks: TaskProducer) -> None:
    fake.hold = True
    abandon(tasks)
    with pytest.raises(Undelivered), tasks:
        pass


def test_a_registry_is_a_type_source_too(fake: FakePublisher, types: Any) -> None:
    class Registry:
        def catalogue(self) -> Any:
            return types

    assert TaskProducer(Settings(), Registry()).submit("any.json", 1)


def test_a_registry_of_handlers_is_as_good_as_its_catalogue() -> None:
    from taskline.producers.type_source import TypesAtHand
    from taskline.settings import Settings
    from taskline.workers.registry import Registry

    registry = Registry()

    @registry.task("any.json")
    def handler(payload: object) -> None: ...

    found = TypesAtHand(Settings(), registry).source().get("any.json")
    assert found == registry.catalogue().get("any.json")
