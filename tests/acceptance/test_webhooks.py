"""The webhooks example on real servers: every delivery goes as its subscriber makes it go, and the dead ones complete after their replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from examples.webhooks.scenarios import SCENARIOS
from taskline.settings import Settings, as_environment

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
# Two rounds over all subscribers, the second of which is submitted for later.
EVENTS = 2 * len(SCENARIOS)
# Half a minute on a quiet machine.
RUN_SECONDS = 480


def test_every_delivery_goes_as_it_must(settings: Settings) -> None:
    # No member is to be lost here, however slow the machine: what is read again would be told, too.
    kafka = settings.kafka.model_copy(update={"session_timeout_ms": 45_000})
    settings = settings.model_copy(update={"kafka": kafka})
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TASKLINE_")}
    command = ["-m", "examples.webhooks.demo", "--existing", "--json", "--events", str(EVENTS)]
    # A session of its own, by which its processes are known.
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environ | as_environment(settings),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as demo:
        try:
            output, said = demo.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            # Asks it, so that it ends what it has started.
            demo.terminate()
            raise
    assert demo.returncode == 0, said.decode()
    left = [process for process in psutil.process_iter() if _session(process.pid) == demo.pid]
    assert left == []

    report = json.loads(output)
    assert report["differences"] == []
    assert len(report["stories"]) == EVENTS
    dead = {name for name, story in report["stories"].items() if story["status"] == "dead"}
    assert Counter(name.split()[1] for name in dead) == {"strict": 2, "gone": 2, "broken": 2}
    assert set(report["replays"]) == dead
    assert {story["status"] for story in report["replays"].values()} == {"completed"}
    assert {"scheduled", "failed", "completed", "dead"} <= set(report["statuses"])
    waiting = report["waiting"]
    assert waiting["next_attempt_at"] > waiting["last_error"]["at"]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
