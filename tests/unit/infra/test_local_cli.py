"""`taskline local` without servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from taskline.infra.local import cli
from taskline.infra.local.errors import InvalidStackConfig
from taskline.infra.local.process import ProcessIdentity
from taskline.infra.local.stack import LocalStack
from taskline.infra.local.state import ServiceState, StackState, write_state
from taskline.infra.local.status import ServiceStatus, StackStatus


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.local, arguments)


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The folder of a stack whose process is long gone, its pid another's."""
    dead = ProcessIdentity(pid=1, started_at=1.0, marker="-Dtaskline.stack=x.kafka")
    service = ServiceState(version="4.3.1", address="127.0.0.1:29092", ports={"client": 29_092}, process=dead)
    write_state(tmp_path / "state.json", StackState(stack_id="x", services={"kafka": service}))
    log = tmp_path / "kafka" / "logs" / "server.log"
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\nthree\n")
    (tmp_path / "kafka" / "data").mkdir()
    return tmp_path


@pytest.fixture
def fake_start(monkeypatch: pytest.MonkeyPatch) -> list[LocalStack]:
    stacks: list[LocalStack] = []
    services = (
        ServiceStatus(name="kafka", condition="running", version="4.3.1", address="127.0.0.1:1", pid=7),
        ServiceStatus(name="cassandra", condition="running", version="5.0.4", address="127.0.0.1:2", pid=8),
    )

    def start(self: LocalStack) -> tuple[str, ...]:
        stacks.append(self)
        return ("kafka", "cassandra")

    monkeypatch.setattr(LocalStack, "fetch", lambda _self: None)
    monkeypatch.setattr(LocalStack, "start", start)
    monkeypatch.setattr(
        LocalStack, "status", lambda self: StackStatus(directory=self.directory, services=services)
    )
    return stacks


def test_up_prints_addresses_and_settings(tmp_path: Path, fake_start: list[LocalStack]) -> None:
    result = run("up", "--dir", str(tmp_path), "--kafka-port", "29092", "--cassandra-heap-mb", "700")
    assert result.exit_code == 0, result.output
    assert "kafka 4.3.1" in result.stdout
    assert "export TASKLINE_KAFKA__BOOTSTRAP_SERVERS=127.0.0.1:1" in result.stdout
    assert "export TASKLINE_CASSANDRA__CONTACT_POINTS=127.0.0.1" in result.stdout
    assert "export TASKLINE_CASSANDRA__PORT=2" in result.stdout
    config = fake_start[0].config
    assert (config.kafka.port, config.cassandra.port, config.cassandra.heap_mb) == (29_092, None, 700)


def test_up_as_json_is_one_document(tmp_path: Path, fake_start: list[LocalStack]) -> None:
    result = run("up", "--dir", str(tmp_path), "--json", "--only", "kafka")
    told = json.loads(result.stdout)
    assert told["running"] is True
    assert told["environment"]["TASKLINE_CASSANDRA__PORT"] == "2"
    assert fake_start[0].config.services == ("kafka",)


def test_ephemeral_with_a_folder_is_refused(tmp_path: Path) -> None:
    assert isinstance(run("up", "--ephemeral", "--dir", str(tmp_path)).exception, InvalidStackConfig)


def test_status_of_nothing(tmp_path: Path) -> None:
    result = run("status", "--dir", str(tmp_path))
    assert (result.exit_code, "no stack was ever started" in result.stdout) == (3, True)
    assert json.loads(run("status", "--dir", str(tmp_path), "--json").stdout)["services"] == []


def test_a_stale_state_file_is_a_stopped_stack(stopped: Path) -> None:
    """Its pid belongs to somebody else by now: nothing is signalled, nothing runs."""
    result = run("status", "--dir", str(stopped))
    assert (result.exit_code, "stopped" in result.stdout) == (3, True)
    result = run("down", "--dir", str(stopped))
    assert (result.exit_code, result.stdout) == (0, "nothing was running\n")
    assert json.loads(run("down", "--dir", str(stopped), "--json").stdout) == {"stopped": []}


def test_logs(stopped: Path) -> None:
    assert run("logs", "--dir", str(stopped), "kafka", "-n", "2").stdout == "two\nthree\n"
    both = run("logs", "--dir", str(stopped)).stdout
    assert "== kafka:" in both
    assert "== cassandra:" in both
    assert run("logs", "--dir", str(stopped), "-f").exit_code == 2


def test_reset_asks_and_deletes_only_what_is_the_stacks(stopped: Path) -> None:
    (stopped / "notes.txt").write_text("mine")
    assert run("reset", "--dir", str(stopped)).exit_code == 1
    assert (stopped / "kafka" / "data").exists()
    assert run("reset", "--dir", str(stopped), "--yes").exit_code == 0
    assert {entry.name for entry in stopped.iterdir()} == {"lock", "notes.txt"}
