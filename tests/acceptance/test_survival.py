"""5,000 tasks while a worker and the projector are killed (-9) and Kafka is restarted: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from acceptance_tasks import registry

from taskline import Settings, Submission, TaskFailure, TaskHandle, TaskProducer
from taskline.errors import TaskNotFound
from taskline.infra.kafka.admin import create_topics
from taskline.infra.local.roles import Role
from taskline.infra.local.stack import LocalStack
from taskline.infra.role import SystemClock
from taskline.schemas.confluent import codec_for
from taskline.schemas.ids import TaskId
from taskline.state.cassandra import CassandraStore
from taskline.state.migrations import migrate
from taskline.state.reader import StatusReader
from taskline.state.status import TaskStatus

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]

TASKS = 5_000
SUPPORT = Path(__file__).parents[1] / "support"
END_SECONDS = 240.0


@pytest.fixture(scope="module")
def settings(stack: LocalStack) -> Settings:
    settings = Settings.model_validate(
        {
            # A killed member is noticed after the session time-out: short, so that the test is.
            "kafka": {"bootstrap_servers": stack.bootstrap_servers, "session_timeout_ms": 6_000},
            "cassandra": {"contact_points": stack.contact_points, "port": stack.cassandra_port},
            "producer": {"delivery_timeout_seconds": 120, "max_block_seconds": 120},
        }
    )
    create_topics(settings)
    migrate(settings)
    return settings


def test_nothing_acknowledged_is_lost(stack: LocalStack, settings: Settings, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    ledger.touch()
    environ = {"TEST_LEDGER": str(ledger)}
    workers = [
        Role(
            ("worker", "acceptance_tasks:registry"),
            settings,
            log=tmp_path / f"worker-{n}.log",
            cwd=SUPPORT,
            environ=environ,
        )
        for n in range(2)
    ]
    projector = Role(("projector",), settings, log=tmp_path / "projector.log", cwd=SUPPORT)

    def effects() -> int:
        return ledger.read_bytes().count(b"\n")

    def at(count: int) -> None:
        for role in (*workers, projector):
            role.wait_until(lambda: effects() >= count, seconds=END_SECONDS, what=f"past {count} effects")

    acknowledged: list[TaskId] = []
    unknown: list[TaskFailure] = []

    def submit() -> None:
        with TaskProducer(settings, registry.catalogue()) as producer:
            items = (Submission(task_type="test.count", payload={"n": n, "ms": n % 20}) for n in range(TASKS))
            for outcome in producer.submit_many(paced(items)):
                if isinstance(outcome, TaskHandle):
                    acknowledged.append(outcome.task_id)
                else:
                    unknown.append(outcome)

    with ExitStack() as running:
        for role in (*workers, projector):
            running.enter_context(role)
        submitter = threading.Thread(target=submit)
        submitter.start()
        at(TASKS // 5)
        workers[0].kill()
        workers[0].start()
        at(TASKS * 2 // 5)
        projector.kill()
        projector.start()
        at(TASKS * 3 // 5)
        stack.kill("kafka")
        stack.start("kafka")
        submitter.join(END_SECONDS)
        assert not submitter.is_alive()
        statuses = asyncio.run(statuses_when_all_ended(settings, acknowledged))
        exits = [role.stop() for role in (*workers, projector)]

    ran = Counter(line.split()[0] for line in ledger.read_text().splitlines())
    repeated = sum(ran.values()) - len(ran)
    print(f"{len(acknowledged)} acknowledged, {len(unknown)} unknown, {repeated} runs repeated")
    assert statuses == dict.fromkeys(acknowledged, TaskStatus.COMPLETED)
    assert {str(task_id) for task_id in acknowledged} <= set(ran)
    # What a crash can repeat lies between the committed offset and the newest taken record of each partition.
    assert repeated <= settings.worker.window * settings.topics.dispatch_partitions
    assert len(acknowledged) + len(unknown) == TASKS
    assert exits == [0, 0, 0]


def paced(items: Iterator[Submission]) -> Iterator[Submission]:
    """Some hundred a second, so that every fault falls into the middle of the submissions too."""
    for number, item in enumerate(items):
        if number % 50 == 0:
            time.sleep(0.1)
        yield item


async def statuses_when_all_ended(settings: Settings, ids: list[TaskId]) -> dict[TaskId, TaskStatus | None]:
    """Read from the view until every task has ended or time is up."""
    store = await CassandraStore.connect(settings)
    # Without waiting for each single one: all are looked at again anyway.
    impatient = settings.api.model_copy(update={"read_your_writes_seconds": 0.0})
    reader = StatusReader(store, codec_for(settings.schemas), impatient, SystemClock())
    found: dict[TaskId, TaskStatus | None] = {}
    deadline = time.monotonic() + END_SECONDS
    try:
        while time.monotonic() < deadline:
            for task_id in ids:
                if found.get(task_id) is not TaskStatus.COMPLETED:
                    found[task_id] = await status_or_none(reader, task_id)
            if all(status is TaskStatus.COMPLETED for status in found.values()):
                break
            await asyncio.sleep(0.5)
    finally:
        await store.close()
    return found


async def status_or_none(reader: StatusReader, task_id: TaskId) -> TaskStatus | None:
    """None: the projector, which this test kills, has not got there yet."""
    try:
        return (await reader.get(task_id, tenant="default")).status
    except TaskNotFound:
        return None
