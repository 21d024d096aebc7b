"""The state file: what is written is read, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskline.infra.local.config import SERVICES
from taskline.infra.local.errors import UnreadableState
from taskline.infra.local.process import ProcessIdentity
from taskline.infra.local.state import ServiceState, StackState, read_state, write_state

_identities = st.builds(
    ProcessIdentity,
    pid=st.integers(1, 2**22),
    started_at=st.floats(1e9, 2e9, allow_nan=False),
    marker=st.text(min_size=1, max_size=20),
)
_services = st.builds(
    ServiceState,
    version=st.text(max_size=8),
    address=st.just("127.0.0.1:9092"),
    ports=st.dictionaries(st.sampled_from(["client", "storage", "controller"]), st.integers(1, 65_535)),
    process=st.none() | _identities,
)
_states = st.builds(
    StackState, stack_id=st.text(min_size=1), services=st.dictionaries(st.sampled_from(SERVICES), _services)
)


@given(_states)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, state: StackState) -> None:
    path = tmp_path_factory.mktemp("state") / "state.json"
    write_state(path, state)
    assert read_state(path) == state
    assert [entry.name for entry in path.parent.iterdir()] == ["state.json"]


def test_no_file_is_no_state(tmp_path: Path) -> None:
    assert read_state(tmp_path / "state.json") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "stack_id": "x", "services": {}}',
        '{"format": 1, "stack_id": "x", "services": {"zookeeper": {}}}',
        '{"format": 1, "stack_id": "x", "services": {"kafka": {"version": "4"}}}',
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(UnreadableState, match="not a state file of format 1") as error:
        read_state(path)
    assert error.value.path == path


def test_a_failed_write_leaves_the_old_state(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_state(path, StackState(stack_id="old"))
    unwritable = StackState(stack_id="new", services={"kafka": object()})  # type: ignore[dict-item]
    with pytest.raises(AttributeError):
        write_state(path, unwritable)
    assert json.loads(path.read_text())["stack_id"] == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_stopped_server_keeps_its_ports() -> None:
    process = ProcessIdentity(pid=1, started_at=1.0, marker="-Dx")
    running = ServiceState(version="4", address="127.0.0.1:1", ports={"client": 1}, process=process)
    stopped = StackState(stack_id="x", services={"kafka": running}).without_process("kafka")
    assert stopped.services["kafka"].process is None
    assert stopped.services["kafka"].ports == {"client": 1}
    assert stopped.without_process("cassandra") == stopped
