"""2,000 delayed records while the delay role is killed (-9), stopped for longer than its session, and Kafka restarted: all arrive, none early."""

from __future__ import annotations

import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from delay_kit import Delayed, Delivery, committed

from taskline.infra.kafka.admin import create_topics
from taskline.infra.local.roles import Role
from taskline.infra.local.stack import LocalStack
from taskline.processors.delay_progress import MAX_UNCOMMITTED
from taskline.settings import Settings

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]

RECORDS = 2_000
SEED = 20
SESSION_SECONDS = 6.0
END_SECONDS = 90.0


@pytest.fixture(scope="module")
def settings(stack: LocalStack) -> Settings:
    settings = Settings.model_validate(
        {
            "kafka": {
                "bootstrap_servers": stack.bootstrap_servers,
                "session_timeout_ms": round(SESSION_SECONDS * 1_000),
            },
            "topics": {"delay_partitions": 2},
            # The whole chain of commits and purges is under way all the time.
            "delay": {"purge_interval_seconds": 2},
        }
    )
    create_topics(settings)
    return settings


def test_nothing_that_waits_is_lost_or_early(stack: LocalStack, settings: Settings, tmp_path: Path) -> None:
    delivery = Delivery(settings)
    rng = random.Random(SEED)
    waiting = [
        Delayed(number=number, delay_ms=rng.randint(1_000, 20_000), retry=number % 2 == 0)
        for number in range(RECORDS)
    ]
    first, second = (Role(("delay",), settings, log=tmp_path / f"delay-{n}.log") for n in range(2))
    repeated: dict[str, int] = {}
    before = 0
    began = time.monotonic()

    def so_far(what: str) -> None:
        nonlocal before
        counts = delivery.counts()
        now = sum(counts.values()) - len(counts)
        repeated[what] = now - before
        before = now
        print(f"{time.monotonic() - began:.0f} s: {len(counts)} arrived, {what}: {repeated[what]} repeated")

    with ExitStack() as running:
        running.enter_context(first)
        delivery.send(waiting[: RECORDS // 4])
        delivery.follow_until(50, END_SECONDS)

        first.kill()
        first.start()
        delivery.send(waiting[RECORDS // 4 : RECORDS // 2])
        delivery.follow_until(RECORDS // 4, END_SECONDS)
        so_far("kill -9")

        # A second process takes over while the first is stopped for longer than its session.
        first.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        running.enter_context(second)
        delivery.send(waiting[RECORDS // 2 : RECORDS * 3 // 4])
        delivery.follow(SESSION_SECONDS * 1.5)
        first.signal(signal.SIGCONT)
        assert time.monotonic() - stopped > SESSION_SECONDS
        delivery.follow_until(RECORDS // 2, END_SECONDS)
        so_far("SIGSTOP")

        delivery.send(waiting[RECORDS * 3 // 4 :])
        delivery.follow(1)
        stack.kill("kafka")
        delivery.follow(2)
        stack.start("kafka")
        delivery.follow_until(RECORDS, END_SECONDS)
        # What would come twice comes soon.
        delivery.follow(3)
        so_far("Kafka restarted")
        for role in (first, second):
            role.check()
        exits = [role.stop() for role in (first, second)]

    late = sorted(delivery.lateness_ms())
    print(
        f"{len(delivery.counts())} of {RECORDS} arrived; repeated: {repeated}; "
        f"late ms: min {late[0]}, p50 {late[len(late) // 2]}, max {late[-1]}"
    )
    for role in (first, second):
        print("---", role.log.name, "\n", role.tail())
    assert delivery.failed == 0
    assert set(delivery.counts()) == set(range(RECORDS))
    assert late[0] >= 0
    assert all(count <= MAX_UNCOMMITTED for count in repeated.values())
    assert exits == [0, 0]
    assert all(offset > 0 for offset in committed(settings, [_scheduled(settings)]).values())
    delivery.close()


def _scheduled(settings: Settings) -> str:
    from taskline.infra.topics import Topics

    return Topics(namespace=settings.kafka.namespace).scheduled
