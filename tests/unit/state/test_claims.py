"""Claims over a server whose conditional writes time out, applied or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from cassandra import OperationTimedOut, WriteTimeout
from cassandra.protocol import ErrorMessage
from hypothesis import given
from hypothesis import strategies as st

from taskline.errors import Unavailable
from taskline.schemas.ids import TaskId, new_task_id
from taskline.state.claims import Claim, ClaimKey, ClaimKind
from taskline.state.claims_cassandra import CassandraClaims
from taskline.state.claims_memory import MemoryClaims

NOW_MS = 1_795_964_645_120
NAME = ClaimKey(tenant="acme", kind=ClaimKind.IDEMPOTENCY, name="order-17")
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
    values: Sequence[Any] = ()

    def bind(self, values: Sequence[Any]) -> Statement:
        assert self.query.count("?") == len(values)
        return Statement(query=self.query, is_idempotent=self.is_idempotent, values=values)


class Session:
    def prepare(self, query: str) -> Statement:
        return Statement(query)


@dataclass
class Server:
    """One row, and how the next conditional writes go: "applied" and "lost" end in a time-out; "late" is applied after the next look."""

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
        values = list(statement.values)
        if statement.query.startswith("SELECT"):
            answer = [] if self.row is None else [tuple(self.row.get(name) for name in COLUMNS)]
            if self.late is not None:
                self.late()
                self.late = None
            return answer
        if "SET outcome" in statement.query:
            assert self.row is not None
            self.row["outcome"] = values[1]
            return []
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
            if self.row is not None:
                return False
            self.row = dict(zip(COLUMNS, values[3:8], strict=False))
            return True
        if self.row is None or self.row["owner"] != values[-1]:
            return False
        self.row |= dict(zip(COLUMNS, values[1:6], strict=False))
        return True


COLUMNS = ("task_id", "owner", "request_hash", "deadline", "expires_at", "outcome")


def claims_on(server: Server) -> CassandraClaims:
    return CassandraClaims(cast("Any", Session()), cast("Any", server), "k")


def wanted(owner: UUID | None = None) -> Claim:
    return Claim(
        key=NAME,
        task_id=new_task_id(NOW_MS),
        owner=owner or uuid4(),
        request_hash=b"h",
        deadline=NOW_MS + 20_000,
        expires_at=NOW_MS + 86_400_000,
    )


@pytest.mark.parametrize("error", TIMEOUTS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("fault", ["applied", "lost", "late"])
def test_a_claim_that_timed_out_is_looked_up(fault: str, error: Exception) -> None:
    server = Server(faults=[fault], error=error)
    claim = wanted()
    assert asyncio.run(claims_on(server).take(claim, NOW_MS)) == claim
    assert server.row is not None
    assert server.row["owner"] == claim.owner
    assert server.conditional == (1 if fault == "applied" else 2)


@pytest.mark.parametrize("fault", ["applied", "lost", "late"])
def test_somebody_else_s_claim_is_found_behind_a_time_out(fault: str) -> None:
    server, first, second = Server(), wanted(), wanted()

    async def main() -> Claim:
        claims = claims_on(server)
        await claims.take(first, NOW_MS)
        server.faults = [fault]
        return await claims.take(second, NOW_MS)

    assert asyncio.run(main()) == first


@pytest.mark.parametrize(("fault", "renewed"), [("applied", True), ("lost", False)])
def test_a_renewal_that_timed_out_is_looked_up(fault: str, renewed: bool) -> None:
    server, first = Server(), wanted()
    second = replace(first, owner=uuid4(), deadline=NOW_MS + 60_000)

    async def main() -> tuple[bool, Claim | None]:
        claims = claims_on(server)
        await claims.take(first, NOW_MS)
        server.faults = [fault]
        return await claims.renew(first, second, NOW_MS), await claims.find(NAME)

    assert asyncio.run(main()) == (renewed, second if renewed else first)


def test_a_server_that_never_tells_is_unavailable() -> None:
    server = Server(faults=["lost"] * 10)
    with pytest.raises(Unavailable):
        asyncio.run(claims_on(server).take(wanted(), NOW_MS))


def test_a_late_outcome_without_its_row_is_no_claim() -> None:
    server = Server(row={"outcome": new_task_id(NOW_MS)})
    assert asyncio.run(claims_on(server).find(NAME)) is None


@given(
    st.lists(st.tuples(st.sampled_from(["take", "renew", "settle", "find"]), st.integers(0, 2)), max_size=12)
)
def test_both_stores_do_the_same(steps: list[tuple[str, int]]) -> None:
    claims = [wanted() for _ in range(3)]
    # Each renewal is another request's.
    owners = [uuid4() for _ in steps]

    async def run(store: Any) -> list[Any]:
        held: Claim | None = None
        told: list[Any] = []
        for (step, number), owner in zip(steps, owners, strict=True):
            claim = replace(claims[number], owner=owner)
            if step == "take":
                held = await store.take(claim, NOW_MS)
                told.append(held)
            elif step == "find":
                told.append(await store.find(NAME))
            elif held is not None and step == "renew":
                told.append(await store.renew(held, claim, NOW_MS))
            elif held is not None:
                outcome: TaskId = claim.task_id
                await store.settle(held, outcome, NOW_MS)
        return told

    assert asyncio.run(run(claims_on(Server()))) == asyncio.run(run(MemoryClaims()))
