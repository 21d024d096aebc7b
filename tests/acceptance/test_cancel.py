"""Every answer to a cancel is true: raced against pickups, retries and due times while processes die and lag, and without the view.

200 tasks are raced at least; as many as TASKLINE_TEST_TASKS says, if it is set.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cancel_system import (
    ENDED,
    Asked,
    Client,
    Fired,
    System,
    cancel,
    read_ends,
    running_system,
    submit,
    until_status,
)

from taskline import Settings
from taskline.infra.cancels import NOTICE_SPREAD_SECONDS
from taskline.infra.kafka.admin import create_topics
from taskline.infra.local.roles import Role
from taskline.infra.local.stack import LocalStack
from taskline.state.migrations import migrate

TASKS = int(os.environ.get("TASKLINE_TEST_TASKS", "200"))
PER_SECOND = 25
SEED = 7
ABORTED = 5
# Every so many tasks are not cancelled at all: they must run.
SPARED = 10
# One session of a dead worker, retries, and a slow machine; what 5,000 tasks leave behind takes longer.
END_SECONDS = 60.0 + TASKS / PER_SECOND
REQUEST_SECONDS = 4.0
# A request reads the view, waits for two acknowledgements, and for the view again; the rest is a slow machine.
ANSWER_SECONDS = 3 * REQUEST_SECONDS + 8.0
# A request this near to a start is counted as one that was raced.
CLOSE_SECONDS = 0.05
# A death, and a lag for longer than a request waits; on a slow machine they take longer than the tasks.
LEAST_FAULTS = 2
# Between a death or a lag and the next; less than this, and a slow machine's workers would do nothing but start.
BREATH_SECONDS = 5.0
LAGS = 1.5
# Longer than a request waits for the view, so that cancels stay open.
LAGS_LONG = REQUEST_SECONDS + 1.5
# Well beyond taskline.workers.cancels.FRESH_SECONDS, within a session; and beyond a session.
FROZEN = 3.0
FROZEN_LONG = 8.0
SESSION_SECONDS = 6.0
# Within a session: what a dead worker had can't be started in time.
EXPIRES_SECONDS = 2.0
# Longer than Cassandra's client, and a request, wait.
AWAY_SECONDS = 10.0

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300 + TASKS // 5)]


@pytest.fixture(scope="module")
def settings(stack: LocalStack, keyspace: str) -> Settings:
    settings = Settings.model_validate(
        {
            "kafka": {
                "bootstrap_servers": stack.bootstrap_servers,
                "session_timeout_ms": round(SESSION_SECONDS * 1_000),
            },
            "topics": {"dispatch_partitions": 3, "lanes": 3, "dlq_partitions": 1, "delay_partitions": 1},
            "delay": {"tiers": ("200ms", "1s", "5s")},
            "cassandra": {
                "contact_points": stack.contact_points,
                "port": stack.cassandra_port,
                "keyspace": keyspace,
                "request_timeout_seconds": 2.0,
            },
            # A lane that lags for seconds is no reason to call a task unknown.
            "api": {
                "auth": "off",
                "request_timeout_seconds": REQUEST_SECONDS,
                "read_your_writes_seconds": 2 * REQUEST_SECONDS,
            },
            # Few slots, so that tasks also wait for one.
            "worker": {"concurrency": 4, "coroutines": "inline"},
        }
    )
    create_topics(settings)
    migrate(settings)
    return settings


@pytest.fixture(scope="module")
def system(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(settings, tmp_path_factory.mktemp("system")) as running:
        yield running


def test_every_answer_to_a_raced_cancel_is_true(system: System) -> None:
    fired, aborted, faults = asyncio.run(race(system))
    starts = system.starts()
    report(system, fired, starts, faults)
    for task in fired:
        check(task, starts.get(task.task_id, []))
    answers = Counter(asked.status for task in fired for asked in task.asked)
    # It was a race, and nobody won it all.
    assert min(answers[200], answers[409]) > TASKS // 20
    assert answers[202] > 0, "no lane lagged for longer than a request waits"
    finished = system.finished()
    for task in aborted:
        check(task, starts.get(task.task_id, []))
        assert task.status == "cancelled"
        assert task.task_id not in finished


def check(task: Fired, starts_ns: list[int]) -> None:
    """Every answer is true of what happened."""
    assert task.status in ENDED, f"hangs: {task}"
    for asked in task.asked:
        assert asked.answered_ns - asked.sent_ns < ANSWER_SECONDS * 1e9, f"not answered in time: {task}"
        assert asked.status in (200, 202, 404, 409, 503), task
    granted = [asked for asked in task.asked if asked.status == 200]
    for asked in granted:
        assert task.status == "cancelled", task
        late = [at for at in starts_ns if at > asked.answered_ns]
        assert not late, f"started {(late[0] - asked.answered_ns) / 1e6} ms after 200: {task}"
        # Once cancelled, for ever so.
        after = [other for other in task.asked if other.sent_ns > asked.answered_ns]
        assert all(other.status == 200 for other in after), task
    if task.status == "cancelled":
        # Nobody else's doing. (What stays open, 202 and 503, may come about.)
        assert any(asked.status in (200, 202) or asked.problem == "cancel-unknown" for asked in task.asked), (
            task
        )
        late = [at for at in starts_ns if at > task.end_read_ns]
        assert not late, f"started after it read cancelled: {task}"
    elif task.status == "completed":
        assert starts_ns, f"completed, and never ran: {task}"
    refused = [asked for asked in task.asked if asked.status == 409]
    if refused and not starts_ns and task.status == "cancelled":
        # It had been started, and was handed back before the handler's first line: the refusal was true, and a later cancel could have it.
        assert task.asked[-1] not in refused, f"refused, and neither ran nor over: {task}"
    elif refused and task.status != "expired":
        # (One that expired may have been refused for that alone.)
        assert starts_ns, f"refused, and did not run: {task}"
    if task.status == "expired":
        assert task.kind == "expiring", task
    elif not task.asked:
        assert task.status == {"never": "dead"}.get(task.kind, "completed"), f"not cancelled: {task}"


async def race(system: System) -> tuple[list[Fired], list[Fired], Counter[str]]:
    rng = random.Random(SEED)
    faults: Counter[str] = Counter()
    async with system.client() as client:
        fates: list[asyncio.Task[Fired]] = []
        aborting = asyncio.ensure_future(abort_some(client))
        disturbing = asyncio.ensure_future(disturb(system, fates, faults))
        while len(fates) < TASKS or faults.total() < LEAST_FAULTS:
            if disturbing.done():
                # It failed: nobody else would say so, and this would go on for ever.
                disturbing.result()
            fates.append(asyncio.ensure_future(fire(client, rng, spared=len(fates) % SPARED == 0)))
            await asyncio.sleep(rng.expovariate(PER_SECOND))
        fired = list(await asyncio.gather(*fates))
        aborted = await aborting
        await disturbing
        await read_ends(client, [*fired, *aborted], END_SECONDS)
        # Asked once more, the answer is what became of it.
        for task in fired:
            if task.status in ENDED and any(asked.status in (202, 503) for asked in task.asked):
                again = await cancel(client, task)
                assert again.status == (200 if task.status == "cancelled" else 409), task
    # Whatever would still start does so within the time that a record may wait.
    await asyncio.sleep(2)
    return fired, aborted, faults


@dataclass(frozen=True)
class Plan:
    """One task, drawn before anything is waited for."""

    kind: str
    ms: int
    delay: float | None
    # Seconds before each DELETE, and whether it is one that also stops what runs.
    cancels: tuple[tuple[float, bool], ...]

    @classmethod
    def drawn(cls, rng: random.Random) -> Plan:
        kind = rng.choice(KINDS)
        delay = rng.uniform(0.2, 2.0) if kind == "delayed" else None
        # Around the pickup; the retry, which waits 0.2 to 0.6 s; or the time at which it is due. What is asked for is in the lane by so much later.
        moment = delay or (rng.choice((0.0, 0.4)) if kind == "twice" else 0.0)
        pauses = [max(0.0, rng.gauss(moment - NOTICE_SPREAD_SECONDS, 0.04))]
        if rng.random() < 0.3:
            pauses.append(rng.uniform(0, 0.3))
        cancels = tuple((pause, rng.random() < 0.25) for pause in pauses)
        return cls(kind=kind, ms=rng.choice((0, 20, 150)), delay=delay, cancels=cancels)


# How often each is drawn.
KINDS = ("once", "once", "child", "twice", "twice", "never", "delayed", "delayed", "expiring")
TYPES = {"twice": "cancel.twice", "never": "cancel.never", "child": "cancel.child"}


async def fire(client: Client, rng: random.Random, *, spared: bool) -> Fired:
    """Submit a task, and cancel it once or twice around a moment at which it may start."""
    plan = Plan.drawn(rng)
    options: dict[str, Any] = {} if plan.delay is None else {"delay_seconds": plan.delay}
    if plan.kind == "expiring":
        # Started at once it runs; after its worker's death, or behind a full worker, it comes too late.
        options["start_by"] = (datetime.now(UTC) + timedelta(seconds=EXPIRES_SECONDS)).isoformat()
    task = await submit(client, TYPES.get(plan.kind, "cancel.once"), kind=plan.kind, ms=plan.ms, **options)
    for pause, abort in () if spared else plan.cancels:
        await asyncio.sleep(pause)
        await cancel(client, task, abort=abort)
    return task


async def abort_some(client: Client) -> list[Fired]:
    """Tasks that would run for minutes, stopped once they run."""
    aborted = []
    for _ in range(ABORTED):
        task = await submit(client, "cancel.long")
        await until_status(client, task, "running", END_SECONDS)
        await cancel(client, task, abort=True)
        aborted.append(task)
    return aborted


async def disturb(system: System, fates: list[asyncio.Task[Fired]], faults: Counter[str]) -> None:
    """Workers die and freeze, lanes lag, one after the other, until all tasks are submitted."""
    first, second = system.workers
    steps = (
        ("kill", lambda: system.kill(first)),
        ("long lag", lambda: frozen(system.projector, LAGS_LONG)),
        ("freeze", lambda: frozen(second, FROZEN)),
        ("lag", lambda: frozen(system.projector, LAGS)),
        ("kill", lambda: system.kill(second)),
        ("long freeze", lambda: frozen(first, FROZEN_LONG)),
    )
    while len(fates) < TASKS or faults.total() < LEAST_FAULTS:
        name, step = steps[faults.total() % len(steps)]
        await step()
        faults[name] += 1
        await asyncio.sleep(BREATH_SECONDS)


async def frozen(role: Role, seconds: float) -> None:
    role.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        role.signal(signal.SIGCONT)


def report(system: System, fired: list[Fired], starts: dict[str, list[int]], faults: Counter[str]) -> None:
    asked = [each for task in fired for each in task.asked]
    answers = Counter(f"{each.status}{f' {each.problem}' * bool(each.problem)}" for each in asked)
    by_kind = Counter((task.kind, each.status) for task in fired for each in task.asked)
    took = sorted((each.answered_ns - each.sent_ns) / 1e6 for each in asked)
    close = sum(
        abs(each.sent_ns + NOTICE_SPREAD_SECONDS * 1e9 - at) < CLOSE_SECONDS * 1e9
        for task in fired
        for each in task.asked
        for at in starts.get(task.task_id, [])
    )
    handed_back = sum(
        task.status == "cancelled" and task.task_id not in starts and any(a.status == 409 for a in task.asked)
        for task in fired
    )
    print(
        f"{len(fired)} tasks, {sum(map(len, starts.values()))} starts, {system.kills} kills, {dict(faults)}",
        f"\nanswers: {dict(sorted(answers.items()))}; {sum(each.abort for each in asked)} with abort",
        f"\n{dict(sorted(by_kind.items()))}",
        f"\nended: {dict(Counter(task.status for task in fired))}; {handed_back} refused, handed back, then cancelled",
        f"\n{close} requests within {CLOSE_SECONDS:g} s of a start; took ms: p50 {took[len(took) // 2]:.0f},"
        f" p99 {took[int(len(took) * 0.99)]:.0f}, max {took[-1]:.0f}; load {os.getloadavg()[0]:.1f}",
    )


def test_without_its_view_the_answers_are_honest_and_named_tasks_wait_off_their_slots(
    system: System, stack: LocalStack
) -> None:
    asyncio.run(without_cassandra(system, stack))


async def cancel_all(client: Client, tasks: list[Fired]) -> list[Asked]:
    return await asyncio.gather(*(cancel(client, task) for task in tasks))


# More than all slots of both workers.
NAMED = 10
OTHERS = 40


async def without_cassandra(system: System, stack: LocalStack) -> None:
    async with system.client() as client:
        waiting = [await submit(client, "cancel.once", delay_seconds=3_600) for _ in range(8)]
        racing = [await submit(client, "cancel.once", delay_seconds=3_600) for _ in range(20)]
        # Cancelled before, due meanwhile: named, and nobody can say whether they may run.
        cancelled = [await submit(client, "cancel.once", delay_seconds=8) for _ in range(NAMED)]
        assert {each.status for each in await cancel_all(client, cancelled)} == {200}
        # Refused before, since they ran; their second attempts fall into it, and are named, too.
        retried = [await submit(client, "cancel.later", ms=8_000) for _ in range(4)]
        await asyncio.gather(*(until_status(client, task, "running") for task in retried))
        assert {each.status for each in await cancel_all(client, retried)} == {409}

        requests = [asyncio.ensure_future(cancel(client, task)) for task in racing]
        await asyncio.sleep(0.15)
        stack.pause("cassandra")
        paused = time.monotonic()
        try:
            refusals = await cancel_all(client, waiting)
            others = [await submit(client, "cancel.once") for _ in range(OTHERS)]
            while not {task.task_id for task in others} <= system.starts().keys():
                assert time.monotonic() - paused < AWAY_SECONDS, "the others wait behind those that are named"
                await asyncio.sleep(0.1)
            others_took = time.monotonic() - paused
            await asyncio.sleep(AWAY_SECONDS - others_took)
            starts = system.starts()
        finally:
            stack.resume("cassandra")
        raced = await asyncio.gather(*requests)
        print(
            f"answers: {Counter(a.problem or a.status for a in refusals)} while it was away,"
            f" {Counter(a.problem or a.status for a in raced)} around its going;"
            f" the others had begun after {others_took:.1f} s"
        )
        # Nothing was asked for.
        assert {asked.problem for asked in refusals} == {"view-unavailable"}
        assert {asked.status for asked in raced} <= {200, 202, 503}
        for asked in (*refusals, *raced):
            assert asked.answered_ns - asked.sent_ns < ANSWER_SECONDS * 1e9
        assert [len(starts[task.task_id]) for task in retried] == [1] * len(retried), "a second attempt ran"
        assert not {task.task_id for task in cancelled} & starts.keys()

        await read_ends(client, [*retried, *others, *cancelled], END_SECONDS)
        assert {task.status for task in (*retried, *others)} == {"completed"}
        assert {task.status for task in cancelled} == {"cancelled"}
        for task in waiting:
            # As if nobody had asked.
            assert (await client.get(f"/tasks/{task.task_id}"))["status"] == "scheduled"
        for task in racing:
            if task.asked[0].status in (200, 202):
                # It is in the log; the projector may have to catch up.
                await until_status(client, task, "cancelled")
        assert {each.status for each in await cancel_all(client, [*waiting, *racing, *cancelled])} == {200}
        assert {each.status for each in await cancel_all(client, retried)} == {409}
        starts = system.starts()
        assert not {task.task_id for task in (*waiting, *racing, *cancelled)} & starts.keys()
        assert [len(starts[task.task_id]) for task in retried] == [2] * len(retried)
