"""The worker process on a real Kafka: what it promises when it is killed, stopped, joined, and fed with garbage."""

from __future__ import annotations

import collections
import contextlib
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from worker_kit import CODEC, Workers, events, eventually, lag, mixed_jobs, read_all, submit

from taskline.infra.log import HEADER_CAUSE, HEADER_SOURCE
from taskline.infra.topics import Topics
from taskline.schemas.events import DeadLetter, DeadLettered, Priority, Released, Started, Succeeded
from taskline.settings import Settings

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]


@pytest.fixture
def workers(topics_created: Settings, tmp_path: Path) -> Iterator[Workers]:
    started = Workers(topics_created, tmp_path)
    try:
        yield started
    finally:
        started.end()


def test_thousands_of_tasks_of_any_length_run_once_each_and_everything_is_committed(workers: Workers) -> None:
    settings = workers.settings
    worker = workers.start()
    jobs = mixed_jobs(3_000, seed=1, durations=(0, 0, 0, 0.001, 0.01, 0.1, 0.5))
    chunks = [{n: jobs[n] for n in jobs if n % 3 == rest} for rest in range(3)]
    for priority, chunk in zip(Priority, chunks, strict=True):
        submit(settings, chunk, priority)
    eventually(lambda: len(workers.ledger.count("end")) == len(jobs), "all ended")
    eventually(lambda: lag(settings) == 0, "all committed")
    assert workers.stop(worker) == 0
    assert workers.ledger.count("begin") == collections.Counter(list(jobs))
    history = events(settings)
    assert len(history) == len(jobs)
    for entries in history.values():
        started, succeeded = entries
        assert isinstance(started, Started)
        assert isinstance(succeeded, Succeeded)
        assert started.execution == succeeded.execution


def test_a_killed_worker_repeats_at_most_what_was_in_flight(workers: Workers) -> None:
    settings, concurrency = workers.settings, 16
    jobs = mixed_jobs(900, seed=2, durations=(0.01, 0.05, 0.1, 0.5))
    submit(settings, jobs)
    first = workers.start("worker_tasks:registry", "--concurrency", str(concurrency))
    eventually(lambda: len(workers.ledger.count("end")) >= 400, "a part has ended")
    first.kill()
    first.wait()
    ended_before = set(workers.ledger.count("end"))
    unfinished = set(workers.ledger.count("begin")) - ended_before
    assert len(unfinished) <= concurrency
    second = workers.start("worker_tasks:registry", "--concurrency", str(concurrency))
    eventually(lambda: len(workers.ledger.count("end")) == len(jobs), "all ended")
    eventually(lambda: lag(settings) == 0, "all committed")
    assert workers.stop(second) == 0
    begun = workers.ledger.count("begin")
    assert set(begun) == set(jobs)
    again = {number for number, count in begun.items() if count > 1}
    # What ran, and what had ended but was not yet committed: the records of one commit interval.
    ended_again = again - unfinished
    print(
        "killed while",
        len(unfinished),
        "ran; ended ones that ran again:",
        len(ended_again),
        "of",
        len(ended_before),
    )
    assert max(begun.values()) <= 2
    assert len(ended_again) <= 150
    # Every task ends in the log, exactly the repeated ones with two executions.
    for entries in events(settings).values():
        assert isinstance(entries[-1], Succeeded)


def test_a_handler_that_takes_the_worker_along_does_so_once(workers: Workers) -> None:
    settings = workers.settings
    jobs = dict.fromkeys(range(6), ("test.async", 2.0)) | {6: ("test.kill", 0.5)}
    handles = dict(zip(jobs, submit(settings, jobs), strict=True))
    # All at once, in the worker's own process, so that they die together.
    options = {"coroutines": "inline", "high_reserve": 0, "commit_interval_seconds": 60}
    first = workers.start("worker_tasks:registry", "--concurrency", "8", **options)
    assert first.wait(60) == -signal.SIGKILL
    second = workers.start("worker_tasks:registry", "--concurrency", "8", poison_deaths=1, **options)
    eventually(
        lambda: (
            len(workers.ledger.count("end")) == 6
            and any(isinstance(each, DeadLettered) for each in events(settings)[handles[6].task_id])
        ),
        "the others ended, and the killer is dead",
    )
    assert second.poll() is None, "it took a second worker along"
    assert workers.stop(second) == 0
    last = events(settings)[handles[6].task_id][-1]
    assert isinstance(last, DeadLettered)
    assert last.reason == "poison"
    # With the worker, and then alone in a child.
    assert workers.ledger.count("begin")[6] == 2
    for number in range(6):
        ends = [each for each in events(settings)[handles[number].task_id] if isinstance(each, Succeeded)]
        assert len(ends) == 1


def test_a_stopped_worker_finishes_what_runs_hands_back_the_rest_and_nothing_runs_twice_needlessly(
    workers: Workers,
) -> None:
    settings = workers.settings
    jobs = {number: ("test.async" if number % 2 else "test.plain", 0.5) for number in range(60)}
    jobs[1] = ("test.async", 60.0)
    handles = dict(zip(jobs, submit(settings, jobs), strict=True))
    first = workers.start("worker_tasks:registry", "--concurrency", "8", grace_seconds=5)
    eventually(
        lambda: len(workers.ledger.count("end")) >= 16 and 1 in workers.ledger.count("begin"),
        "a part has ended",
    )
    begun = time.monotonic()
    assert workers.stop(first) == 0
    assert time.monotonic() - begun < 20
    begun_by_first, ended_by_first = workers.ledger.count("begin"), workers.ledger.count("end")
    # All that had begun also ended, but for the one that outlasts the grace.
    assert set(begun_by_first) - set(ended_by_first) == {1}
    released = [event for event in events(settings)[handles[1].task_id] if isinstance(event, Released)]
    assert [event.reason for event in released] == ["shutdown"]
    second = workers.start("worker_tasks:registry", "--concurrency", "64")
    eventually(lambda: set(workers.ledger.count("end")) == set(jobs) - {1}, "all but the long one ended")
    eventually(lambda: workers.ledger.count("begin")[1] == 2, "the long one began again")
    second.kill()
    counts = workers.ledger.count("begin")
    assert {number for number, count in counts.items() if count > 1} == {1}


def test_bytes_that_are_no_task_go_to_the_dead_letter_topic_verbatim(workers: Workers) -> None:
    settings = workers.settings
    names = Topics(namespace=settings.kafka.namespace)
    topic = names.dispatch("default", Priority.NORMAL)
    garbage: list[tuple[bytes | None, bytes | None]] = [
        (b"\x00garbage", b"k1"),
        (None, b"k2"),
        (b"", None),
        (b"\xc3\x01" + bytes(30), b"\xff\xfe"),
        (b"{}" * 20_000, b"k5"),
        (None, None),
    ]
    producer = Producer({"bootstrap.servers": settings.kafka.bootstrap_servers})
    for value, key in garbage:
        producer.produce(topic, value=value, key=key, headers=[("x-any", b"\x00\x01")])
    producer.flush(10)
    submit(settings, {1: ("test.async", 0.0), 2: ("test.fail", 0.0)})
    worker = workers.start()
    eventually(lambda: workers.ledger.count("end")[1] == 1, "the good one ran")
    eventually(lambda: lag(settings) == 0, "all committed")
    assert workers.stop(worker) == 0
    dead = read_all(settings, names.dlq)
    verbatim = [message for message in dead if HEADER_CAUSE in dict(message.headers())]
    assert sorted(((m.value(), m.key()) for m in verbatim), key=repr) == sorted(garbage, key=repr)
    for message in verbatim:
        headers = dict(message.headers())
        assert headers["x-any"] == b"\x00\x01"
        assert headers[HEADER_SOURCE].startswith(topic.encode() + b"/")
    (letter,) = [CODEC.decode(m.value(), DeadLetter) for m in dead if m not in verbatim]
    assert (letter.task_type, letter.reason, letter.error_class, letter.message) == (
        "test.fail",
        "exhausted",
        "ValueError",
        "number 2",
    )


def test_a_second_worker_takes_its_share_and_finished_tasks_do_not_run_again(workers: Workers) -> None:
    settings = workers.settings
    jobs = mixed_jobs(700, seed=3, durations=(0.01, 0.05, 0.1, 0.5))
    submit(settings, {number: jobs[number] for number in range(300)})
    first = workers.start("worker_tasks:registry", "--concurrency", "8")
    eventually(lambda: len(workers.ledger.count("end")) >= 50, "a part has ended")
    second = workers.start("worker_tasks:registry", "--concurrency", "8")
    eventually(lambda: workers.output(second).count("partition assigned") >= 3, "the second has its share")
    submit(settings, {number: jobs[number] for number in range(300, len(jobs))})
    eventually(lambda: {worker for _, worker in workers.ledger.lines("end")} == {0, 1}, "both work")
    assert workers.stop(second) == 0
    third = workers.start("worker_tasks:registry", "--concurrency", "16")
    eventually(lambda: len(workers.ledger.count("end")) == len(jobs), "all ended")
    eventually(lambda: lag(settings) == 0, "all committed")
    assert workers.stop(first) == 0
    assert workers.stop(third) == 0
    assert workers.ledger.count("begin") == collections.Counter(list(jobs))


def test_members_of_both_protocols_share_a_group(workers: Workers) -> None:
    settings = workers.settings
    jobs = mixed_jobs(400, seed=8, durations=(0.01, 0.05, 0.1))
    submit(settings, {number: jobs[number] for number in range(200)})
    first = workers.start("worker_tasks:registry", "--concurrency", "4")
    eventually(lambda: len(workers.ledger.count("end")) >= 50, "a part has ended")
    workers.settings = settings.model_copy(
        update={"kafka": settings.kafka.model_copy(update={"group_protocol": "consumer"})}
    )
    second = workers.start("worker_tasks:registry", "--concurrency", "4")
    eventually(lambda: workers.output(second).count("partition assigned") >= 3, "the second has its share")
    submit(settings, {number: jobs[number] for number in range(200, len(jobs))})
    eventually(lambda: {worker for _, worker in workers.ledger.lines("end")} == {0, 1}, "both work")
    assert workers.stop(first) == 0
    eventually(lambda: len(workers.ledger.count("end")) == len(jobs), "all ended")
    eventually(lambda: lag(settings) == 0, "all committed")
    assert workers.stop(second) == 0
    assert workers.ledger.count("begin") == collections.Counter(list(jobs))


def test_long_stalls_and_full_windows_neither_repeat_nor_lose_a_record(workers: Workers) -> None:
    settings = workers.settings
    rng = random.Random(4)
    jobs = {number: ("test.async", rng.choice((0, 0, 0, 0, 0.05, 0.1))) for number in range(600)}
    # Heads that hold their partition's window, and stalls of the whole buffer beyond a second.
    for number in range(0, 600, 60):
        jobs[number] = ("test.async", 2.5)
    submit(settings, jobs)
    worker = workers.start("worker_tasks:registry", "--concurrency", "4", prefetch=4, window=12)
    eventually(lambda: len(workers.ledger.count("end")) == len(jobs), "all ended")
    eventually(lambda: lag(settings) == 0, "all committed")
    assert workers.stop(worker) == 0
    assert workers.ledger.count("begin") == collections.Counter(list(jobs))


def test_a_partition_that_was_added_is_read_from_its_beginning(workers: Workers) -> None:
    settings = workers.settings
    names = Topics(namespace=settings.kafka.namespace)
    topic = names.dispatch("default", Priority.HIGH)
    admin = AdminClient({"bootstrap.servers": settings.kafka.bootstrap_servers})
    admin.create_partitions([NewPartitions(topic, 5)])[topic].result(20)
    workers.settings = settings.model_copy(
        update={"topics": settings.topics.model_copy(update={"dispatch_partitions": 3})}
    )
    submit(settings, dict.fromkeys(range(100), ("test.async", 0.0)), Priority.HIGH)
    eventually(
        lambda: {m.partition() for m in read_all(settings, topic)} >= {3, 4}, "records on the new ones"
    )
    worker = workers.start()
    eventually(lambda: len(workers.ledger.count("end")) == 100, "all ended")
    assert workers.stop(worker) == 0


def test_a_group_whose_offset_is_not_in_the_log_ends_the_worker_with_the_reason(workers: Workers) -> None:
    settings = workers.settings
    names = Topics(namespace=settings.kafka.namespace)
    topic, group = names.dispatch("default", Priority.LOW), names.worker_group("default", Priority.LOW)
    admin = AdminClient({"bootstrap.servers": settings.kafka.bootstrap_servers})
    admin.alter_consumer_group_offsets(
        [ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 999)])]
    )[group].result(20)
    worker = workers.start()
    assert worker.wait(60) == 1
    output = workers.output(worker)
    assert "is not in the log" in output
    assert group in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("worker_tasks:registry", "--queue", "none"), "no task of queue 'none'"),
        (("worker_tasks:regisry",), "did you mean 'registry'"),
        (("worker_task:registry",), "no module 'worker_task'"),
        (("worker_tasks",), "module:attribute"),
        (("worker_tasks:registry", "--queue", "other"), "topics.queues"),
    ],
)
def test_a_worker_that_can_not_serve_says_why_and_ends(
    workers: Workers, arguments: tuple[str, ...], message: str
) -> None:
    worker = workers.start(*arguments)
    assert worker.wait(60) == 1
    assert message in workers.output(worker)


def test_a_worker_refuses_groups_without_offsets(settings: Settings, tmp_path: Path) -> None:
    from taskline.infra.kafka.admin import create_topics

    create_topics(settings)
    names = Topics(namespace=settings.kafka.namespace)
    group = names.worker_group("default", Priority.NORMAL)
    admin = AdminClient({"bootstrap.servers": settings.kafka.bootstrap_servers})
    admin.delete_consumer_groups([group])[group].result(20)
    started = Workers(settings, tmp_path)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(started.end)
        worker = started.start()
        assert worker.wait(60) == 1
        assert "taskline topics create" in started.output(worker)
