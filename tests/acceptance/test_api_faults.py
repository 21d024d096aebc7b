"""The API killed (-9), Kafka frozen, Cassandra frozen and stopped, under a steady stream of submissions and status reads.

Of every outage: a 2xx is an acknowledged task, and is in the log; what is said to be certainly not accepted is not in it; every answer comes in
time, and what can't be done now is a 503 that says when to come again; what does not need the absent server goes on; and the service is back by
itself. TASKLINE_TEST_OUTAGE_SECONDS sets the length of the long outages, 60 for the full test. A long outage is one that is longer than the
API's time-out, which therefore is shorter where the outages are.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx
import pytest
from api_process import eventually
from api_traffic import Attempt, Fate, Kind, Ledger, Traffic, first_after
from worker_kit import read_all

from taskline.infra.kafka.admin import create_topics
from taskline.infra.kafka.types import TypeDirectory
from taskline.infra.local.roles import Role
from taskline.infra.local.stack import LocalStack
from taskline.infra.topics import Topics
from taskline.schemas.codec import Codec
from taskline.schemas.events import Priority, TaskSubmitted
from taskline.schemas.types import TaskType
from taskline.settings import Settings
from taskline.state.keys import Scope, mint
from taskline.state.keys_cassandra import open_keys
from taskline.state.migrations import migrate

OUTAGE_SECONDS = float(os.environ.get("TASKLINE_TEST_OUTAGE_SECONDS", "14"))
SHORT_OUTAGE_SECONDS = 5.0
pytestmark = [pytest.mark.servers, pytest.mark.timeout(240 + 4 * OUTAGE_SECONDS)]

FULL_SECONDS = 60.0
# The default is 15 s. The long outage is at least twice as long, the short one shorter.
REQUEST_SECONDS = min(15.0, OUTAGE_SECONDS / 2)
# A stopped Cassandra needs long to start again, and a frozen one is the worse case.
WAYS = ("frozen", "stopped") if OUTAGE_SECONDS >= FULL_SECONDS else ("frozen",)
# For a busy machine: what an answer may take beyond its time-out, and how soon after a fault began its effects are complete.
MARGIN_SECONDS = 4.0
SETTLING_SECONDS = 1.0
# From the heal until everything is answered well again.
HEAL_SECONDS = 30.0
# A process that starts, with its imports, on a busy machine.
START_SECONDS = 60.0
KILLS = 2 if OUTAGE_SECONDS < FULL_SECONDS else 5
SUBMISSIONS_PER_SECOND, READS_PER_SECOND = 40.0, 20.0
READABLE = 20
ANYTHING = TaskType(name="faults.any")


@dataclass(frozen=True, kw_only=True)
class Service:
    settings: Settings
    url: str
    token: str
    api: Role
    projector: Role
    # Tasks that are in the view.
    readable: tuple[str, ...]

    def traffic(self) -> Traffic:
        return Traffic(
            self.url,
            self.token,
            run=secrets.token_hex(4),
            task_type=ANYTHING.name,
            reading=self.readable,
            submissions_per_second=SUBMISSIONS_PER_SECOND,
            reads_per_second=READS_PER_SECOND,
        )

    def check(self) -> None:
        self.api.check()
        self.projector.check()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers={"authorization": f"Bearer {self.token}"}, timeout=60)

    def healed(self, ledger: Ledger, moment: float) -> dict[str, float]:
        """Wait until all kinds of requests are answered well; seconds from the moment, by kind."""
        return {
            kind.value: round(
                first_after(ledger, kind, status, moment, seconds=HEAL_SECONDS, alive=self.check), 1
            )
            for kind, status in ((Kind.SUBMIT, 201), (Kind.READ, 200), (Kind.READY, 200))
        }


@pytest.fixture(scope="module")
def settings(stack: LocalStack, keyspace: str) -> Settings:
    made = Settings.model_validate(
        {
            "kafka": {"bootstrap_servers": stack.bootstrap_servers, "session_timeout_ms": 6_000},
            "topics": {"dispatch_partitions": 2, "lanes": 2, "dlq_partitions": 1, "delay_partitions": 1},
            "delay": {"tiers": ("1s",)},
            "cassandra": {
                "contact_points": stack.contact_points,
                "port": stack.cassandra_port,
                "keyspace": keyspace,
            },
            # Keys that are read again during the outage.
            "api": {
                "port": 0,
                "request_timeout_seconds": REQUEST_SECONDS,
                "key_cache_seconds": 2.0,
                "shutdown_delay_seconds": 0.0,
            },
            "telemetry": {"log_format": "json"},
        }
    )
    create_topics(made)
    migrate(made)
    with TypeDirectory(made) as types:
        types.register([ANYTHING])
    return made


@pytest.fixture(scope="module")
def service(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    scratch = tmp_path_factory.mktemp("service")
    minted = mint(tenant="faults", scopes=tuple(Scope), now_ms=time.time_ns() // 1_000_000)

    async def add_key() -> None:
        async with open_keys(settings) as keys:
            assert await keys.add(minted.key)

    asyncio.run(add_key())
    port = free_port()
    # The same port after a restart, as a supervisor would have it.
    api = Role(("api", "--port", str(port)), settings, log=scratch / "api.log")
    with Role(("projector",), settings, log=scratch / "projector.log") as projector, api:
        found = Service(
            settings=settings,
            url=f"http://127.0.0.1:{port}",
            token=minted.token,
            api=api,
            projector=projector,
            readable=(),
        )
        api.wait_until(lambda: ready(found), seconds=START_SECONDS, what="ready")
        bodies = [{"task_type": ANYTHING.name, "payload": n} for n in range(READABLE)]
        headers = {"authorization": f"Bearer {found.token}"}
        made = httpx.post(f"{found.url}/tasks/batch", json={"tasks": bodies}, headers=headers, timeout=60)
        ids = tuple(result["task"]["task_id"] for result in made.json()["results"])
        for task_id in ids:
            eventually(lambda each=task_id: found.get(f"/tasks/{each}").status_code == 200, task_id, 60)
        yield replace(found, readable=ids)
        found.check()
        assert (api.stop(), projector.stop()) == (0, 0)


def test_a_killed_api_has_lost_nothing_that_it_acknowledged(service: Service) -> None:
    back = []
    with service.traffic() as traffic:
        for _ in range(KILLS):
            time.sleep(1.5)
            service.api.kill()
            killed = time.monotonic()
            service.api.start()
            first_after(
                traffic.ledger, Kind.READY, 200, killed, seconds=START_SECONDS, alive=service.api.check
            )
            back.append(service.healed(traffic.ledger, killed))
        time.sleep(SETTLING_SECONDS)
    report("API killed", traffic.ledger, back=back)
    check(service, traffic.ledger, broken=True)
    # It did come down in the middle of things.
    assert {each.fate for each in traffic.ledger.of(Kind.SUBMIT)} >= {Fate.ANSWERED, Fate.REFUSED}


def test_a_short_freeze_of_kafka_delays_submissions_and_fails_none(
    service: Service, stack: LocalStack
) -> None:
    ledger, began, ended, back = outage(service, stack, SHORT_OUTAGE_SECONDS)
    report("Kafka frozen", ledger, seconds=ended - began, back=back)
    check(service, ledger)
    assert {each.status for each in ledger.of(Kind.SUBMIT)} == {201}
    assert {each.status for each in ledger.of(Kind.READ)} == {200}
    assert not acknowledged_while_frozen(ledger, began, ended)


def test_a_long_freeze_of_kafka_fails_submissions_in_time_and_honestly(
    service: Service, stack: LocalStack
) -> None:
    ledger, began, ended, back = outage(service, stack, OUTAGE_SECONDS)
    report("Kafka frozen", ledger, seconds=ended - began, back=back)
    check(service, ledger)
    assert not acknowledged_while_frozen(ledger, began, ended)
    submitted = ledger.of(Kind.SUBMIT, after=began + SETTLING_SECONDS, before=ended)
    assert len(submitted) > SUBMISSIONS_PER_SECOND
    assert {each.status for each in submitted} == {503}
    # Reads need no Kafka.
    assert {each.status for each in ledger.of(Kind.READ)} == {200}
    assert ledger.of(Kind.READY, status=503, after=began, before=ended)
    assert {each.status for each in ledger.of(Kind.READY_READ)} == {200}


@pytest.mark.parametrize("how", WAYS)
def test_without_cassandra_tasks_are_taken_and_reads_are_refused(
    service: Service, stack: LocalStack, how: str
) -> None:
    with service.traffic() as traffic:
        time.sleep(2)
        if how == "frozen":
            stack.pause("cassandra")
        else:
            stack.stop("cassandra")
        began = time.monotonic()
        if how == "frozen":
            time.sleep(OUTAGE_SECONDS)
            ended = time.monotonic()
            stack.resume("cassandra")
        else:
            time.sleep(OUTAGE_SECONDS)
            ended = time.monotonic()
            stack.start("cassandra")
        healed = time.monotonic()
        back = service.healed(traffic.ledger, healed)
        time.sleep(SETTLING_SECONDS)
    ledger = traffic.ledger
    report(f"Cassandra {how}", ledger, seconds=healed - began, back=back)
    check(service, ledger)
    assert {each.status for each in ledger.of(Kind.SUBMIT)} == {201}
    read = ledger.of(Kind.READ, after=began + SETTLING_SECONDS, before=ended)
    assert read
    assert {each.status for each in read} == {503}
    assert ledger.of(Kind.READY, status=503, after=began, before=ended)
    assert {each.status for each in ledger.of(Kind.READY_SUBMIT)} == {200}


def outage(
    service: Service, stack: LocalStack, seconds: float
) -> tuple[Ledger, float, float, dict[str, float]]:
    """Freeze Kafka under traffic; the ledger, when it was frozen and thawed, and when all was well again."""
    with service.traffic() as traffic:
        time.sleep(2)
        stack.pause("kafka")
        began = time.monotonic()
        time.sleep(seconds)
        ended = time.monotonic()
        stack.resume("kafka")
        back = service.healed(traffic.ledger, ended)
        time.sleep(SETTLING_SECONDS)
    return traffic.ledger, began, ended, back


def acknowledged_while_frozen(ledger: Ledger, began: float, ended: float) -> list[Attempt]:
    """Tasks accepted while nobody could have acknowledged them."""
    accepted = ledger.of(Kind.SUBMIT, status=201, before=ended)
    return [each for each in accepted if each.ended > began + SETTLING_SECONDS]


def check(service: Service, ledger: Ledger, *, broken: bool = False) -> None:
    """What holds in every outage; `broken`: the API itself was killed."""
    attempts = ledger.attempts
    fates = {each.fate for each in attempts}
    assert fates <= ({Fate.ANSWERED, Fate.REFUSED, Fate.UNKNOWN} if broken else {Fate.ANSWERED})
    answered = [each for each in attempts if each.fate is Fate.ANSWERED]
    assert {each.status for each in answered} <= {200, 201, 503}
    for each in answered:
        assert each.status != 503 or (each.retry_after or "").isdecimal(), each
    assert max(each.seconds for each in attempts) <= REQUEST_SECONDS + MARGIN_SECONDS

    submitted = ledger.of(Kind.SUBMIT)
    logged = log_of(service.settings, submitted)
    repeated = {mark for mark, count in Counter(mark for mark, _ in logged).items() if count > 1}
    assert not repeated
    by_mark = dict(logged)
    for each in submitted:
        if each.status == 201:
            assert by_mark.get(each.mark) == each.task_id, each
        elif each.fate is Fate.REFUSED or each.problem == "not-accepted":
            assert each.mark not in by_mark, each
        elif each.problem == "delivery-unknown":
            assert by_mark.get(each.mark) in (None, each.task_id), each
    unknown = [each for each in submitted if each.fate is Fate.UNKNOWN or each.problem == "delivery-unknown"]
    print(f"  {len(unknown)} unknown, of which {sum(each.mark in by_mark for each in unknown)} in the log")
    # The newest of them is in the view soon: nothing is behind it in its lane.
    last = max((each for each in submitted if each.status == 201), key=lambda each: each.ended)
    eventually(lambda: service.get(f"/tasks/{last.task_id}").status_code == 200, "the view caught up", 30)


def log_of(settings: Settings, submitted: list[Attempt]) -> list[tuple[str, str]]:
    """The marks and ids of what is in the log of these submissions."""
    topic = Topics(namespace=settings.kafka.namespace).dispatch(ANYTHING.queue, Priority.NORMAL)
    marks = {each.mark for each in submitted}
    codec = Codec()
    tasks = [codec.decode(message.value(), TaskSubmitted) for message in read_all(settings, topic)]
    return [(task.affinity_key, str(task.task_id)) for task in tasks if task.affinity_key in marks]


def report(what: str, ledger: Ledger, **more: object) -> None:
    slowest = {
        kind.value: round(max((each.seconds for each in ledger.of(kind)), default=0.0), 2) for kind in Kind
    }
    print(
        f"\n{what}: {more}\n  {ledger.counts()}\n  slowest answer, s: {slowest}; client late by {ledger.client_lag:.2f}"
    )


def ready(service: Service) -> bool:
    try:
        return service.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
