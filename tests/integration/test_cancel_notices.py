"""A queue's cancel notices on a real Kafka, which is paused here and there: none is known later than a worker relies on it."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest
from confluent_kafka import KafkaException

from taskline.errors import WrongTopology
from taskline.infra.cancels import NOTICE_FRESH_SECONDS, notice_record
from taskline.infra.kafka.admin import create_topics
from taskline.infra.kafka.asynclog import KafkaLog
from taskline.infra.kafka.cancel_lookup import Bounds, EndLookup
from taskline.infra.kafka.cancel_notices import KafkaNotices
from taskline.infra.kafka.requests import admin_client
from taskline.infra.local.config import StackConfig
from taskline.infra.local.errors import NotAvailable
from taskline.infra.local.stack import LocalStack
from taskline.infra.log import Position
from taskline.infra.role import SystemClock, elapsed_seconds
from taskline.infra.topics import Topics
from taskline.schemas import ids
from taskline.schemas.codec import Codec
from taskline.schemas.events import CancelNotice
from taskline.schemas.ids import TaskId
from taskline.settings import Settings

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

T = TypeVar("T")

CODEC = Codec()
QUEUE = "default"
PRODUCERS = 3
EACH = 60
BACKLOG = 20_000
PAUSED_SECONDS = 3.0
# How often the topic is made anew.
ANEW = 3
# A new topic is seen when the client's metadata is; nothing else here takes longer than a pause.
NEW_TOPIC_SECONDS = 60.0
# Two requests that are not answered, and a client that gives up on a broker.
CLOSE_SECONDS = 15.0


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """A Kafka of the module's own: it is paused."""
    try:
        with LocalStack(StackConfig(ephemeral=True, services=("kafka",))).running() as running:
            yield running
    except NotAvailable as reason:
        if os.environ.get("CI"):
            pytest.fail(f"CI needs a Kafka of its own here: {reason}")
        pytest.skip(f"no Kafka of its own: {reason}")


@pytest.fixture
def bare(stack: LocalStack, tmp_path: Path) -> Settings:
    """Without topics."""
    return Settings.model_validate(
        {
            "kafka": {
                "bootstrap_servers": stack.bootstrap_servers,
                "namespace": f"{tmp_path.name[-30:].replace('_', '-')}.",
            },
            "topics": {"dispatch_partitions": 1, "lanes": 1, "dlq_partitions": 1, "delay_partitions": 1},
            "delay": {"tiers": ("1s",)},
        }
    )


@pytest.fixture
def settings(bare: Settings) -> Settings:
    create_topics(bare)
    return bare


def new_task_id() -> TaskId:
    return ids.new_task_id(SystemClock().now_ms())


class Bench:
    """Notices of one queue, and logs to append them to."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.topics = Topics(namespace=settings.kafka.namespace)
        self.heard: list[TaskId] = []
        self._cleanup = AsyncExitStack()

    def log(self, name: str = "producer") -> KafkaLog:
        made = KafkaLog(self.settings, client_id=name, linger_ms=0.0)
        self._cleanup.push_async_callback(made.close, 10)
        return made

    async def notices(self, name: str = "notices") -> KafkaNotices:
        made = self.unstarted(name)
        self._cleanup.push_async_callback(made.close)
        await made.start(self.heard.append)
        return made

    def unstarted(self, name: str = "notices") -> KafkaNotices:
        return KafkaNotices(self.settings.kafka, self.topics.cancels(QUEUE), CODEC, client_id=name)

    def append(self, log: KafkaLog, task_id: TaskId, *, abort: bool = False) -> Awaitable[Position]:
        notice = CancelNotice(task_id=task_id, abort=abort)
        return log.append(notice_record(notice, queue=QUEUE, topics=self.topics, codec=CODEC))

    async def close(self) -> None:
        await self._cleanup.aclose()


@asynccontextmanager
async def bench(settings: Settings) -> AsyncIterator[Bench]:
    made = Bench(settings)
    try:
        yield made
    finally:
        await made.close()


def run(scenario: Callable[[Bench], Awaitable[T]], settings: Settings) -> T:
    async def body() -> T:
        async with bench(settings) as made:
            return await scenario(made)

    return asyncio.run(body())


async def others(notices: KafkaNotices) -> None:
    """Other tasks of the worker, which share their look-ups with the one at hand."""
    while True:
        await notices.catch_up()
        await asyncio.sleep(0.001)


async def spread() -> None:
    """What a canceller does at least between its notice and its request, before any worker may rely on it."""
    await asyncio.sleep(NOTICE_FRESH_SECONDS)


def spans(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return f"p50 {ordered[len(ordered) // 2] * 1e3:.1f} ms, max {ordered[-1] * 1e3:.0f} ms"


def test_a_notice_that_has_spread_is_known(settings: Settings) -> None:
    async def scenario(bench: Bench) -> None:
        rng = random.Random(1)
        notices = await bench.notices()
        took: list[float] = []

        async def producer(log: KafkaLog) -> None:
            for _ in range(EACH):
                task_id = new_task_id()
                assert not notices.names(task_id)
                await bench.append(log, task_id)
                await spread()
                began = time.perf_counter()
                await notices.catch_up()
                took.append(time.perf_counter() - began)
                assert notices.names(task_id)
                await asyncio.sleep(rng.uniform(0, 0.03))

        busy = asyncio.ensure_future(others(notices))
        await asyncio.gather(*(producer(bench.log(f"producer-{n}")) for n in range(PRODUCERS)))
        assert not busy.done()
        busy.cancel()
        print(f"{len(took)} look-ups among others: {spans(took)}")
        assert not notices.names(new_task_id())

    run(scenario, settings)


def test_after_a_rest_a_notice_is_known_too(settings: Settings) -> None:
    async def scenario(bench: Bench) -> None:
        notices, log = await bench.notices(), bench.log()
        took: list[float] = []
        for _ in range(10):
            # Long enough that nothing is relied on.
            await asyncio.sleep(2 * NOTICE_FRESH_SECONDS)
            task_id = new_task_id()
            await bench.append(log, task_id)
            await spread()
            began = time.perf_counter()
            await notices.catch_up()
            took.append(time.perf_counter() - began)
            assert notices.names(task_id)
        print(f"{len(took)} look-ups at rest: {spans(took)}")

    run(scenario, settings)


def test_a_day_of_notices_is_read_before_the_start_is_over(settings: Settings) -> None:
    async def scenario(bench: Bench) -> None:
        log = bench.log()
        task_ids = [new_task_id() for _ in range(BACKLOG)]
        await asyncio.gather(*(bench.append(log, task_id) for task_id in task_ids))
        began = time.perf_counter()
        notices = await bench.notices()
        print(
            f"started on {BACKLOG} notices in {time.perf_counter() - began:.1f} s; load {os.getloadavg()[0]:.1f}"
        )
        assert all(map(notices.names, task_ids))
        assert not notices.names(new_task_id())

    run(scenario, settings)


def test_aborts_are_heard_from_the_start_on(settings: Settings) -> None:
    async def scenario(bench: Bench) -> None:
        log = bench.log()
        before, plain, *aborted = (new_task_id() for _ in range(12))
        await bench.append(log, before, abort=True)
        notices = await bench.notices()
        # What runs here was begun after that.
        assert bench.heard == []
        assert notices.aborts(before)
        await bench.append(log, plain)
        for task_id in aborted:
            await bench.append(log, task_id, abort=True)
        # A later notice without it takes nothing back.
        await bench.append(log, aborted[0])
        await spread()
        await notices.catch_up()
        # They are told of in the next turns of the loop.
        await asyncio.sleep(0.1)
        assert bench.heard == aborted
        assert all(map(notices.aborts, aborted))
        assert not notices.aborts(plain)

    run(scenario, settings)


def test_without_its_topic_it_does_not_start(bare: Settings) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.raises(WrongTopology, match="taskline topics create"):
            await bench.notices()

    run(scenario, bare)


def test_a_topic_that_was_made_anew_names_what_it_names_and_all_that_was_before(settings: Settings) -> None:
    async def scenario(bench: Bench) -> None:
        notices, log = await bench.notices(), bench.log()
        old = [new_task_id() for _ in range(50)]
        await asyncio.gather(*(bench.append(log, task_id) for task_id in old))
        unnamed = new_task_id()
        await spread()
        await notices.catch_up()
        assert all(map(notices.names, old))
        assert not notices.names(unnamed)

        looking = asyncio.ensure_future(others(notices))
        for generation in range(ANEW):
            await asyncio.to_thread(make_anew, settings, bench.topics.cancels(QUEUE))
            began = time.perf_counter()
            fresh = bench.log(f"producer-{generation}")
            for number in range(5):
                task_id = new_task_id()
                await bench.append(fresh, task_id)
                await spread()
                async with asyncio.timeout(NEW_TOPIC_SECONDS):
                    await notices.catch_up()
                assert notices.names(task_id), f"notice {number} of new topic {generation} is not known"
                print(f"{time.perf_counter() - began:.1f}", end=" ")
            # More than the next one will have at first.
            await asyncio.gather(*(bench.append(fresh, new_task_id()) for _ in range(50)))
            print("s after the topic was back")
        assert not looking.done()
        looking.cancel()
        # Whether they had a notice nobody can tell any more.
        assert all(map(notices.names, (*old, unnamed)))
        assert not notices.names(new_task_id())

    run(scenario, settings)


def make_anew(settings: Settings, topic: str) -> None:
    with admin_client(settings.kafka) as admin:
        admin.delete_topics([topic])[topic].result(30)
    deadline = time.monotonic() + 30
    while True:
        # A topic that is still being deleted can't be made.
        with suppress(KafkaException):
            create_topics(settings)
            return
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_while_kafka_stands_still_it_waits_and_nothing_is_lost(stack: LocalStack, settings: Settings) -> None:
    async def scenario(bench: Bench) -> None:
        notices, log = await bench.notices(), bench.log()
        await bench.append(log, new_task_id())
        await spread()
        await notices.catch_up()
        stack.pause("kafka")
        try:
            paused = time.monotonic()
            task_ids = [new_task_id() for _ in range(100)]
            appended = [asyncio.ensure_future(bench.append(log, task_id)) for task_id in task_ids]
            # What was known when it stopped may be relied on for so long, and no longer.
            await asyncio.sleep(2 * NOTICE_FRESH_SECONDS)
            waiting = [asyncio.ensure_future(notices.catch_up()) for _ in range(20)]
            done, _ = await asyncio.wait(waiting, timeout=PAUSED_SECONDS)
            assert not done
        finally:
            stack.resume("kafka")
        async with asyncio.timeout(30):
            await asyncio.gather(*waiting)
            print(f"waited {time.monotonic() - paused:.1f} s, {PAUSED_SECONDS:g} of them paused")
            await asyncio.gather(*appended)
            await spread()
            await notices.catch_up()
        assert all(map(notices.names, task_ids))
        began = time.perf_counter()
        await spread()
        await notices.catch_up()
        assert time.perf_counter() - began < PAUSED_SECONDS

    run(scenario, settings)


def test_it_closes_in_bounded_time_while_kafka_stands_still(stack: LocalStack, settings: Settings) -> None:
    async def scenario(bench: Bench) -> None:
        notices = bench.unstarted()
        await notices.start(bench.heard.append)
        stack.pause("kafka")
        try:
            await asyncio.sleep(2 * NOTICE_FRESH_SECONDS)
            waiting = asyncio.ensure_future(notices.catch_up())
            await asyncio.sleep(0.5)
            began = time.perf_counter()
            await notices.close()
            took = time.perf_counter() - began
        finally:
            stack.resume("kafka")
        waiting.cancel()
        print(f"closed in {took:.1f} s")
        assert took < CLOSE_SECONDS

    run(scenario, settings)


def test_an_answer_counts_all_that_was_acknowledged_before_its_moment(settings: Settings) -> None:
    async def scenario(bench: Bench) -> None:
        answers: list[tuple[Bounds, float]] = []
        acknowledged: list[tuple[float, int]] = []
        arrived = asyncio.Event()
        topic = bench.topics.cancels(QUEUE)

        def answered(bounds: Bounds, as_of: float) -> None:
            answers.append((bounds, as_of))
            arrived.set()

        lookup = EndLookup(
            settings.kafka,
            topic,
            client_id="end",
            known=lambda: 0,
            answered=answered,
        )
        lookup.start()

        async def producer(log: KafkaLog) -> None:
            for _ in range(EACH):
                position = await bench.append(log, new_task_id())
                acknowledged.append((elapsed_seconds(), position.offset))
                await asyncio.sleep(0.002)

        producing = asyncio.gather(*(producer(bench.log(f"producer-{n}")) for n in range(PRODUCERS)))
        try:
            while not producing.done():
                asked = elapsed_seconds()
                arrived.clear()
                # The second is part of the first, since that is under way.
                lookup.ask()
                lookup.ask()
                await arrived.wait()
                assert answers[-1][1] >= asked
            await producing
        finally:
            await asyncio.to_thread(lookup.close)
        for bounds, as_of in answers:
            known = [offset for at, offset in acknowledged if at < as_of]
            assert bounds.end > max(known, default=-1)
        assert answers[-1][0].end > 0
        print(f"{len(answers)} answers about {len(acknowledged)} notices")

    run(scenario, settings)
