"""`make demo`: start everything, run every airport through it, check the results, say where the time went.

Starts a Kafka, a Cassandra, the API, a projector and two workers on free ports of this machine, and stops them again.
Exits 1 on any difference between the view and the direct computation.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.airports import submit, verify, view
from examples.airports.data import Airport, airports
from examples.airports.tasks import registry
from taskline import Settings, TaskProducer
from taskline.errors import TasklineError
from taskline.infra.kafka.admin import create_topics
from taskline.infra.local.config import StackConfig
from taskline.infra.local.roles import Role
from taskline.infra.local.stack import LocalStack
from taskline.infra.telemetry import configure_logging
from taskline.settings import TelemetrySettings
from taskline.state.migrations import migrate

ROOT = Path(__file__).parents[2]
WORKERS = 2
PROBES = 20
# All tasks take seconds; a slow machine may take minutes.
END_SECONDS = 300.0
START_SECONDS = 120.0

# Lines stay whole where no terminal sets a width.
console = Console(soft_wrap=True, highlight=False)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run left behind."""

    tasks: Mapping[str, UUID]
    statuses: Mapping[str, Mapping[str, Any]]
    # From the first submission to the last status that reads ended, in seconds.
    seconds: float
    submit_seconds: float
    lags: list[float]


def main() -> int:
    """Run the demo.

    Returns:
        The exit status.
    """
    configure_logging(TelemetrySettings(log_level="error"))
    try:
        with ExitStack() as cleanup:
            base_url, settings, processes = start_everything(cleanup)
            for line in submit.refused_rows(base_url):
                console.print(f"malformed row refused: {line}", style="dim")
            before = cpu_seconds(processes)
            run = asyncio.run(run_tasks(base_url, settings))
            spent = {name: after - before[name] for name, after in cpu_seconds(processes).items()}
    except (TasklineError, TimeoutError) as error:
        console.print(f"[red]failed[/red]: {error}")
        return 1
    return report(run, spent)


def start_everything(cleanup: ExitStack) -> tuple[str, Settings, dict[str, list[int]]]:
    """Servers, topics, tables, roles.

    Returns:
        The API's address, the settings that all roles share, and the process ids by name.
    """
    folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="taskline-demo-")))
    console.print("starting Kafka and Cassandra (the first run downloads them) …")
    stack = cleanup.enter_context(LocalStack(StackConfig(ephemeral=True)).running())
    settings = Settings.model_validate(
        {
            "kafka": {"bootstrap_servers": stack.bootstrap_servers},
            "cassandra": {"contact_points": stack.contact_points, "port": stack.cassandra_port},
            "api": {"port": 0, "auth": "off"},
        }
    )
    create_topics(settings)
    migrate(settings)
    announced = folder / "api.txt"
    roles = [
        Role(("api", "--announce", str(announced)), settings, log=folder / "api.log", cwd=ROOT),
        Role(("projector",), settings, log=folder / "projector.log", cwd=ROOT),
        *(
            Role(
                ("worker", "examples.airports.tasks:registry"),
                settings,
                log=folder / f"worker-{n}.log",
                cwd=ROOT,
            )
            for n in range(WORKERS)
        ),
    ]
    for role in roles:
        cleanup.enter_context(role)
    console.print(f"starting the API, a projector and {WORKERS} workers …")
    roles[0].wait_until(announced.exists, seconds=START_SECONDS, what="listening")
    base_url = announced.read_text().strip()
    wait_for_task_type(base_url, roles)
    processes = {"submitter": [os.getpid()]}
    for role in roles:
        processes.setdefault(role.arguments[0], []).append(role.pid)
    processes |= {service.name: [service.pid] for service in stack.status().services if service.pid}
    return base_url, settings, processes


def cpu_seconds(processes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """What each has used of the processor so far."""
    found = {}
    for name, pids in processes.items():
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        found[name] = sum(each.user + each.system for each in times)
    return found


def wait_for_task_type(base_url: str, roles: list[Role]) -> None:
    """The first worker to start registers its task types in the log, where the API reads them."""

    def known() -> bool:
        for role in roles:
            role.check()
        return submit.knows_task_type(base_url)

    roles[0].wait_until(known, seconds=START_SECONDS, what="aware of the task type")


async def run_tasks(base_url: str, settings: Settings) -> Run:
    """Submit both halves at the same time while reading the view, then probe the idle system."""
    rows = airports()
    started = time.monotonic()
    with bar("submitted", len(rows)) as advance:
        by_http, by_library = await asyncio.gather(
            submit.submit_by_http(base_url, rows[::2], advance),
            asyncio.to_thread(submit.submit_by_library, settings, registry, rows[1::2], advance),
        )
    submit_seconds = time.monotonic() - started
    tasks = {**by_http, **by_library}
    with bar("completed", len(tasks)) as advance:
        statuses = await view.read_until_ended(base_url, tasks, advance, seconds=END_SECONDS)
    seconds = time.monotonic() - started
    with TaskProducer(settings, registry.catalogue()) as producer:
        lags = await view.projection_lags(
            base_url,
            lambda: producer.submit(submit.TASK_TYPE, rows[0], priority="high").task_id,
            probes=PROBES,
        )
    return Run(tasks=tasks, statuses=statuses, seconds=seconds, submit_seconds=submit_seconds, lags=lags)


def report(run: Run, spent: Mapping[str, float]) -> int:
    """Print the summary, read back from the view, and compare it with the direct computation."""
    rows: tuple[Airport, ...] = airports()
    by_status = Counter(status["status"] for status in run.statuses.values())
    wrong = verify.differences(rows, {iata: status.get("result") for iata, status in run.statuses.items()})
    table = Table("priority", "tasks", "pickup p50 ms", "pickup p99 ms", title="where the time went")
    for priority in ("high", "normal", "low"):
        pickups = [pickup_ms(status) for status in run.statuses.values() if status["priority"] == priority]
        table.add_row(
            priority, str(len(pickups)), f"{percentile(pickups, 50):.0f}", f"{percentile(pickups, 99):.0f}"
        )
    if console.is_terminal:
        console.print(table)
    else:
        for column in zip(*(column.cells for column in table.columns), strict=True):
            console.print("priority {}: {} tasks, pickup p50 {} ms, p99 {} ms".format(*column))
    console.print(
        f"submitted  {len(run.tasks) / run.submit_seconds:.0f} tasks/s (half over HTTP, half by the library)"
    )
    console.print(
        f"throughput {len(run.tasks) / run.seconds:.0f} tasks/s from the first submission to the last status read"
    )
    console.print(
        f"projection lag when idle: p50 {percentile(run.lags, 50) * 1000:.0f} ms, max {max(run.lags) * 1000:.0f} ms"
    )
    shares = ", ".join(f"{name} {seconds:.1f}" for name, seconds in spent.items())
    console.print(f"processor seconds: {shares}")
    console.print(f"statuses in the view: {dict(by_status)}")
    for line in wrong[:10]:
        console.print(f"difference: {line}")
    if wrong or by_status["completed"] != len(rows):
        console.print(f"[red]{len(wrong)} differences[/red] in {len(rows)} airports")
        return 1
    console.print(f"[green]all {len(rows)} results agree with the direct computation[/green]")
    return 0


def pickup_ms(status: Mapping[str, Any]) -> float:
    """From the submission to the handler's start."""
    begun, created = (
        datetime.fromisoformat(status["started_at"]),
        datetime.fromisoformat(status["created_at"]),
    )
    return (begun - created).total_seconds() * 1000


def percentile(values: list[float], percent: int) -> float:
    """By linear interpolation; needs two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


@contextmanager
def bar(what: str, total: int) -> Iterator[Any]:
    """A progress bar on a terminal, a line elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
    if not console.is_terminal:
        console.print(f"{what} {total}/{total}")


if __name__ == "__main__":
    sys.exit(main())
