"""TCP ports on 127.0.0.1: free ones, and the ones that a server had before.

A server's port must lie outside the range from which the kernel takes the source ports of outgoing connections
(`ip_local_port_range`). Inside it, a client that keeps reconnecting while the server is down can be given the server's
own port as its source and connect to itself; the server then finds its port taken when it comes back. That is exactly
what a fault test does.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from taskline.infra.local.errors import LocalStackError, PortInUse

LOOPBACK = "127.0.0.1"

# Below these live well-known services and what people start by hand.
_LOWEST = 15_000
_HIGHEST = 65_535
# Linux' default, used where the kernel does not say.
_DEFAULT_EPHEMERAL = (32_768, 60_999)
# Enough tries to find a hole on any sane machine, few enough to fail at once on a broken one.
_TRIES_PER_PORT = 200
# The port of a server that was just killed is free in a moment; a port held for longer is another's. Seconds.
_FREED_WITHIN_S = 5.0
_POLL_S = 0.1

_RANDOM = random.SystemRandom()


def ephemeral_range(source: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> tuple[int, int]:
    """The first and last port that the kernel may choose for outgoing connections."""
    try:
        first, last = source.read_text(encoding="ascii").split()
        return int(first), int(last)
    except (OSError, ValueError):
        return _DEFAULT_EPHEMERAL


def is_free(port: int) -> bool:
    """Whether a server could listen on 127.0.0.1:port now (connections in TIME_WAIT do not count)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def accepts_connections(port: int, *, timeout_s: float = 0.5) -> bool:
    """Whether something accepts TCP connections on 127.0.0.1:port."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def free_port(exclude: frozenset[int] = frozenset()) -> int:
    """Choose a free port at random; another process may still take it before it is bound.

    Raises:
        LocalStackError: The machine has no free ports to speak of.
    """
    low, high = ephemeral_range()
    below = range(_LOWEST, min(low, _HIGHEST))
    above = range(max(high + 1, _LOWEST), _HIGHEST + 1)
    pool = max(below, above, key=len)
    if len(pool) < _TRIES_PER_PORT:
        pool = range(
            _LOWEST, _HIGHEST + 1
        )  # the kernel's range covers all: a rare trap is better than no server
    for _ in range(_TRIES_PER_PORT):
        candidate = _RANDOM.choice(pool)
        if candidate not in exclude and is_free(candidate):
            return candidate
    raise LocalStackError(f"no free port between {pool.start} and {pool.stop - 1}")


def assign(
    purposes: Sequence[str], *, fixed: Mapping[str, int], earlier: Mapping[str, int], exclude: frozenset[int]
) -> dict[str, int]:
    """Give each purpose its port: the fixed one, else the one it had before if that is still free, else a free one.

    Args:
        purposes: What ports are needed for.
        fixed: Ports that must be had.
        earlier: Ports that it would be kind to keep.
        exclude: Ports that are spoken for.

    Raises:
        PortInUse: A fixed port is taken.
    """
    chosen: dict[str, int] = {}
    for purpose in purposes:
        spoken_for = exclude | frozenset(chosen.values())
        if purpose in fixed:
            port = fixed[purpose]
            if port in spoken_for or not _free_soon(port):
                raise PortInUse(
                    f"port {port} on {LOOPBACK} is needed as {purpose} port, but is in use", port=port
                )
            chosen[purpose] = port
        elif purpose in earlier and earlier[purpose] not in spoken_for and is_free(earlier[purpose]):
            chosen[purpose] = earlier[purpose]
        else:
            chosen[purpose] = free_port(spoken_for | frozenset(fixed.values()))
    return chosen


def _free_soon(port: int) -> bool:
    deadline = time.monotonic() + _FREED_WITHIN_S
    while not is_free(port):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
