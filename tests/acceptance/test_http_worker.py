"""Workers over HTTP, on real servers: the reference worker in Node does tasks, and leases survive what can happen to them."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from api_process import eventually
from gateway_system import GatewaySystem, gateway_settings

from taskline.schemas.types import TaskType
from taskline.state.fold import Outcome
from taskline.state.status import TaskStatus

LEASE_SECONDS = 2.0
TYPES = tuple(TaskType(name=name, timeout_ms=600_000) for name in ("demo.sleep", "demo.fail"))
NUMBERS = {
    "type": "record",
    "name": "Numbers",
    "fields": [{"name": "numbers", "type": {"type": "array", "items": "long"}}],
}


@pytest.fixture(scope="module")
def system(servers: Any, keyspace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewaySystem]:
    from taskline.state.migrations import migrate

    settings = gateway_settings(
        servers,
        keyspace,
        lease_seconds=LEASE_SECONDS,
        buffer=5,
        unfetched_delay_seconds=0.5,
        idle_seconds=2.0,
    )
    migrate(settings)
    folder = tmp_path_factory.mktemp("gateway")
    schema = folder / "numbers.avsc"
    schema.write_text(json.dumps(NUMBERS))
    with GatewaySystem(settings, folder) as running:
        # As somebody does who has no handlers in Python.
        running.taskline("types", "define", "demo.sum", "--schema", str(schema), "--timeout", "90s")
        running.register(*TYPES)
        yield running


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node")
def test_the_reference_worker_does_tasks_and_leaves_in_peace(system: GatewaySystem) -> None:
    gateway = system.gateway()
    with system.node_worker(gateway.url) as worker:
        sums = [system.submit("demo.sum", {"numbers": [number, 1]}) for number in range(20)]
        # Longer than its lease: the worker extends it.
        slow = system.submit("demo.sleep", {"seconds": 1.5 * LEASE_SECONDS})
        hopeless = system.submit("demo.fail", {"message": "no", "permanent": True})
        again = system.submit("demo.fail", {"message": "not yet"}, max_retries=1)
        states = system.await_ended([*sums, slow, hopeless, again], 60)
        assert [state.status for state in states] == [TaskStatus.COMPLETED] * 21 + [TaskStatus.DEAD] * 2
        assert [state.result for state in states[:20]] == [
            b'{"sum":%d}' % (number + 1) for number in range(20)
        ]
        assert [(row.outcome, row.attempt) for row in system.history(slow.task_id).attempts] == [
            (Outcome.SUCCEEDED, 1)
        ]
        assert [row.attempt for row in system.history(again.task_id).attempts] == [1, 2]
        # What it has in hand when it is asked to stop, it finishes.
        last = system.submit("demo.sleep", {"seconds": 1.0})
        mine = f'"task_id":"{last.task_id}"'
        eventually(lambda: mine in system.log_of("node"), "the worker has the task")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0
    (state,) = system.await_ended([last], 10)
    assert (state.status, state.attempt) == (TaskStatus.COMPLETED, 1)
    assert gateway.role.stop() == 0
