"""`taskline status`, `wait`, `list` and `cancel`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click
import httpx
import pytest
from api_kit import Api
from click.testing import CliRunner, Result
from client_kit import TASK_ID, OnApi
from read_kit import event, started, submitted
from structlog.testing import capture_logs

from taskline.cli import cli
from taskline.client import Client
from taskline.client import cli as client_cli
from taskline.client.cli import cancel, list_, status, wait
from taskline.errors import TaskNotFound
from taskline.schemas.events import ErrorCategory, Failed, Priority, Progress, Succeeded
from taskline.schemas.ids import new_task_id


@pytest.fixture
def shell(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    monkeypatch.setattr(client_cli, "Client", partial(Client, transport=OnApi(api), retry_seconds=0.0))
    monkeypatch.delenv("TASKLINE_API_URL", raising=False)
    monkeypatch.delenv("TASKLINE_API_KEY", raising=False)
    runner = CliRunner()

    def run(command: click.Command, *arguments: str, code: int = 0) -> Result:
        done = runner.invoke(command, arguments)
        assert done.exit_code == code, done.output
        return done

    # The API is in this process, and would log to the command's output.
    with capture_logs():
        yield run


def failed_task(api: Api, message: str = "502 \x1b[31mBad\nGateway") -> Any:
    task, execution = submitted(task_type="mail.send"), new_task_id(1)
    error = {"error_class": "E", "message": message, "retryable": True, "traceback": None}
    api.store.put(
        task,
        started(task, execution),
        event(Failed, task, execution=execution, category=ErrorCategory.SERVER, **error),
    )
    return task


def done_task(api: Api) -> Any:
    task, execution = submitted(), new_task_id(1)
    api.store.put(
        task, started(task, execution), event(Succeeded, task, execution=execution, result=b'{"km":6.1}')
    )
    return task


def test_a_state_is_shown_by_lines_or_as_json(api: Api, shell: Callable[..., Result]) -> None:
    task = done_task(api)
    lines = dict(line.split("\t") for line in shell(status, str(task.task_id)).stdout.splitlines())
    assert (lines["status"], lines["result"], lines["attempt"]) == ("completed", '{"km": 6.1}', "1")
    assert "reason" not in lines
    document = json.loads(shell(status, str(task.task_id), "--history", "--json").stdout)
    assert document["result"] == {"km": 6.1}
    assert [each["outcome"] for each in document["history"]["attempts"]] == ["succeeded"]


def test_how_far_a_task_is_is_shown_while_it_runs(api: Api, shell: Callable[..., Result]) -> None:
    task, execution = submitted(), new_task_id(1)
    api.store.put(
        task,
        started(task, execution),
        event(Progress, task, execution=execution, fraction=0.4, message="page\x1b 2"),
    )
    lines = dict(line.split("\t") for line in shell(status, str(task.task_id)).stdout.splitlines())
    assert lines["progress"].startswith("40% page\\x1b 2 (20")
    told = json.loads(shell(status, str(task.task_id), "--json", "--history").stdout)
    assert (told["progress"]["fraction"], told["progress"]["message"]) == (0.4, "page\x1b 2")
    assert told["history"]["attempts"][0]["progress"] == told["progress"]
    with client_cli.Client("http://test", None) as client:
        seen = client.get(task.task_id).progress
        assert seen is not None
        assert (seen.fraction, seen.message, seen.at.tzinfo is not None) == (0.4, "page\x1b 2", True)
        assert client.history(task.task_id).attempts[0].progress == seen


def test_what_tasks_say_can_t_steer_a_terminal(api: Api, shell: Callable[..., Result]) -> None:
    task = failed_task(api)
    for done in (shell(status, str(task.task_id), "--history"), shell(list_)):
        assert "\x1b" not in done.stdout
        assert "E: 502 \\x1b[31mBad Gateway" in done.stdout or "\\u001b" in done.stdout


def test_on_a_terminal_there_are_tables(
    api: Api, shell: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = failed_task(api, "[bold]x[/nothing]")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    for done in (shell(status, str(task.task_id), "--history"), shell(list_)):
        assert "─" in done.stdout
        assert "[bold]x[/nothing]" in done.stdout


def test_a_task_that_is_not_there_ends_the_command(shell: Callable[..., Result]) -> None:
    done = CliRunner().invoke(status, [TASK_ID])
    assert isinstance(done.exception, TaskNotFound)
    shell(status, "x", code=2)


def test_wait_says_by_its_exit_status_how_it_ended(api: Api, shell: Callable[..., Result]) -> None:
    task, open_task = done_task(api), failed_task(api)
    assert "completed" in shell(wait, str(task.task_id)).stdout
    late = shell(wait, str(open_task.task_id), "--timeout", "0.05", "--json", code=124)
    assert json.loads(late.stdout)["status"] == "failed"


def test_lists_are_filtered_and_say_when_there_is_more(api: Api, shell: Callable[..., Result]) -> None:
    tasks = [submitted(priority=Priority.HIGH if number else Priority.LOW) for number in range(5)]
    for task in tasks:
        api.store.put(task)
    ids = sorted((str(task.task_id) for task in tasks), reverse=True)
    all_of_them = shell(list_)
    assert [line.split("\t")[0] for line in all_of_them.stdout.splitlines()] == ids
    assert all_of_them.stderr == ""
    some = shell(list_, "--limit", "2", "--json")
    assert [json.loads(line)["task_id"] for line in some.stdout.splitlines()] == ids[:2]
    assert "there are more" in some.stderr
    low = shell(list_, "--priority", "low", "--created-after", "2020-01-01T00:00:00Z")
    assert len(low.stdout.splitlines()) == 1


def test_url_and_key_come_from_options_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(401)

    monkeypatch.setattr(client_cli, "Client", partial(Client, transport=httpx.MockTransport(answer)))
    monkeypatch.setenv("TASKLINE_API_URL", "http://from-env")
    monkeypatch.setenv("TASKLINE_API_KEY", "tk_env")
    CliRunner().invoke(status, [TASK_ID])
    CliRunner().invoke(status, [TASK_ID, "--url", "http://given", "--key", "tk_given"])
    assert [(each.url.host, each.headers["authorization"]) for each in seen] == [
        ("from-env", "Bearer tk_env"),
        ("given", "Bearer tk_given"),
    ]


def test_a_cancel_says_what_came_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "200": (200, {"task_id": TASK_ID, "status": "cancelled", "cancelled_at": "2026-11-29T15:04:05.120Z"}),
        "202": (202, {"task_id": TASK_ID, "status": "cancel_requested"}),
    }
    for name, (code, document) in answers.items():
        seen: list[str] = []

        def answer(
            request: httpx.Request, code: int = code, document: Any = document, seen: list[str] = seen
        ) -> httpx.Response:
            seen.append(f"{request.method} {request.url.raw_path.decode()}")
            return httpx.Response(code, json=document)

        monkeypatch.setattr(client_cli, "Client", partial(Client, transport=httpx.MockTransport(answer)))
        done = CliRunner().invoke(cancel, [TASK_ID, "--running"])
        assert done.exit_code == 0
        assert done.stdout.strip() == {"200": "cancelled", "202": "requested"}[name]
        assert ("taskline status" in done.stderr) == (name == "202")
        assert seen == [f"DELETE /tasks/{TASK_ID}?running=abort"]


def test_the_commands_are_in_the_table() -> None:
    help_text = CliRunner().invoke(cli, ["--help"]).output
    for name in ("status", "wait", "list", "cancel"):
        assert name in help_text
        assert cli.get_command(click.Context(cli), name) is not None
