"""What the API process can take: processor time of a submission and of a status read, requests a second and core, and latencies at half load.

    TASKLINE_KAFKA__BOOTSTRAP_SERVERS=… TASKLINE_CASSANDRA__PORT=… python -m bench.api_load

The client's own time, Kafka's and Cassandra's do not count: processor time is user + system of the `taskline api` process, with API
keys on. First some connections ask as fast as they are answered. Then requests come at half of the best rate so found, at their
appointed times, from which latencies count; the liveness row at each rate shows what of them is the client, the server and the framework.

Reads are of one task over and over ("hot") or of another one each time ("uniform"). A task that runs is read from the view each time; one
that has ended is kept in memory after its first read, so "uniform, ended" asks for each once only.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

import click
import orjson
import psutil

from bench.api_stage import AIRPORT, PAYLOAD, api_process, fill, new_key, stage
from bench.http_load import Closed, Target, client_process, closed, get, paced, post, quantile
from taskline.schemas.ids import new_task_id
from taskline.settings import Settings

ROUNDS = 5
LIVENESS = "liveness (server and framework only)"
# µs of the API process's time: what is aimed at.
SUBMISSION_AIM, READ_AIM = 700, 500
# Older than `api.young_task_seconds`: an unknown id that is younger is waited for.
UNKNOWN_AGE_MS = 3_600_000
HALF = 0.5


@dataclass(frozen=True, kw_only=True)
class Question:
    title: str
    requests: Iterator[bytes]
    status: int


@dataclass(frozen=True, kw_only=True)
class AtFull:
    title: str
    # Processor time of the API process per request; the best round, since what disturbs on a shared machine only ever adds.
    cpu_us: float
    cpu_us_rounds: tuple[float, ...]
    per_second: float
    per_second_and_core: float
    client_cpu_us: float


@dataclass(frozen=True, kw_only=True)
class AtHalf:
    title: str
    per_second: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    # Of the same pace on liveness: client, server and framework.
    floor_p50_ms: float
    floor_p99_ms: float
    client_lag_p99_ms: float
    client_cpu_us: float


@click.command()
@click.option(
    "--requests", default=4_000, show_default=True, help="Requests of each kind at full load, in all rounds."
)
@click.option("--seconds", default=6.0, show_default=True, help="Of half load, for each kind.")
@click.option("--tasks", default=12_000, show_default=True, help="Different tasks that are read.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
def main(requests: int, seconds: float, tasks: int, as_json: bool) -> None:
    """Measure."""
    with stage() as settings, client_process() as client:
        full, half = measure(settings, client, requests, seconds, tasks)
    load = [round(each, 1) for each in os.getloadavg()]
    if as_json:
        figures = {
            "cores": os.cpu_count(),
            "load_average": load,
            "full": [asdict(each) for each in full],
            "half": [asdict(each) for each in half],
        }
        print(json.dumps(figures))
    else:
        show(full, half)
        print(f"load average {', '.join(map(str, load))} on {os.cpu_count()} cores")


def measure(
    settings: Settings, client: ProcessPoolExecutor, requests: int, seconds: float, tasks: int
) -> tuple[list[AtFull], list[AtHalf]]:
    token = asyncio.run(new_key(settings))
    asked = questions(settings, token, tasks)
    full, half = [], []
    with api_process(settings) as (host, port, process):
        for question in asked:
            target = Target(host=host, port=port, status=question.status)
            note(f"full load: {question.title}")
            full.append(at_full(client, process, target, question, requests // ROUNDS))
        floor = Target(host=host, port=port, status=200)
        for question, most in zip(asked[1:], full[1:], strict=True):
            rate = most.per_second * HALF
            note(f"half load: {question.title}, {rate:.0f}/s")
            target = Target(host=host, port=port, status=question.status)
            sent = list(itertools.islice(question.requests, max(1, round(rate * seconds))))
            found = client.submit(paced, target, sent, rate).result()
            idle = client.submit(paced, floor, [get("/healthz")] * (len(sent) // 2 + 1), rate).result()
            half.append(
                AtHalf(
                    title=question.title,
                    per_second=rate,
                    p50_ms=quantile(found.latencies_ms, 0.5),
                    p99_ms=quantile(found.latencies_ms, 0.99),
                    max_ms=found.latencies_ms[-1],
                    floor_p50_ms=quantile(idle.latencies_ms, 0.5),
                    floor_p99_ms=quantile(idle.latencies_ms, 0.99),
                    client_lag_p99_ms=quantile(found.lags_ms, 0.99),
                    client_cpu_us=found.client_cpu_us,
                )
            )
    return full, half


def questions(settings: Settings, token: str, tasks: int) -> list[Question]:
    running = asyncio.run(fill(settings, tasks, ended=False))
    ended = asyncio.run(fill(settings, tasks, ended=True))

    def reads(ids: Sequence[object]) -> Iterator[bytes]:
        return (get(f"/tasks/{task_id}", token) for task_id in itertools.cycle(ids))

    unknown = (
        get(f"/tasks/{new_task_id(time.time_ns() // 1_000_000 - UNKNOWN_AGE_MS)}", token)
        for _ in itertools.count()
    )
    submission = post("/tasks", orjson.dumps({"task_type": AIRPORT.name, "payload": PAYLOAD}), token)
    return [
        Question(title=LIVENESS, requests=itertools.repeat(get("/healthz")), status=200),
        Question(title="submission", requests=itertools.repeat(submission), status=201),
        Question(title="status read, hot key, running", requests=reads(running[:1]), status=200),
        Question(title="status read, hot key, ended", requests=reads(ended[:1]), status=200),
        Question(title="status read, uniform, running", requests=reads(running), status=200),
        Question(title="status read, uniform, ended", requests=reads(ended[1:]), status=200),
        Question(title="status read, unknown id", requests=unknown, status=404),
    ]


def at_full(
    client: ProcessPoolExecutor, process: psutil.Process, target: Target, question: Question, requests: int
) -> AtFull:
    def one_round() -> tuple[float, Closed]:
        sent = list(itertools.islice(question.requests, requests))
        before = process.cpu_times()
        found = client.submit(closed, target, sent).result()
        after = process.cpu_times()
        spent = (after.user - before.user) + (after.system - before.system)
        return spent / requests * 1e6, found

    client.submit(closed, target, list(itertools.islice(question.requests, requests // 2))).result()
    rounds = [one_round() for _ in range(ROUNDS)]
    cpu_us = min(cpu for cpu, _ in rounds)
    return AtFull(
        title=question.title,
        cpu_us=cpu_us,
        cpu_us_rounds=tuple(cpu for cpu, _ in rounds),
        per_second=max(found.per_second for _, found in rounds),
        per_second_and_core=1e6 / cpu_us,
        client_cpu_us=min(found.client_cpu_us for _, found in rounds),
    )


def show(full: Sequence[AtFull], half: Sequence[AtHalf]) -> None:
    print(
        f"{'full load':38} {'CPU µs':>7} {'a core and s':>13} {'measured/s':>11} {'client µs':>10}   rounds"
    )
    for each in full:
        rounds = ", ".join(f"{cpu:.0f}" for cpu in each.cpu_us_rounds)
        print(
            f"{each.title:38} {each.cpu_us:7.0f} {each.per_second_and_core:13.0f} {each.per_second:11.0f} {each.client_cpu_us:10.0f}   {rounds}"
        )
    print(f"\naims: submission {SUBMISSION_AIM} µs, status read {READ_AIM} µs\n")
    print(
        f"{'half load':38} {'per s':>7} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}   liveness p50, p99; client late p99 ms; client µs"
    )
    for half_ in half:
        print(
            f"{half_.title:38} {half_.per_second:7.0f} {half_.p50_ms:8.1f} {half_.p99_ms:8.1f} {half_.max_ms:8.1f}   "
            f"{half_.floor_p50_ms:.1f}, {half_.floor_p99_ms:.1f}; {half_.client_lag_p99_ms:.1f}; {half_.client_cpu_us:.0f}"
        )


def note(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
