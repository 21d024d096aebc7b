"""A worker while its Kafka is away: it waits, goes on, and leaves in bounded time. On a Kafka of its own, which is killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_kit import Workers, events, eventually, lag, mixed_jobs, submit

from taskline.infra.kafka.admin import create_topics
from taskline.infra.local.config import StackConfig
from taskline.infra.local.errors import NotAvailable
from taskline.infra.local.stack import LocalStack
from taskline.schemas.events import Succeeded
from taskline.settings import Settings

pytestmark = [pytest.mark.servers, pytest.mark.timeout(240)]

# Longer than the session time-out, so that the partitions are lost meanwhile.
AWAY_SECONDS = 10.0


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    try:
        with LocalStack(StackConfig(ephemeral=True, services=("kafka",))).running() as running:
            yield running
    except NotAvailable as reason:
        if os.environ.get("CI"):
            pytest.fail(f"CI needs a Kafka of its own here: {reason}")
        pytest.skip(f"no Kafka of its own: {reason}")


@pytest.fixture
def workers(stack: LocalStack, tmp_path: Path) -> Iterator[Workers]:
    settings = Settings.model_validate(
        {
            "kafka": {
                "bootstrap_servers": stack.bootstrap_servers,
                "session_timeout_ms": 6_000,
                "namespace": f"{tmp_path.name[-20:].replace('_', '-')}.",
            },
            "topics": {"dispatch_partitions": 3, "lanes": 3, "dlq_partitions": 1},
        }
    )
    create_topics(settings)
    started = Workers(settings, tmp_path)
    try:
        yield started
    finally:
        started.end()


def test_a_worker_waits_for_its_kafka_and_goes_on(stack: LocalStack, workers: Workers) -> None:
    jobs = mixed_jobs(500, seed=5, durations=(0.01, 0.05, 0.1))
    submit(workers.settings, jobs)
    worker = workers.start("worker_tasks:registry", "--concurrency", "8")
    eventually(lambda: len(workers.ledger.count("end")) >= 100, "a part has ended")
    stack.kill("kafka")
    time.sleep(AWAY_SECONDS)
    assert worker.poll() is None
    before = len(workers.ledger.count("end"))
    stack.start("kafka")
    eventually(lambda: len(workers.ledger.count("end")) == len(jobs), "all ended")
    eventually(lambda: lag(workers.settings) == 0, "all committed")
    assert workers.stop(worker) == 0
    repeated = sum(workers.ledger.count("begin").values()) - len(jobs)
    print(f"{before} had ended, {repeated} ran again")
    # What ran or had no acknowledged outcome when the log went away, and what was not yet committed.
    assert repeated <= 8 + 150
    history = events(workers.settings)
    assert len(history) == len(jobs)
    assert all(isinstance(entries[-1], Succeeded) for entries in history.values())


def test_a_worker_without_its_kafka_leaves_in_bounded_time(stack: LocalStack, workers: Workers) -> None:
    jobs = mixed_jobs(200, seed=6, durations=(0.05, 0.1))
    submit(workers.settings, jobs)
    worker = workers.start("worker_tasks:registry", "--concurrency", "4", grace_seconds=2)
    eventually(lambda: len(workers.ledger.count("end")) >= 50, "a part has ended")
    stack.kill("kafka")
    begun = time.monotonic()
    assert workers.stop(worker) == 0
    # The grace, the bounds of what follows it, and a slow machine.
    assert time.monotonic() - begun < 50
    stack.start("kafka")
    worker = workers.start("worker_tasks:registry", "--concurrency", "4")
    eventually(lambda: len(workers.ledger.count("end")) == len(jobs), "all ended")
    assert workers.stop(worker) == 0
