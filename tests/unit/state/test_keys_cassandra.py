"""API keys over a server whose conditional writes time out, applied or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from cassandra import ConsistencyLevel, OperationTimedOut, WriteTimeout
from cassandra.protocol import ErrorMessage

from taskline.errors import Unavailable
from taskline.state.keys import ApiKey, Scope, mint
from taskline.state.keys_cassandra import CassandraKeys

NOW_MS = 1_795_964_645_120
COLUMNS = (
    "prefix", "secret_hash", "tenant", "scopes", "queues", "name", "created_at", "expires_at", "revoked_at",
)  # fmt: skip
# What a coordinator or the driver says when it gave up waiting; the last is of a kind that the driver has no class for.
TIMEOUTS: tuple[Exception, ...] = (
    WriteTimeout("timed out", write_type=5),
    OperationTimedOut(),
    ErrorMessage(0x1700, "CAS operation result is unknown", None),
)


@dataclass
class Statement:
    """A prepared statement, and what is bound to it."""

    query: str
    is_idempotent: bool = False
    consistency_level: int | None = None
    values: Sequence[Any] = ()

    def bind(self, values: Sequence[Any]) -> Statement:
        assert self.query.count("?") == len(values)
        return replace(self, values=values)


class Session:
    def prepare(self, query: str) -> Statement:
        return Statement(query)


@dataclass
class Server:
    """One row, and how the next conditional writes go: "applied" and "lost" end in a time-out; "late" is applied by the next SERIAL read."""

    row: dict[str, Any] | None = None
    faults: list[str] = field(default_factory=list)
    error: Exception = TIMEOUTS[0]
    late: Callable[[], bool] | None = None
    conditional: int = 0

    def execute(self, statement: Statement) -> asyncio.Future[Sequence[Any]]:
        future: asyncio.Future[Sequence[Any]] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(self._answer(statement))
        except Exception as error:
            future.set_exception(error)
        return future

    def _answer(self, statement: Statement) -> Sequence[Any]:
        if statement.query.startswith("SELECT"):
            # As Paxos: a SERIAL read finishes what was begun, another one does not see it.
            if self.late is not None and statement.consistency_level == ConsistencyLevel.LOCAL_SERIAL:
                self.late()
                self.late = None
            return [] if self.row is None else [tuple(self.row.get(name) for name in COLUMNS)]
        assert not statement.is_idempotent
        self.conditional += 1
        fault = self.faults.pop(0) if self.faults else None
        if fault == "lost":
            raise self.error
        if fault == "late":
            self.late = lambda: self._write(statement)
            raise self.error
        applied = self._write(statement)
        if fault == "applied":
            raise self.error
        return [(applied,)]

    def _write(self, statement: Statement) -> bool:
        values = list(statement.values)
        if statement.query.startswith("INSERT"):
            if self.row is None:
                self.row = dict(zip(COLUMNS, values, strict=False))
                return True
            return False
        if self.row is not None:
            self.row["revoked_at"] = values[0]
        return self.row is not None


def keys_on(server: Server) -> CassandraKeys:
    return CassandraKeys(cast("Any", Session()), cast("Any", server), "k")


def a_key(**changes: Any) -> ApiKey:
    return mint(tenant="acme", scopes=[Scope.READ], now_ms=NOW_MS, **changes).key


@pytest.mark.parametrize("error", TIMEOUTS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("fault", ["applied", "lost", "late"])
@pytest.mark.parametrize("expires_at", [None, NOW_MS + 1])
def test_a_key_that_timed_out_is_looked_up(fault: str, error: Exception, expires_at: int | None) -> None:
    server = Server(faults=[fault], error=error)
    key = a_key(expires_at=expires_at)

    async def main() -> tuple[bool, ApiKey | None]:
        keys = keys_on(server)
        return await keys.add(key), await keys.find(key.prefix)

    assert asyncio.run(main()) == (True, key)
    assert server.conditional == (2 if fault == "lost" else 1)


@pytest.mark.parametrize("fault", ["applied", "lost", "late"])
def test_somebody_else_s_prefix_is_found_behind_a_time_out(fault: str) -> None:
    server, first = Server(), a_key()
    second = replace(a_key(), prefix=first.prefix)

    async def main() -> tuple[bool, bool, ApiKey | None]:
        keys = keys_on(server)
        added = await keys.add(first)
        server.faults = [fault]
        return added, await keys.add(second), await keys.find(first.prefix)

    assert asyncio.run(main()) == (True, False, first)


@pytest.mark.parametrize("error", TIMEOUTS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("fault", ["applied", "lost", "late"])
def test_a_revocation_that_timed_out_is_looked_up(fault: str, error: Exception) -> None:
    server, key = Server(error=error), a_key()

    async def main() -> tuple[ApiKey | None, ApiKey | None]:
        keys = keys_on(server)
        await keys.add(key)
        server.faults = [fault]
        return await keys.revoke(key.prefix, NOW_MS + 5), await keys.find(key.prefix)

    revoked = replace(key, revoked_at=NOW_MS + 5)
    assert asyncio.run(main()) == (revoked, revoked)


def test_a_server_that_never_tells_is_unavailable() -> None:
    server, key = Server(faults=["lost"] * 3), a_key()

    async def main() -> None:
        keys = keys_on(server)
        with pytest.raises(Unavailable, match="stored"):
            await keys.add(key)
        assert await keys.add(key)
        server.faults = ["lost"] * 3
        with pytest.raises(Unavailable, match="revoked"):
            await keys.revoke(key.prefix, NOW_MS)
        assert server.row is not None
        assert server.row.get("revoked_at") is None

    asyncio.run(main())


def test_what_is_not_there_can_t_be_revoked() -> None:
    assert asyncio.run(keys_on(Server()).revoke("abc", NOW_MS)) is None
