"""Starting and ending servers under the state file, with small Python programs for servers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from taskline.infra.local import crew as crew_module
from taskline.infra.local import ports
from taskline.infra.local.artifacts import Bundle
from taskline.infra.local.config import ServiceName
from taskline.infra.local.crew import Crew
from taskline.infra.local.errors import InvalidStackConfig, NotReady, PortInUse, ServerDied
from taskline.infra.local.java import CASSANDRA_JAVA, Java, JavaRequirement
from taskline.infra.local.launcher import launch
from taskline.infra.local.ports import LOOPBACK, accepts_connections, free_port
from taskline.infra.local.process import find, send
from taskline.infra.local.service import CLIENT_PORT, Runtime, Site
from taskline.infra.local.status import stack_status

LISTEN = """
import socket, sys, time
try:
    server = socket.create_server(("127.0.0.1", int(sys.argv[2])))
except OSError as error:
    sys.exit(f"Failed to bind: {error}")
while True:
    server.accept()[0].close()
"""
DIE = "import sys; print('out of luck'); sys.exit(1)"
SILENT = "import time; time.sleep(60)"

RUNTIME = Runtime(java=Java(home=Path("/jdk"), major=17, version="17.0.1"), jars=Path("/jars"))


@dataclass
class PythonServer:
    """A program that listens on its client port, or does not."""

    name: ServiceName
    code: str = LISTEN
    wanted_port: int | None = None
    java: JavaRequirement = CASSANDRA_JAVA
    bundle: Bundle = field(
        default_factory=lambda: Bundle(title="", slug="", pom="", megabytes=0, landmark="")
    )
    version: str = "1.0"
    port_purposes: tuple[str, ...] = (CLIENT_PORT, "other")
    prepared: int = 0

    def prepare(self, site: Site, runtime: Runtime) -> list[str]:
        self.prepared += 1
        return [sys.executable, "-c", self.code, site.marker, str(site.ports[CLIENT_PORT])]

    def probe(self, site: Site, *, timeout_s: float) -> str | None:
        return None if accepts_connections(site.ports[CLIENT_PORT]) else "not listening"


@pytest.fixture(autouse=True)
def no_java_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "runtime_for", lambda _server: RUNTIME)
    monkeypatch.setattr(ports, "_FREED_WITHIN_S", 0.3)


@pytest.fixture
def kafka() -> PythonServer:
    return PythonServer("kafka")


@pytest.fixture
def crew(tmp_path: Path, kafka: PythonServer) -> Iterator[Crew]:
    crew = Crew(directory=tmp_path, servers={"kafka": kafka, "cassandra": PythonServer("cassandra")})
    yield crew
    crew.end(("kafka", "cassandra"), grace_s=0)


def start(
    crew: Crew, *names: ServiceName, keep_ports: bool = False, timeout_s: float = 30.0
) -> tuple[str, ...]:
    with crew.lock():
        return crew.start(
            crew.load_or_new(), names or ("kafka", "cassandra"), keep_ports=keep_ports, timeout_s=timeout_s
        )


def pid_of(crew: Crew, name: ServiceName) -> int:
    state = crew.load()
    assert state is not None
    process = state.services[name].process
    assert process is not None
    assert find(process) is not None
    return process.pid


def port_of(crew: Crew, name: ServiceName) -> int:
    state = crew.load()
    assert state is not None
    return state.services[name].ports[CLIENT_PORT]


def test_up_down_up(crew: Crew) -> None:
    assert start(crew) == ("cassandra", "kafka")
    pids = {pid_of(crew, "kafka"), pid_of(crew, "cassandra")}
    where = port_of(crew, "kafka")
    assert start(crew) == ()
    assert {pid_of(crew, "kafka"), pid_of(crew, "cassandra")} == pids
    assert stack_status(crew).running

    assert set(crew.end(("kafka", "cassandra"), grace_s=10)) == {"kafka", "cassandra"}
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert [service.condition for service in stack_status(crew).services] == ["stopped", "stopped"]
    assert crew.end(("kafka", "cassandra"), grace_s=10) == ()

    start(crew)
    assert port_of(crew, "kafka") == where


def test_one_server_at_a_time(crew: Crew) -> None:
    assert start(crew, "kafka") == ("kafka",)
    assert start(crew) == ("cassandra",)
    assert crew.end(("kafka",), grace_s=10) == ("kafka",)
    assert {service.name: service.condition for service in stack_status(crew).services} == {
        "kafka": "stopped",
        "cassandra": "running",
    }


def test_a_frozen_server_shows(crew: Crew) -> None:
    start(crew, "kafka")
    state = crew.load()
    assert state is not None
    process = state.services["kafka"].process
    assert process is not None
    send(process, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while stack_status(crew).services[0].condition != "paused":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    send(process, signal.SIGCONT)
    while stack_status(crew).services[0].condition != "running":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_killed_from_outside_is_started_again(crew: Crew) -> None:
    start(crew, "kafka")
    before, where = pid_of(crew, "kafka"), port_of(crew, "kafka")
    os.kill(before, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(before)], timeout=10)
    assert start(crew, "kafka", keep_ports=True) == ("kafka",)
    assert pid_of(crew, "kafka") != before
    assert port_of(crew, "kafka") == where


def test_a_death_is_noticed_at_once_and_shows_the_last_lines(crew: Crew, kafka: PythonServer) -> None:
    kafka.code = DIE
    started = time.monotonic()
    with pytest.raises(ServerDied, match="out of luck") as error:
        start(crew)
    assert time.monotonic() - started < 20
    assert error.value.service == "kafka"
    state = crew.load()
    assert state is not None
    assert crew.running(state) == ()
    assert kafka.prepared == 1


def test_one_that_does_not_answer_in_time_is_ended(crew: Crew, kafka: PythonServer) -> None:
    kafka.code = SILENT
    with pytest.raises(NotReady, match=r"kafka did not answer within 1 s \(not listening\)") as error:
        start(crew, "kafka", timeout_s=1.0)
    assert error.value.timeout_s == 1.0
    state = crew.load()
    assert state is not None
    assert state.services["kafka"].process is None


def test_a_port_lost_between_choice_and_bind_is_replaced(
    crew: Crew, kafka: PythonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server((LOOPBACK, free_port())) as thief:
        lost = thief.getsockname()[1]
        choices = iter([{CLIENT_PORT: lost}])
        real = ports.assign
        monkeypatch.setattr(crew_module, "assign", lambda *a, **k: next(choices, None) or real(*a, **k))
        # The probe must not take the thief for the server, as a real one tells by its cluster's name.
        monkeypatch.setattr(
            PythonServer,
            "probe",
            lambda _self, site, **_: (
                None
                if site.ports[CLIENT_PORT] != lost and accepts_connections(site.ports[CLIENT_PORT])
                else "not ours"
            ),
        )
        start(crew, "kafka")
        assert port_of(crew, "kafka") != lost
        assert kafka.prepared == 2


def test_a_port_asked_for_that_is_taken_is_refused(crew: Crew, kafka: PythonServer) -> None:
    with socket.create_server((LOOPBACK, free_port())) as other:
        kafka.wanted_port = other.getsockname()[1]
        with pytest.raises(PortInUse):
            start(crew, "kafka")
    assert kafka.prepared == 0


def test_a_known_port_does_not_move_silently(crew: Crew, kafka: PythonServer) -> None:
    start(crew, "kafka")
    where = port_of(crew, "kafka")
    crew.end(("kafka",), grace_s=0)
    with socket.create_server((LOOPBACK, where)):
        with pytest.raises(PortInUse):
            start(crew, "kafka", keep_ports=True)
        start(crew, "kafka")
    assert port_of(crew, "kafka") != where
    assert kafka.prepared == 2


def test_a_running_server_is_not_moved(crew: Crew, kafka: PythonServer) -> None:
    start(crew, "kafka")
    kafka.wanted_port = port_of(crew, "kafka")
    assert start(crew, "kafka") == ()
    kafka.wanted_port += 1
    with pytest.raises(InvalidStackConfig, match="runs already on port"):
        start(crew, "kafka")


def test_a_server_that_was_never_written_down_is_ended_before_another_starts(
    crew: Crew, kafka: PythonServer
) -> None:
    """Its starter was killed between the start and the state file; two must not share a data folder."""
    with crew.lock():
        crew.start(crew.load_or_new(), ("cassandra",), keep_ports=False, timeout_s=30)
    state = crew.load()
    assert state is not None
    lost = launch(kafka, crew.site(state, "kafka", {CLIENT_PORT: free_port(), "other": 1}), RUNTIME)
    start(crew, "kafka")
    assert find(lost.process) is None
    pid_of(crew, "kafka")


def test_two_stacks_side_by_side(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = Crew(directory=tmp_path_factory.mktemp("other"), servers=dict(crew.servers))
    try:
        start(crew)
        start(other)
        assert len({port_of(c, n) for c in (crew, other) for n in ("kafka", "cassandra")}) == 4
        crew.end(("kafka", "cassandra"), grace_s=5)
        pid_of(other, "kafka")
    finally:
        other.end(("kafka", "cassandra"), grace_s=0)


# What a test run does: an ephemeral stack, begun in a thread that ends (which would trip the kernel's parent-death signal).
_TEST_RUN = """
import sys, threading, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_local_crew import PythonServer, RUNTIME
from taskline.infra.local import crew, stack
crew.runtime_for = lambda _server: RUNTIME
stack.KafkaServer = lambda _config: PythonServer("kafka")
local = stack.LocalStack(stack.StackConfig(ephemeral=True, services=("kafka",)))
starter = threading.Thread(target=local.start)
starter.start()
starter.join()
time.sleep(0.5)
print(local.directory, local.status().services[0].pid, flush=True)
time.sleep(60)
"""


def test_an_ephemeral_stack_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = _TEST_RUN.format(tests=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            directory, _, pid = run.stdout.readline().strip().rpartition(" ")
            assert psutil.pid_exists(int(pid)), "a server must outlive the thread that started it"
        finally:
            run.kill()
    deadline = time.monotonic() + 20
    while Path(directory).exists() or psutil.pid_exists(int(pid)):
        assert time.monotonic() < deadline, "the reaper left something behind"
        time.sleep(0.05)
