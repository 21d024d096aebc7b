"""Processes are signalled only if they are the ones that are meant."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from taskline.infra.local.process import ProcessIdentity, _lingers, end, find, find_marked, send, spawn

_SLEEP = "import time; time.sleep(60)"
_STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"


@pytest.fixture
def marker() -> str:
    return f"-Dtaskline.stack=test-{os.getpid()}-{time.monotonic_ns()}.server"


@pytest.fixture
def sleeper(tmp_path: Path, marker: str) -> Iterator[ProcessIdentity]:
    identity = start(tmp_path, marker, _SLEEP)
    yield identity
    end(identity, grace_s=0)


def start(folder: Path, marker: str, code: str) -> ProcessIdentity:
    command = [sys.executable, "-c", code, marker]
    return spawn(command, marker=marker, output=folder / "output", cwd=folder)


def test_a_child_is_found_in_a_session_of_its_own(sleeper: ProcessIdentity) -> None:
    assert find(sleeper) is not None
    assert os.getsid(sleeper.pid) == sleeper.pid


def test_a_child_is_found_from_the_first_moment(tmp_path: Path, marker: str) -> None:
    for _ in range(30):
        identity = start(tmp_path, marker, _SLEEP)
        assert find(identity) is not None
        end(identity, grace_s=0)


def test_a_recycled_pid_is_never_signalled(sleeper: ProcessIdentity) -> None:
    """The pid is alive, but it is a later process's: another start time, or no such marker."""
    for stale in (
        replace(sleeper, started_at=sleeper.started_at - 60),
        replace(sleeper, marker="-Dtaskline.stack=another.server"),
    ):
        assert find(stale) is None
        assert not send(stale, signal.SIGTERM)
        end(stale, grace_s=1.0)
        end(stale, grace_s=0.0)
        assert find(sleeper) is not None


def test_the_clock_may_be_corrected_a_little(sleeper: ProcessIdentity) -> None:
    assert find(replace(sleeper, started_at=sleeper.started_at + 1.5)) is not None


def test_a_pid_of_nobody(sleeper: ProcessIdentity) -> None:
    unused = next(pid for pid in range(2**22 - 1, 0, -1) if not psutil.pid_exists(pid))
    assert find(replace(sleeper, pid=unused)) is None


def test_a_gentle_end(sleeper: ProcessIdentity) -> None:
    started = time.monotonic()
    end(sleeper, grace_s=20)
    assert find(sleeper) is None
    assert time.monotonic() - started < 10


def test_a_paused_process_ends_gently_too(sleeper: ProcessIdentity) -> None:
    assert send(sleeper, signal.SIGSTOP)
    started = time.monotonic()
    end(sleeper, grace_s=20)
    assert find(sleeper) is None
    assert time.monotonic() - started < 10


def test_one_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path, marker: str) -> None:
    identity = start(tmp_path, marker, _STUBBORN)
    deadline = time.monotonic() + 20
    while "ready" not in (tmp_path / "output").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    started = time.monotonic()
    end(identity, grace_s=0.3)
    assert find(identity) is None
    assert time.monotonic() - started >= 0.3


def test_a_child_that_ended_by_itself_is_not_found_and_leaves_no_zombie(tmp_path: Path, marker: str) -> None:
    identity = start(tmp_path, marker, "raise SystemExit(1)")
    deadline = time.monotonic() + 20
    while find(identity) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert find(identity) is None
    time.sleep(0.05)
    find(identity)
    assert not psutil.pid_exists(identity.pid)


def test_marked_processes_are_found(sleeper: ProcessIdentity) -> None:
    assert [found.pid for found in find_marked(sleeper.marker)] == [sleeper.pid]
    assert find_marked(sleeper.marker + "x") == []
    end(sleeper, grace_s=0)
    assert find_marked(sleeper.marker) == []


def test_one_that_becomes_a_zombie_between_two_questions_is_not_gone(
    sleeper: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(process: psutil.Process) -> list[str]:
        raise psutil.ZombieProcess(process.pid)

    with monkeypatch.context() as patched:
        patched.setattr(psutil.Process, "cmdline", dying)
        assert _lingers(sleeper)
