"""`make webhooks`: deliver events to subscribers that misbehave, tell each delivery's story from the view, mend, replay.

Starts a Kafka, a Cassandra, the API, a projector, a delay role and two workers on free ports of this machine, and stops them again; with
`--existing` it takes the servers that the settings name. Exits 1 on any difference between what was to happen and what the view
and the subscribers say.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.webhooks import replay, verify
from examples.webhooks.data import Report, reports
from examples.webhooks.receiver import Receiver
from examples.webhooks.scenarios import SCENARIOS, Scenario
from examples.webhooks.story import Story, tell
from examples.webhooks.tasks import TASK_TYPE, Delivery, registry
from examples.webhooks.view import View
from taskline import Priority, Settings, Submission, TaskHandle, TaskProducer, load_settings
from taskline.errors import TasklineError
from taskline.infra.kafka.admin import create_topics
from taskline.infra.kafka.requests import admin_client
from taskline.infra.local.config import StackConfig
from taskline.infra.local.roles import Role
from taskline.infra.local.stack import LocalStack
from taskline.infra.telemetry import configure_logging
from taskline.infra.topics import Topics
from taskline.settings import TelemetrySettings
from taskline.state.migrations import migrate

ROOT = Path(__file__).parents[2]
# The demo's own API: on a free port of this machine, so it asks nobody for a key.
API = {"host": "127.0.0.1", "port": 0, "auth": "off"}
WORKERS = 2
# Thirty for each subscriber.
EVENTS = 30 * len(SCENARIOS)
# All deliveries take some seconds; a slow machine may take minutes.
END_SECONDS = 300.0
START_SECONDS = 120.0
REQUEST_SECONDS = 10.0
# Every third round over the subscribers is submitted for later: by 1 s, 1.5 s, …, 3.5 s.
DELAYED_ROUND = 3
LEAST_DELAY_SECONDS = 1.0
DELAY_STEP_SECONDS = 0.5
DELAY_STEPS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One delivery to make."""

    name: str
    scenario: Scenario
    report: Report
    # In seconds; None: at once.
    delay: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one run left behind."""

    events: Sequence[Event]
    # By the event's name, before anything was mended.
    stories: Mapping[str, Story]
    # The tasks that died, read again after their replay.
    dead: Mapping[str, Story]
    # What replays them, by the same names.
    replays: Mapping[str, Story]
    # A task as it stood while its next attempt waited.
    waiting: Mapping[str, Any] | None
    # Every status that a read has met.
    met: Sequence[str]
    # By the event's name, one line each.
    wrong: Sequence[str]
    # From the first submission to the last end, and from the first replay to the last end.
    seconds: float
    replay_seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        The exit status.
    """
    options = _parse(argv)
    # Asked to stop, it ends what it has started, as after Ctrl-C (which a shell's background jobs ignore unless told otherwise).
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    # Of --json only the document goes to standard output.
    console = Console(soft_wrap=True, highlight=False, stderr=options.json)
    configure_logging(TelemetrySettings(log_level="error"))
    try:
        with ExitStack() as cleanup:
            settings = own_servers(cleanup, console) if not options.existing else existing_servers()
            base_url = start_roles(cleanup, settings, console)
            receiver = cleanup.enter_context(Receiver())
            run = asyncio.run(run_events(settings, base_url, receiver, events(options.events), console))
    except (TasklineError, TimeoutError, httpx.HTTPError) as error:
        console.print(f"[red]failed[/red]: {error or type(error).__name__}")
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 128 + signal.SIGINT
    if options.json:
        print(json.dumps(document(run), default=str, indent=2))
    report(run, console)
    return 1 if run.wrong else 0


def events(count: int) -> list[Event]:
    """The first days of the data set, each for the next subscriber in turn."""
    made = []
    for number, day in enumerate(reports()[:count]):
        turn, place = divmod(number, len(SCENARIOS))
        scenario = SCENARIOS[place]
        later = turn % DELAYED_ROUND == 1 and not scenario.away
        delay = LEAST_DELAY_SECONDS + DELAY_STEP_SECONDS * (number % DELAY_STEPS) if later else None
        made.append(Event(name=f"{day.date} {scenario.name}", scenario=scenario, report=day, delay=delay))
    return made


def own_servers(cleanup: ExitStack, console: Console) -> Settings:
    """A Kafka and a Cassandra that end with the demo."""
    console.print("starting Kafka and Cassandra (the first run downloads them) …")
    stack = cleanup.enter_context(LocalStack(StackConfig(ephemeral=True)).running())
    return Settings.model_validate(
        {
            "kafka": {"bootstrap_servers": stack.bootstrap_servers},
            "cassandra": {"contact_points": stack.contact_points, "port": stack.cassandra_port},
            "api": {"port": 0, "auth": "off"},
        }
    )


def existing_servers() -> Settings:
    """The servers of the settings (environment, taskline.toml); the API is the demo's own all the same."""
    return load_settings(overrides={"api": {"port": 0, "auth": "off"}})


def start_roles(cleanup: ExitStack, settings: Settings, console: Console) -> str:
    """Topics, tables, roles.

    Returns:
        The API's address.
    """
    folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="taskline-webhooks-")))
    create_topics(settings)
    migrate(settings)
    announced = folder / "api.txt"
    commands = {
        "api": ("api", "--announce", str(announced)),
        "projector": ("projector",),
        "delay": ("delay",),
        **{f"worker-{n}": ("worker", "examples.webhooks.tasks:registry") for n in range(WORKERS)},
    }
    console.print(f"starting the API, a projector, a delay role and {WORKERS} workers …")
    roles = [
        cleanup.enter_context(Role(command, settings, log=folder / f"{name}.log", cwd=ROOT))
        for name, command in commands.items()
    ]
    roles[0].wait_until(announced.exists, seconds=START_SECONDS, what="listening")
    base_url = announced.read_text().strip()

    def known() -> bool:
        # The first worker to start registers the type in the log, where the API reads it.
        for role in roles:
            role.check()
        listed = httpx.get(f"{base_url}/task-types", timeout=START_SECONDS, trust_env=False)
        return listed.is_success and TASK_TYPE in {each["name"] for each in listed.json()["task_types"]}

    roles[0].wait_until(known, seconds=START_SECONDS, what="aware of the task type")
    with admin_client(settings.kafka) as admin:
        roles[-1].wait_until(lambda: all_joined(admin, settings), seconds=START_SECONDS, what="in its groups")
    return base_url


def all_joined(admin: AdminClient, settings: Settings) -> bool:
    """Whether every worker has its share: one that joins later takes tasks over, which the stories would tell too."""
    topics = Topics(namespace=settings.kafka.namespace)
    groups = [topics.worker_group("default", priority) for priority in Priority]
    described = admin.describe_consumer_groups(groups, request_timeout=REQUEST_SECONDS).values()
    return all(
        group.state is ConsumerGroupState.STABLE and len(group.members) == WORKERS
        for group in (each.result() for each in described)
    )


async def run_events(
    settings: Settings, base_url: str, receiver: Receiver, chosen: Sequence[Event], console: Console
) -> Run:
    """Submit, wait for the ends, compare; mend the subscribers, replay the dead, compare again."""
    started = time.monotonic()
    with bar(console, "submitted", len(chosen)) as advance:
        tasks = await asyncio.to_thread(submit, settings, receiver, chosen, advance)
    async with View(base_url) as view:
        with bar(console, "ended", len(tasks)) as advance:
            stories, waiting = await asyncio.gather(
                view.stories(tasks, advance, seconds=END_SECONDS),
                let_come_back(view, receiver, [tasks[each.name] for each in chosen if each.scenario.away]),
            )
        seconds = time.monotonic() - started
        wrong = [
            f"{event.name}: {line}"
            for event in chosen
            for line in verify.differences(
                event.scenario,
                stories[event.name],
                receiver.ledger.record(tasks[event.name]),
            )
        ]
        dead = {name: story for name, story in stories.items() if story.status == "dead"}
        console.print(f"mending every subscriber and replaying {len(dead)} dead letters …")
        receiver.mend()
        started = time.monotonic()
        replayed = await replay.replay_all(settings, base_url, dead)
        with bar(console, "replays ended", len(replayed)) as advance:
            replays = await view.stories(replayed, advance, seconds=END_SECONDS)
        replay_seconds = time.monotonic() - started
        dead_now = await view.stories({name: tasks[name] for name in dead}, lambda: None, seconds=END_SECONDS)
        wrong += [
            f"{event.name}: {line}"
            for event in chosen
            if event.name in dead
            for line in verify.replay_differences(
                dead_now[event.name],
                replays.get(event.name),
                receiver.ledger.record(tasks[event.name]),
            )
        ]
        wrong += await replay.still_open(base_url, dead)
        met = sorted(view.met)
    if len(receiver.ledger) != len(tasks):
        wrong.append(f"the receiver has seen {len(receiver.ledger)} keys, not {len(tasks)}")
    return Run(
        events=chosen,
        stories=stories,
        dead=dead_now,
        replays=replays,
        waiting=waiting,
        met=met,
        wrong=wrong,
        seconds=seconds,
        replay_seconds=replay_seconds,
    )


def submit(
    settings: Settings, receiver: Receiver, chosen: Sequence[Event], advance: Callable[[], None]
) -> dict[str, str]:
    """All events, through the producer library.

    Returns:
        Event's name → task id.
    """
    found: dict[str, str] = {}
    with TaskProducer(settings, registry.catalogue()) as producer:
        outcomes = producer.submit_many(
            Submission(
                task_type=TASK_TYPE,
                payload=Delivery(url=receiver.url(event.scenario), report=event.report),
                delay=event.delay,
                timeout_seconds=event.scenario.timeout_seconds,
                max_retries=event.scenario.max_retries,
            )
            for event in chosen
        )
        for event, outcome in zip(chosen, outcomes, strict=True):
            if not isinstance(outcome, TaskHandle):
                raise SystemExit(f"{event.name} was not accepted: {outcome.error}")
            found[event.name] = str(outcome.task_id)
            advance()
    return found


async def let_come_back(view: View, receiver: Receiver, task_ids: list[str]) -> dict[str, Any] | None:
    """Those who are away come back when every delivery to them has failed at least once, as the view tells.

    Returns:
        One of these as it stood while it waited.
    """
    try:
        return await view.until_failed_once(task_ids, seconds=END_SECONDS)
    finally:
        receiver.come_back()


def document(run: Run) -> dict[str, Any]:
    """The run as JSON can have it."""
    return {
        "events": len(run.events),
        "scenarios": summary(run),
        "stories": {name: asdict(story) for name, story in run.stories.items()},
        "replays": {name: asdict(story) for name, story in run.replays.items()},
        "waiting": run.waiting,
        "statuses": run.met,
        "differences": list(run.wrong),
    }


def summary(run: Run) -> list[dict[str, Any]]:
    """A row for each subscriber."""
    rows = []
    for scenario in SCENARIOS:
        names = [event.name for event in run.events if event.scenario is scenario]
        if not names:
            continue
        rows.append(
            {
                "scenario": scenario.name,
                "what": scenario.what,
                "tasks": len(names),
                "expected": verify.expected(scenario),
                "seen": verify.seen(scenario, [run.stories[name] for name in names]),
                "replayed": sum(
                    run.replays[name].status == "completed" for name in names if name in run.replays
                ),
                "differences": sum(
                    line.startswith(tuple(f"{name}:" for name in names)) for line in run.wrong
                ),
            }
        )
    return rows


def report(run: Run, console: Console) -> None:
    """Each delivery's story, and the summary."""
    told = [*run.stories.values(), *run.replays.values()]
    names = sorted({act.worker for story in told for act in story.acts})
    workers = {name: f"w{number}" for number, name in enumerate(names, 1)}
    for name, story in run.stories.items():
        console.print(f"{name}: {tell(story, workers)}", markup=False)
        if name in run.replays:
            console.print(f"{name}: replayed, {tell(run.replays[name], workers)}", markup=False)
    console.print(", ".join(f"{short} is {name}" for name, short in workers.items()))
    table = Table(title="what was to happen, and what the view says")
    rows = summary(run)
    for column in rows[0] if rows else ():
        table.add_column(column)
    for row in rows:
        table.add_row(*map(str, row.values()))
    if console.is_terminal:
        console.print(table)
    else:
        for row in rows:
            console.print(
                "{scenario} ({what}): {tasks} tasks; expected {expected}; seen {seen}; {replayed} replayed; "
                "{differences} differences".format(**row),
                markup=False,
            )
    if run.waiting is not None:
        console.print(
            "while one waited it read {status}, after retry {retry_count} of {max_retries}; next attempt at {next_attempt_at}; "
            "last error {error}".format(error=run.waiting["last_error"]["class"], **run.waiting)
        )
    console.print(f"statuses met on the way: {', '.join(run.met)}")
    attempts = sum(len(story.acts) for story in run.stories.values())
    console.print(
        f"{len(run.stories)} events in {attempts} attempts and {run.seconds:.1f} s; "
        f"{len(run.replays)} replays in {run.replay_seconds:.1f} s"
    )
    for line in run.wrong[:20]:
        console.print(f"difference: {line}", markup=False)
    if run.wrong:
        console.print(f"[red]{len(run.wrong)} differences[/red]")
    else:
        console.print(f"[green]all {len(run.stories)} deliveries went as they had to[/green]")


@contextmanager
def bar(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal, a line elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
    if not console.is_terminal:
        console.print(f"{what} {total}/{total}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.webhooks.demo", description=__doc__)
    most = len(reports())
    parser.add_argument(
        "--events", type=int, default=EVENTS, help=f"how many, 1 to {most} (default {EVENTS})"
    )
    parser.add_argument("--json", action="store_true", help="the whole report as JSON on standard output")
    parser.add_argument(
        "--existing", action="store_true", help="use the Kafka and Cassandra that the settings name"
    )
    options = parser.parse_args(argv)
    if not 1 <= options.events <= most:
        parser.error(f"--events must be from 1 to {most}")
    return options


if __name__ == "__main__":
    sys.exit(main())
