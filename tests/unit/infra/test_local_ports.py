"""Which ports a server gets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskline.infra.local import ports
from taskline.infra.local.errors import PortInUse
from taskline.infra.local.ports import (
    LOOPBACK,
    accepts_connections,
    assign,
    ephemeral_range,
    free_port,
    is_free,
)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that something listens on."""
    with socket.create_server((LOOPBACK, free_port())) as server:
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_FREED_WITHIN_S", 0.2)


def test_free_and_taken(taken: int) -> None:
    assert is_free(free_port())
    assert not is_free(taken)
    assert accepts_connections(taken)
    assert not accepts_connections(free_port())


def test_a_free_port_is_outside_the_kernels_own_range() -> None:
    low, high = ephemeral_range()
    for _ in range(20):
        assert not low <= free_port() <= high


def test_a_free_port_is_none_of_those_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "ephemeral_range", lambda: (15_200, 65_535))
    monkeypatch.setattr(ports, "is_free", lambda _port: True)
    excluded = frozenset(range(15_000, 15_190))
    for _ in range(20):
        assert free_port(excluded) in range(15_190, 15_200)


def test_when_the_kernels_range_covers_all_some_port_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "ephemeral_range", lambda: (1_024, 65_535))
    assert is_free(free_port())


def test_the_kernels_range(tmp_path: Path) -> None:
    source = tmp_path / "range"
    source.write_text("20000\t30000\n")
    assert ephemeral_range(source) == (20_000, 30_000)
    source.write_text("nonsense")
    assert ephemeral_range(source) == ephemeral_range(tmp_path / "missing") == (32_768, 60_999)


def test_ports_are_kept_where_they_are_free(taken: int) -> None:
    earlier = {"client": free_port(), "storage": taken}
    chosen = assign(("client", "storage"), fixed={}, earlier=earlier, exclude=frozenset())
    assert chosen["client"] == earlier["client"]
    assert chosen["storage"] not in earlier.values()


def test_a_fixed_port_is_had_or_refused(taken: int) -> None:
    wanted = free_port()
    assert assign(("client",), fixed={"client": wanted}, earlier={"client": taken}, exclude=frozenset()) == {
        "client": wanted
    }
    with pytest.raises(PortInUse, match=f"port {taken} on 127.0.0.1 is needed as client port") as error:
        assign(("client",), fixed={"client": taken}, earlier={}, exclude=frozenset())
    assert error.value.port == taken


def test_a_fixed_port_that_is_spoken_for_is_refused() -> None:
    port = free_port()
    with pytest.raises(PortInUse):
        assign(("client",), fixed={"client": port}, earlier={}, exclude=frozenset({port}))


def test_earlier_ports_do_not_collide_with_fixed_or_excluded_ones() -> None:
    port, other = free_port(), free_port()
    chosen = assign(
        ("client", "storage"), fixed={"client": port}, earlier={"storage": port}, exclude=frozenset({other})
    )
    assert chosen["client"] == port
    assert chosen["storage"] not in {port, other}
