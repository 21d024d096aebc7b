"""Reading logs while they are written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest

from taskline.infra.local import logs
from taskline.infra.local.logs import follow, tail


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_FOLLOW_INTERVAL_S", 0.01)


def test_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntwo\n\xff three\n")
    assert tail(log, 2) == ["two", "\ufffd three"]
    assert tail(log, 0) == []
    assert tail(tmp_path / "missing", 5) == []


def _read_in_background(lines: Iterator[str]) -> Queue[str]:
    queue: Queue[str] = Queue()

    def read() -> None:
        for line in lines:
            queue.put(line)

    threading.Thread(target=read, daemon=True).start()
    return queue


def test_follow_over_a_rotation(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\nlast\n")
    queue = _read_in_background(follow(log, 1))
    assert queue.get(timeout=10) == "last"
    with log.open("a") as sink:
        sink.write("half ")
        sink.flush()
        sink.write("line\n")
    assert queue.get(timeout=10) == "half line"
    log.rename(tmp_path / "log.1")
    log.write_text("after\nrotation\n")
    assert [queue.get(timeout=10), queue.get(timeout=10)] == ["after", "rotation"]


def test_follow_waits_for_a_log_that_is_not_there_yet(tmp_path: Path) -> None:
    log = tmp_path / "log"
    queue = _read_in_background(follow(log, 5))
    log.write_text("first\n")
    assert queue.get(timeout=10) == "first"
